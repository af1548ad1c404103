"""The range of an integer tensor, its frequent values, and whether it ascends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from opgrip.traces.arguments import FormatError
from opgrip.traces.values.model import sample, value_models

FREQUENT = 64
"""How many distinct values are kept with their counts."""
NARROW = 1 << 16
"""Within a range of so many, all elements are counted."""
SAMPLED = 1 << 15
"""Above this many elements, frequent values are counted on an even sample."""


@value_models.register("integers")
@dataclass(frozen=True, slots=True)
class Integers:
    """Frequent values with their counts, and the range of the rest.

    Frequent values carry what a range would lose: an `ignore_index` of -100 beside labels from 0 to 79, or the
    few levels that indices into a pyramid take.

    Attributes
    ----------
    frequent : (value, count) of at most 64 values, the most frequent first
    low, high : range of the other elements, both within it; None where there are none
    others : how many other elements there are
    ascending : no element is smaller than the one before it, as in offsets and sorted keys
    """

    frequent: list[list[int]]
    low: int | None
    high: int | None
    others: int
    ascending: bool

    priority: ClassVar[int] = 10

    @classmethod
    def fit(cls, tensor: torch.Tensor) -> Integers | None:
        """The model of a tensor of integers."""
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool:
            return None
        # torch lacks most operations for the wider unsigned types
        flat = tensor.reshape(-1).to(torch.int64)
        values, counts, scale = _distinct(flat)
        counts, order = counts.sort(descending=True, stable=True)
        values = values[order]
        kept = min(FREQUENT, len(values))
        # a value met once tells nothing that the range does not, unless all values are kept
        if kept < len(values):
            kept = int((counts[:FREQUENT] > 1).sum())
        frequent = [
            [value, round(n * scale)] for value, n in zip(values[:kept].tolist(), counts[:kept].tolist(), strict=True)
        ]
        low, high = _range_without(flat, values, values[:kept])
        others = 0 if low is None else max(1, flat.numel() - sum(count for _, count in frequent))
        ascending = bool((flat[1:] >= flat[:-1]).all()) if flat.numel() > 1 else False
        return cls(frequent, low, high, others, ascending)

    def check(self) -> None:
        """Counts are positive and the range is one."""
        for value, count in self.frequent:
            if type(value) is not int or type(count) is not int or count < 0:
                raise FormatError("frequent values that are not pairs of whole numbers")
        if type(self.others) is not int or self.others < 0 or not (self.frequent or self.others):
            raise FormatError("integers without values")
        if self.others and not (type(self.low) is type(self.high) is int and self.low <= self.high):
            raise FormatError("integers without a range")

    def draw(self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        """The frequent values as often as they were, others evenly from the range, shuffled or ascending."""
        count, device = torch.Size(shape).numel(), generator.device
        repeats = torch.tensor([n for _, n in self.frequent], dtype=torch.int64, device=device)
        frequent = torch.tensor([value for value, _ in self.frequent], dtype=torch.int64, device=device)
        known = self.others + int(repeats.sum())
        if count != known:
            repeats = (repeats * count) // known
        values = frequent.repeat_interleave(repeats)[:count]
        missing = count - len(values)
        if self.low is None or self.high is None:
            values = torch.cat([values, frequent[:1].expand(missing)])
        else:
            # the bound itself is put in below, and one above it may be none of 64 bits
            bound = min(self.high + 1, torch.iinfo(torch.int64).max)
            rest = torch.randint(self.low, max(bound, self.low + 1), (missing,), generator=generator, device=device)
            rest[:1], rest[1:2] = self.low, self.high
            values = torch.cat([values, rest])
        if self.ascending:
            values = values.sort().values
        else:
            values = values[torch.randperm(count, generator=generator, device=device)]
        return values.to(dtype).reshape(shape)


def _distinct(flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Distinct values, how often each was counted, and how many elements each count stands for."""
    low, high = (int(bound) for bound in torch.aminmax(flat))
    if high - low < NARROW:
        histogram = torch.bincount(flat - low)
        values = histogram.nonzero().reshape(-1)
        return values + low, histogram[values], 1.0
    part = sample(flat, SAMPLED)
    values, counts = torch.unique(part, return_counts=True)
    return values, counts, flat.numel() / part.numel()


def _range_without(flat: torch.Tensor, values: torch.Tensor, known: torch.Tensor) -> tuple[int | None, int | None]:
    """Smallest and largest element that is none of the known values; None where there is none.

    Parameters
    ----------
    values : the distinct values of `flat`, or of a sample of it
    """
    rest = values[~torch.isin(values, known)]
    low, high = (int(bound) for bound in torch.aminmax(flat))
    # what a sample missed lies between the bounds of all
    ends = torch.tensor([low, high], device=flat.device)
    rest = torch.cat([rest, ends[~torch.isin(ends, known)]])
    return (int(rest.min()), int(rest.max())) if rest.numel() else (None, None)
