"""Value models of increasing numbers: arithmetic progressions, and offsets such as the bounds of segments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from opgrip.traces.schema.arguments import FormatError
from opgrip.traces.values import drawing as checks
from opgrip.traces.values.drawing import at_quantiles, scaled, shuffled
from opgrip.traces.values.integers import tally
from opgrip.traces.values.model import array_of, leading, taken, value_models

HEADS = (64, 1 << 12)  # numbers of leading elements that are examined, one after the other, until two elements differ
LOOKED_AT = 1 << 14  # number of elements that are compared with the progression; in smaller tensors, all elements are
MOST_STEP = 1 << 62  # maximum of the step and of the span of a progression, so that numbers fit in 64 bits
WIDE_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)


@value_models.register("progression")
@dataclass(frozen=True, slots=True)
class Progression:
    """Value model of a tensor whose element i, in row-major order, is `start + step * (i // repeats % period)`."""

    start: int | float
    step: int | float
    repeats: int
    period: int

    priority: ClassVar[int] = 30

    @classmethod
    def fit(cls, tensor: torch.Tensor) -> Progression | None:
        narrow = tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1
        if tensor.dtype == torch.bool or tensor.dtype.is_complex or narrow:
            return None
        if not _may_be_progression(tensor):
            return None
        if tensor.dtype in WIDE_UNSIGNED:
            # torch lacks most operations for these
            tensor = tensor.to(torch.int64)
        count = tensor.numel()
        places = _looked_at(count)
        values = _at(tensor, places)
        start = values[0].item()
        repeats = _first_change(tensor, places, values)
        if not repeats:
            return None
        step = _at(tensor, np.array([repeats]))[0].item() - start
        if not -MOST_STEP < step < MOST_STEP:
            return None
        blocks = places // repeats
        period = _period(tensor, blocks, values != start + step * blocks, start, step, repeats) or -(-count // repeats)
        if abs(step) * period >= MOST_STEP or not bool((values == start + step * (blocks % period)).all()):
            return None
        return cls(start, step, repeats, period)

    def check(self) -> None:
        checks.whole(self.repeats, "a count of repeats", 1)
        checks.whole(self.period, "a period", 1)
        for value in (self.start, self.step, self.start + self.step * (self.period - 1)):
            if type(value) is int:
                checks.whole(value, "a progression")
            else:
                checks.finite(value, "a progression")

    def draw(self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        places = torch.arange(torch.Size(shape).numel(), device=generator.device)
        places = places // self.repeats % self.period
        whole = type(self.start) is type(self.step) is int
        return ((places if whole else places.double()) * self.step + self.start).to(dtype).reshape(shape)


def _may_be_progression(tensor: torch.Tensor) -> bool:
    for count in HEADS:
        head = leading(tensor, count).reshape(-1)
        values = array_of(head.to(torch.float64 if tensor.dtype.is_floating_point else torch.int64))
        differs = values != values[0]
        repeats = int(differs.argmax())
        if differs[repeats]:
            # nan is not even equal to itself
            return bool(repeats) and _is_progression(values[::repeats])
    return True


def _is_progression(blocks: NDArray[Any]) -> bool:
    ramp = blocks[0] + (blocks[1] - blocks[0]) * np.arange(len(blocks))
    breaks = blocks != ramp
    period = int(breaks.argmax())
    if not breaks[period]:
        return True
    return bool(blocks[period] == blocks[0] and (blocks == np.resize(blocks[:period], len(blocks))).all())


def _looked_at(count: int) -> NDArray[np.int64]:
    if count <= LOOKED_AT:
        return np.arange(count)
    rest = np.linspace(HEADS[-1], count - 1, LOOKED_AT - HEADS[-1], dtype=np.int64)
    return np.concatenate([np.arange(HEADS[-1]), rest])


def _at(tensor: torch.Tensor, places: NDArray[np.int64]) -> NDArray[Any]:
    if tensor.is_contiguous():
        offsets = places
    else:
        indices = np.unravel_index(places, tensor.shape)
        offsets = np.sum([index * step for index, step in zip(indices, tensor.stride(), strict=True)], axis=0)
    elements = taken(tensor, offsets, int(offsets.max()) + 1)
    array: NDArray[Any] = array_of(elements.to(torch.float64 if tensor.dtype.is_floating_point else torch.int64))
    return array


def _first_change(tensor: torch.Tensor, places: NDArray[np.int64], values: NDArray[Any]) -> int | None:
    differs = values != values[0]
    at = int(differs.argmax())
    # nan is not even equal to itself
    if not differs[at] or not at:
        return None
    between = np.arange(places[at - 1] + 1, places[at] + 1)
    return int(between[(_at(tensor, between) != values[0]).argmax()])


def _period(
    tensor: torch.Tensor, blocks: NDArray[np.int64], breaks: NDArray[np.bool_], start: float, step: float, repeats: int
) -> int | None:
    at = int(breaks.argmax())
    if not breaks[at]:
        return None
    between = np.arange(blocks[at - 1] + 1, blocks[at] + 1)
    if not len(between):
        return None
    differs = _at(tensor, between * repeats) != start + step * between
    return int(between[differs.argmax()])


DISTINCT = 64  # maximum number of different lengths that are kept with their counts, instead of quantiles
PROBABILITIES = tuple(at / 16 for at in range(17))  # probabilities of the quantiles that are kept


@value_models.register("offsets")
@dataclass(frozen=True, slots=True)
class Offsets:
    """Value model of ascending integers, (N,), such as offsets: the first, the last, and the distribution of the
    differences.

    Here, the differences are called lengths.

    count : number of lengths
    empty : number of zero lengths
    lengths : (length, count), if there are at most 64 different lengths
    quantiles : 17 equidistant quantiles of the non-zero lengths, if there are more different lengths
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
                raise FormatError(f"quantiles of lengths: expected at least 0, got {self.quantiles[0]}")
        else:
            raise FormatError("offsets: expected `lengths` or `quantiles`, got neither")

    def draw(self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        values = torch.full((torch.Size(shape).numel(),), self.first, dtype=torch.int64, device=generator.device)
        if len(values) > 1:
            lengths = self._lengths(len(values) - 1, generator)
            values[1:] += lengths.cumsum(0)
            values[-1] = self.last
        return values.to(dtype).reshape(shape)

    def _lengths(self, count: int, generator: torch.Generator) -> torch.Tensor:
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
    # the float nearest to the largest integer may be above it
    steps = (steps / steps[-1] * rest).clamp(max=1 << 62).long().clamp(max=rest)
    return base + steps.diff(prepend=steps.new_zeros(1))
