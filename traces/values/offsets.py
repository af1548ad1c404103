"""Where pieces of different lengths begin: bags, sequences, rows of a sparse matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from opgrip.traces.schema.arguments import FormatError
from opgrip.traces.values import drawing as checks
from opgrip.traces.values.drawing import at_quantiles, scaled, shuffled
from opgrip.traces.values.integers import tally
from opgrip.traces.values.model import array_of, leading, value_models

DISTINCT = 64
"""So many different lengths are kept with their counts; of more, quantiles."""
PROBABILITIES = tuple(at / 16 for at in range(17))
"""Those of the quantiles that are kept."""


@value_models.register("offsets")
@dataclass(frozen=True, slots=True)
class Offsets:
    """The first and the last of integers (N,) that ascend, and the lengths between neighbours.

    Sorted numbers of segments are the same thing: each has a length of one or zero.

    Attributes
    ----------
    lengths : (length, count) where there are at most 64 different lengths
    quantiles : of the lengths that are not zero, where there are more; 17, at equal distances
    count : of all lengths
    empty : of those that are zero
    """

    first: int
    last: int
    count: int
    empty: int
    lengths: list[list[int]] | None = None
    quantiles: list[float] | None = None

    priority: ClassVar[int] = 50

    @classmethod
    def fit(cls, tensor: torch.Tensor) -> Offsets | None:
        """The model of integers in one dimension, none of which is smaller than the one before it."""
        dtype = tensor.dtype
        if tensor.dim() != 1 or dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
            return None
        head = leading(tensor, DISTINCT).tolist()
        if head != sorted(head) or len(head) < 2:
            return None
        values = array_of(tensor.to(torch.int64))
        first, last = int(values[0]), int(values[-1])
        if last - first > checks.HIGHEST:
            return None
        lengths = np.diff(values)
        if int(lengths.min()) < 0:
            return None
        sizes, counts = tally(lengths)
        empty = 0 if int(sizes[0]) else int(counts[0])
        if len(sizes) <= DISTINCT:
            pairs = [[size, count] for size, count in zip(sizes.tolist(), counts.tolist(), strict=True)]
            return cls(first, last, len(lengths), empty, lengths=pairs)
        places = [empty + round(at * (len(lengths) - empty - 1)) for at in PROBABILITIES]
        ranks = np.searchsorted(counts.cumsum(), places, side="right")
        return cls(first, last, len(lengths), empty, quantiles=[float(size) for size in sizes[ranks].tolist()])

    def check(self) -> None:
        """Lengths that are none below zero."""
        checks.whole(self.first, "a first offset")
        checks.whole(self.last, "a last offset", self.first, min(checks.HIGHEST, self.first + checks.HIGHEST))
        checks.whole(self.count, "a count of lengths", 1)
        checks.whole(self.empty, "a count of empty pieces", 0, self.count)
        if self.lengths is not None:
            checks.counted(self.lengths, "lengths", DISTINCT)
            for length, _ in self.lengths:
                checks.whole(length, "a length", 0)
            checks.whole(sum(count for _, count in self.lengths), "a count of lengths", self.count, self.count)
        elif self.quantiles is not None:
            checks.rising(self.quantiles, "quantiles of lengths", len(PROBABILITIES))
            if self.quantiles[0] < 0:
                raise FormatError("lengths below zero")
        else:
            raise FormatError("offsets without lengths")

    def draw(self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        """Offsets from the first to the last, the lengths between them in random order."""
        values = torch.full((torch.Size(shape).numel(),), self.first, dtype=torch.int64, device=generator.device)
        if len(values) > 1:
            lengths = self._lengths(len(values) - 1, generator)
            values[1:] += lengths.cumsum(0)
            values[-1] = self.last
        return values.to(dtype).reshape(shape)

    def _lengths(self, count: int, generator: torch.Generator) -> torch.Tensor:
        """So many lengths, in random order, that lead from the first offset to the last."""
        device = generator.device
        if self.lengths is not None:
            sizes = torch.tensor([length for length, _ in self.lengths], dtype=torch.int64, device=device)
            if count == self.count:
                repeats = torch.tensor([times for _, times in self.lengths], dtype=torch.int64, device=device)
                lengths = shuffled(sizes.repeat_interleave(repeats), generator)
                if sum(length * times for length, times in self.lengths) == self.last - self.first:
                    return lengths
            else:
                share = torch.tensor([times / self.count for _, times in self.lengths], device=device).double()
                at = (torch.arange(count, device=device).double() + 0.5) / count
                place = torch.bucketize(at, share.cumsum(0)).clamp(max=len(sizes) - 1)
                lengths = shuffled(sizes[place], generator)
        else:
            assert self.quantiles is not None
            empty = scaled(self.empty, self.count, count)
            drawn = at_quantiles(self.quantiles, PROBABILITIES, count - empty, generator)
            lengths = drawn.clamp(1, checks.HIGHEST >> 1).round().long()
            lengths = shuffled(torch.cat([lengths, lengths.new_zeros(empty)]), generator)
        return _summing_to(lengths, self.last - self.first)


def _summing_to(lengths: torch.Tensor, total: int) -> torch.Tensor:
    """The lengths made longer or shorter in proportion; none that is not zero becomes so, where the total allows it."""
    some = (lengths > 0).long()
    least = int(some.sum())
    if least == 0:
        lengths = some = torch.ones_like(lengths)
        least = len(lengths)
    if total < least:
        base, weights, rest = torch.zeros_like(some), some.double(), total
    else:
        base, weights, rest = some, (lengths - some).double(), total - least
        if not bool(weights.any()):
            weights = some.double()
    steps = weights.cumsum(0)
    # a float's nearest to the highest number may be above it
    steps = (steps / steps[-1] * rest).clamp(max=1 << 62).long().clamp(max=rest)
    return base + steps.diff(prepend=steps.new_zeros(1))
