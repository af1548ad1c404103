"""Medians of a row's repeats, and how sure they are."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, log, sqrt
from statistics import fmean

from opgrip.replay.measuring.repeats import repeats_of
from opgrip.replay.measuring.results import Result
from opgrip.replay.timing.samples import quantile

NORMAL_IQR, OF_MEDIAN = 1.349, 1.2533
"""Interquartile range, and standard error of a median over that of a mean, of a normal distribution of deviation 1."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """The logarithm of a row's median time.

    Attributes
    ----------
    logs : of each repeat
    within : variance of one of them, by the spread of the runs of a repeat
    """

    logs: tuple[float, ...]
    within: float

    @property
    def mean(self) -> float:
        """Over the repeats."""
        return fmean(self.logs)

    @property
    def squares(self) -> float:
        """Sum of squared deviations of the repeats from their mean."""
        return sum((value - self.mean) ** 2 for value in self.logs)


def estimate(row: Result) -> Estimate | None:
    """Of a row's single times, or where they were not kept of its quantiles; None where it took no time."""
    if not 0 < (row.median_us or 0.0) < inf:
        return None
    logs, variances = [], []
    for times, weights in repeats_of(row):
        # 0.5 and a standard deviation of the rank that the median has, as a binomial distribution gives it
        total = sum(weights)
        step = min(0.5, 0.5 * sqrt(sum((weight / total) ** 2 for weight in weights)))
        low, middle, high = (quantile(times, weights, share) for share in (0.5 - step, 0.5, 0.5 + step))
        if not 0 < low <= high < inf:
            return None
        logs.append(log(middle))
        variances.append(((log(high) - log(low)) / 2) ** 2)
    if logs:
        return Estimate(tuple(logs), fmean(variances))
    assert row.median_us is not None, "it is a number above 0"
    deviation = (row.spread or 0.0) / NORMAL_IQR * OF_MEDIAN / sqrt(max(row.samples, 1))
    return Estimate((log(row.median_us),), deviation**2)
