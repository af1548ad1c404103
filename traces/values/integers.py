"""Value model of integer tensors: range, frequent values, number of other values, and order."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from opgrip.traces.schema.arguments import FormatError
from opgrip.traces.values import drawing as checks
from opgrip.traces.values.drawing import between, distinct, parts, scaled, shuffled
from opgrip.traces.values.model import PIECES, array_of, every_so_many, value_models
from opgrip.traces.values.order import Ordered, last_length, order_of

Integers1D = NDArray[np.int64]

WIDEST = 1 << 22  # maximum width of a range whose numbers are counted individually
SORTED = 1 << 20  # maximum number of elements that are all sorted and counted; larger tensors are sampled
SAMPLED = 1 << 15
HASHED = 1 << 18  # approximate number of elements whose distinct values are counted to estimate the total


def tally(flat: Integers1D) -> tuple[Integers1D, Integers1D]:
    """Return the distinct values of an array, (N,), in ascending order, and the count of each."""
    low, high = int(flat.min()), int(flat.max())
    if is_narrow(low, high, len(flat)):
        histogram = np.bincount(flat - low if low else flat)
        values = histogram.nonzero()[0]
        return values + low, histogram[values]
    ranked = np.sort(flat)
    ends = (ranked[1:] != ranked[:-1]).nonzero()[0] + 1
    starts = np.concatenate([[0], ends])
    return ranked[starts], np.diff(starts, append=len(flat))


def is_narrow(low: int, high: int, count: int) -> bool:
    return high - low < min(max(4 * count, 1024), WIDEST)


def estimate(flat: Integers1D) -> tuple[Integers1D, Integers1D, int]:
    values, counts = tally(every_so_many(flat, SAMPLED))
    # equal elements have equal hashes, so the number of distinct values in a part of the hashes can be extrapolated
    bits = max(0, (len(flat) // HASHED).bit_length())
    hashed = (flat * np.int64(-7046029254386353131)) >> 32
    part = flat[(hashed & ((1 << bits) - 1)) == 0]
    distinct_in_part = len(tally(part)[0]) if len(part) else 0
    return values, counts, min(len(flat), max(len(values), distinct_in_part << bits))


FREQUENT = 64  # number of distinct values that are kept with their counts
SENTINELS = 4  # maximum number of negative values that count as special, such as an `ignore_index`


@value_models.register("integers")
@dataclass(frozen=True, slots=True)
class Integers(Ordered):
    """Value model of integers: frequent values with their counts, and range and number of the other elements.

    frequent : (value, count) of at most 64 values, which include zero if it occurs
    low, high : smallest and largest element that is not a frequent value; None if there is none
    others : number of elements that are not frequent values
    ascending : True if the elements are sorted, as in offsets and sorted keys
    distinct : number of distinct values, including frequent ones
    zipf : exponent z of a Zipf distribution: the r-th most frequent of the other values occurs about in proportion to
        r**-z
    total : sum of all elements, if it is known from an operator's output
    """

    frequent: list[list[int]]
    low: int | None
    high: int | None
    others: int
    ascending: bool
    distinct: int | None = None
    zipf: float = 0.0
    total: int | None = None

    priority: ClassVar[int] = 60
    examined_part: ClassVar[str] = PIECES

    @classmethod
    def fit(cls, tensor: torch.Tensor) -> Integers | None:
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool:
            return None
        # torch lacks most operations for the wider unsigned types
        flat = array_of(tensor.to(torch.int64)).reshape(-1)
        low, high = int(flat.min()), int(flat.max())
        counted = len(flat) <= SORTED or is_narrow(low, high, len(flat))
        values, counts, distinct_estimate = (*tally(flat), None) if counted else estimate(flat)
        scale = 1.0 if counted else len(flat) / int(counts.sum())
        frequent = _frequent(values, counts, complete=counted)
        if low <= 0 <= high and (len(frequent) < len(counts) or not counted):
            frequent = _with_required(frequent, [[0, int(counts[_places(values, [0])].sum())]])
        below = int(np.searchsorted(values, 0))
        if below <= min(SENTINELS, len(values) // 2):
            frequent = _with_required(
                frequent, [list(pair) for pair in zip(values[:below].tolist(), counts[:below].tolist(), strict=True)]
            )
        frequent_values = [value for value, _ in frequent]
        rest = counts.copy()
        rest[_places(values, frequent_values)] = 1
        zipf = _zipf(rest)
        bounds = _range_without(low, high, values, set(frequent_values))
        frequent = [[value, round(count * scale)] for value, count in frequent]
        if not counted and 0 in frequent_values:
            zeros = len(flat) - int(np.count_nonzero(flat))
            frequent = [[value, count if value else zeros] for value, count in frequent]
        others = 0 if bounds[0] is None else max(1, len(flat) - sum(count for _, count in frequent))
        order = order_of(flat, last_length(tensor))
        return cls(
            frequent,
            *bounds,
            others,
            order.get("falls") == 0,
            len(values) if distinct_estimate is None else distinct_estimate,
            zipf,
            **order,
        )

    def check(self) -> None:
        checks.counted(self.frequent, "frequent values", FREQUENT)
        frequent_count = sum(count for _, count in self.frequent)
        checks.whole(self.others, "a count of other values", 0, checks.HIGHEST - frequent_count)
        if not self.others + frequent_count:
            raise FormatError("integers: `frequent` is empty and `others` is 0, so there are no values to draw")
        if self.others or self.low is not None or self.high is not None:
            checks.whole(self.low, "a lower bound")
            checks.whole(self.high, "an upper bound", self.low or 0)
        checks.flag(self.ascending, "ascending")
        if self.distinct is not None:
            checks.whole(self.distinct, "a count of distinct values", 1)
        checks.finite(self.zipf, "an exponent")
        if not 0 <= self.zipf <= 16:
            raise FormatError(f"the exponent of a Zipf distribution is invalid: {self.zipf}")
        if self.total is not None:
            checks.whole(self.total, "a total")
        self.check_order()

    def draw(self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        count, device = torch.Size(shape).numel(), generator.device
        fitted_count = self.others + sum(n for _, n in self.frequent)
        repeats = torch.tensor([n * count // fitted_count for _, n in self.frequent], dtype=torch.int64, device=device)
        frequent = torch.tensor([value for value, _ in self.frequent], dtype=torch.int64, device=device)
        missing = count - int(repeats.sum())
        if self.low is None or self.high is None:
            rest = frequent[:1].expand(missing)
        else:
            rest = self._remaining_values(missing, self.low, self.high, frequent, generator)
        values = shuffled(torch.cat([frequent.repeat_interleave(repeats), rest]), generator)
        if self.total is not None:
            values = _summing_to(values, self.total)
        if self.rises is None and self.ascending:
            values = values.sort().values
        else:
            values = self.arranged(values, shape, generator)
        return values.to(dtype).reshape(shape)

    def _remaining_values(
        self, count: int, low: int, high: int, frequent: torch.Tensor, generator: torch.Generator
    ) -> torch.Tensor:
        if self.distinct is None:
            rest = between(low, high, count, generator)
            rest[:1], rest[1:2] = low, high
            return rest
        kinds = max(1, self.distinct - sum(n > 0 for _, n in self.frequent))
        kinds = min(count, kinds if count == self.others else max(1, scaled(kinds, max(1, self.others), count)))
        bounds = torch.tensor([low, high][: min(kinds, 1 + (low < high))], dtype=torch.int64, device=generator.device)
        # negative elements are not expected here: in old traces, they are special values
        least = 0 if 0 < -low * kinds < high - kinds - len(frequent) else low + 1
        inner = distinct(kinds + len(frequent), least, high - 1, generator) if kinds > 2 else bounds[:0]
        inner = inner[~torch.isin(inner, frequent)][: kinds - len(bounds)]
        values = shuffled(torch.cat([bounds, inner]), generator)
        if not count:
            return values[:0]
        ranks = torch.arange(1, len(values) + 1, dtype=torch.float64, device=generator.device)
        # they may not become more frequent than the frequent values
        most = min((n for value, n in self.frequent if value and n), default=None) if count == self.others else None
        return values.repeat_interleave(parts(count, ranks.pow(-self.zipf), most))


def _frequent(values: Integers1D, counts: Integers1D, complete: bool) -> list[list[int]]:
    places = np.argsort(-counts, kind="stable")[:FREQUENT]
    most = counts[places]
    # a value that occurs once adds nothing to the range, unless all values are kept
    count = len(counts) if complete and len(counts) <= FREQUENT else int(np.count_nonzero(most > 1))
    return [list(pair) for pair in zip(values[places[:count]].tolist(), most[:count].tolist(), strict=True)]


def _with_required(frequent: list[list[int]], required: list[list[int]]) -> list[list[int]]:
    there = {value for value, _ in frequent}
    added = [pair for pair in required if pair[0] not in there]
    return [*frequent[: FREQUENT - len(added)], *added]


def _places(values: Integers1D, queries: list[int]) -> Integers1D:
    query_values = np.array(queries, dtype=np.int64)
    places = np.searchsorted(values, query_values).clip(max=len(values) - 1)
    there: Integers1D = places[values[places] == query_values]
    return there


def _range_without(low: int, high: int, values: Integers1D, frequent: set[int]) -> tuple[int | None, int | None]:
    few = len(frequent) + 1
    others = [value for value in [low, *values[:few].tolist(), *values[-few:].tolist(), high] if value not in frequent]
    return (min(others), max(others)) if others else (None, None)


def _zipf(counts: Integers1D) -> float:
    most = int(counts.max()) if len(counts) else 0
    if most < 2:
        return 0.0
    # number of values with at least this count
    ranks = np.bincount(counts)[::-1].cumsum()
    probe_ranks = [2**power for power in range(len(counts).bit_length())]
    sizes = (most - np.searchsorted(ranks, probe_ranks)).tolist()
    points = [(math.log(2**power), math.log(size - 1)) for power, size in enumerate(sizes) if size > 1]
    if len(points) < 2:
        return 0.0
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    slope: float = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    return min(8.0, max(0.0, -slope))


def _summing_to(values: torch.Tensor, total: int) -> torch.Tensor:
    low, high = (int(bound) for bound in torch.aminmax(values))
    if max(abs(low), abs(high)) * len(values) > checks.HIGHEST:
        return values
    # one element keeps each bound of the range
    fixed = (values == low) & ((values == low).cumsum(0) == 1) | (values == high) & ((values == high).cumsum(0) == 1)
    while missing := total - int(values.sum()):
        room = (high if missing > 0 else low) - values
        room = room.masked_fill(fixed, 0)
        places = room.nonzero().reshape(-1)[: abs(missing)]
        if not len(places):
            break
        step = max(1, abs(missing) // len(places))
        steps = room[places].clamp(-step, step)
        values = values.index_add(0, places, steps)
    return values
