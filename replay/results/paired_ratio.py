"""The time of one function divided by that of another, from runs of both in turn, with its error."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import comb, exp, fsum, hypot, log, pi, sqrt
from statistics import fmean, stdev

from opgrip.replay.results.columns import Columns, column
from opgrip.replay.results.results import Result

SLOWER, FASTER, EQUAL, UNDECIDED = "slower", "faster", "equal", "undecided"
MARGIN = 0.05  # relative difference of two times up to which they count as equal
CERTAIN = 3.3  # standard errors by which a time must differ to be slower or faster: 1 in 1,000 if errors are normal
CHANCE = 1e-3  # largest probability of chance of a verdict, by the sign test
WITHIN_95 = 1.96
# standard deviation of the log ratio of two identical functions' times in one process, which no number of runs averages
# out: with exchanged arguments, and with arguments in different memory
#
# In 314 comparisons of a softmax with itself in 8 processes with exchanged arguments, 1 % were beyond the 95 % interval
# and none beyond `CERTAIN` errors; without exchange, one of 160 differed from itself by 9 %.
SAME_MEMORY, OTHER_MEMORY = 0.01, 0.04
CLOCK_US = 0.1  # the same standard deviation in us, of short calls
TRIMMED = 0.2  # share of the pairs that a trimmed mean leaves out at each end
LEAST_PER_ARRANGEMENT = 4  # minimum number of pairs in each arrangement with which arrangements are distinguished


@dataclass(frozen=True, slots=True)
class PairedColumns(Columns):
    ratio_error: float | None = column(
        "standard error of the natural logarithm of `ratio_p50`; 0.01 is an error of 1 %", hidden=True
    )
    ratio_chance: float | None = column(
        "p-value of a sign test: probability of such a difference in the paired runs if both rows were equally fast",
        "1",
        hidden=True,
    )


@dataclass(frozen=True, slots=True)
class PairedRatio:
    """The time of a function divided by that of another, from runs of both in turn.

    low, middle, high : 10th percentile, trimmed mean and 90th percentile of the ratio of two runs
    """

    low: float
    middle: float
    high: float
    error: float  # standard error of the natural logarithm of `middle`
    chance: float  # two-sided p-value of the sign test

    @classmethod
    def of(cls, row: Result) -> PairedRatio | None:
        columns = PairedColumns.of(row)
        if not row.ratio_p10 or not row.ratio_p50 or not row.ratio_p90 or columns.ratio_error is None:
            return None
        chance = 1.0 if columns.ratio_chance is None else columns.ratio_chance
        return cls(row.ratio_p10, row.ratio_p50, row.ratio_p90, columns.ratio_error, chance)

    @property
    def verdict(self) -> str:
        difference = log(self.middle)
        if abs(difference) > CERTAIN * self.error and self.chance < CHANCE:
            return SLOWER if difference > 0 else FASTER
        return EQUAL if abs(difference) + WITHIN_95 * self.error < log(1 + MARGIN) else UNDECIDED

    @property
    def undecided_because(self) -> str | None:
        if self.verdict != UNDECIDED:
            return None
        if abs(log(self.middle)) <= WITHIN_95 * self.error:
            return f"the 95 % interval contains 1 and differences of over {100 * MARGIN:.0f} %"
        if abs(log(self.middle)) <= CERTAIN * self.error:
            low, high = self._within(CERTAIN)
            return f"a verdict needs a certainty of 99.9 %, and that interval, {low:.3f} to {high:.3f}, contains 1"
        return (
            f"by a sign test of the runs, the difference is chance with a probability of {100 * self.chance:.2g} %, "
            f"and a verdict needs less than {100 * CHANCE:.1g} %"
        )

    @property
    def interval(self) -> tuple[float, float]:
        return self._within(WITHIN_95)

    def _within(self, errors: float) -> tuple[float, float]:
        return self.middle * exp(-errors * self.error), self.middle * exp(errors * self.error)


def paired_ratio(pairs: Iterable[tuple[int, float, float]], base_us: float, are_exchanged: bool) -> PairedRatio | None:
    """Return the ratio of the times of two functions.

    pairs : for each pair of runs: number of the assignment of inputs to functions, time of the function, time of the
        other function
    """
    groups_of: dict[int, list[float]] = {}
    for arrangement, ours, theirs in pairs:
        # shorter than reading the clock
        if ours > 0 and theirs > 0:
            groups_of.setdefault(arrangement, []).append(log(ours / theirs))
    groups = list(groups_of.values())
    logs = [item for group in groups for item in group]
    if not logs:
        return None
    if min(map(len, groups)) < LEAST_PER_ARRANGEMENT:
        groups, are_exchanged = [logs], False
    middles = [_trimmed_mean(group) for group in groups]
    middle = fmean(own for own, _ in middles)
    of_runs = sqrt(fsum(own_error**2 for _, own_error in middles)) / len(groups)
    of_memory = SAME_MEMORY if are_exchanged else OTHER_MEMORY
    error = hypot(of_runs, of_memory, CLOCK_US / max(base_us, CLOCK_US))
    rest = sorted(item - own for group, (own, _) in zip(groups, middles, strict=True) for item in group)
    low, high = (exp(middle + rest[round(share * (len(rest) - 1))]) for share in (0.1, 0.9))
    return PairedRatio(low, exp(middle), high, error, _chance([item + middle for item in rest]))


def with_joined_pairs(joined: Result, rows: Sequence[Result]) -> Result:
    known = [ratio for row in rows if (ratio := PairedRatio.of(row)) is not None]
    if not known:
        return joined
    of_one = sqrt(fmean(item.error**2 for item in known))
    between = stdev(log(item.middle) for item in known) if len(known) > 1 else 0.0
    error = max(of_one, between) * (sqrt(pi / 2 / len(known)) if len(known) > 1 else 1.0)
    return joined.adding(PairedColumns(error, _joined_chance([item.chance for item in known])))


def _chance(logs: Sequence[float]) -> float:
    above, below = sum(item > 0 for item in logs), sum(item < 0 for item in logs)
    as_few = sum(comb(above + below, number) for number in range(min(above, below) + 1))
    return min(1.0, float(2 * as_few / 2 ** (above + below)))


def _joined_chance(chances: Sequence[float]) -> float:
    # Fisher 1932, Statistical Methods for Research Workers, section 21.1: chi squared with 2n degrees of freedom
    half = -fsum(log(max(chance, sys.float_info.min)) for chance in chances)
    term = total = exp(-half)
    for number in range(1, len(chances)):
        term *= half / number
        total += term
    return min(total, 1.0)


def _trimmed_mean(numbers: Sequence[float]) -> tuple[float, float]:
    # Yuen 1974, The two-sample trimmed t for unequal population variances. Not a median, because times have several
    # levels, by memory that no arrangement controls, and a median may be of any of them.
    ordered, cut = sorted(numbers), int(TRIMMED * len(numbers))
    kept = ordered[cut : len(ordered) - cut]
    if len(kept) < 2:
        return fmean(kept), 0.0
    winsorized = [kept[0]] * cut + kept + [kept[-1]] * cut
    return fmean(kept), stdev(winsorized) * sqrt((len(ordered) - 1) / (len(kept) * (len(kept) - 1)))
