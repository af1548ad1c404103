"""How much a case's median varies between replays: estimated from its repeats, and learned from all cases.

The variance of each case over its repeats is drawn towards that of all, as by G. K. Smyth, "Linear models and
empirical Bayes methods for assessing differential expression in microarray experiments", Statistical Applications in
Genetics and Molecular Biology 3 (2004), article 3, section 6.2.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, inf, log, sqrt
from statistics import fmean, variance

from opgrip.cli.plugins import needed
from opgrip.replay.results.repeats import repeats_of
from opgrip.replay.results.results import CONTENDED, Result
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
    gaps : of each repeat, how far its median is above its fastest run; contention widens it, a slower operator does not
    strata : of each repeat, how many kinds of runs its gap is the mean of: such as met other values than others
    whole_gaps : the same without telling kinds apart
    """

    logs: tuple[float, ...]
    within: float
    gaps: tuple[float, ...] = ()
    strata: tuple[int, ...] = ()
    whole_gaps: tuple[float, ...] = ()

    @property
    def of_fastest(self) -> Estimate:
        """The same of the fastest run of each repeat."""
        return replace(self, logs=tuple(value - gap for value, gap in zip(self.logs, self.gaps, strict=True)))

    @property
    def mean(self) -> float:
        """Over the repeats."""
        return fmean(self.logs)

    @property
    def squares(self) -> float:
        """Sum of squared deviations of the repeats from their mean."""
        return sum((value - self.mean) ** 2 for value in self.logs)


def estimate(row: Result) -> Estimate | None:
    """Return the estimate of a row from its single times, or from its quantiles if they were not kept.

    None if it took no time that could be read.
    """
    logs, variances, gaps = [], [], []
    strata: list[int] = []
    whole_gaps = []
    for times, weights in repeats_of(row):
        # 0.5 and a standard deviation of the rank that the median has, as a binomial distribution gives it
        total = sum(weights)
        step = min(0.5, 0.5 * sqrt(sum((weight / total) ** 2 for weight in weights)))
        low, middle, high = (quantile(times, weights, share) for share in (0.5 - step, 0.5, 0.5 + step))
        if not 0 < low <= high < inf or not min(times) > 0:
            return None
        logs.append(log(middle))
        variances.append(((log(high) - log(low)) / 2) ** 2)
        kinds = _strata(times, weights)
        strata.append(len(kinds))
        gaps.append(sum(share * log(quantile(of, [1.0] * len(of), 0.5) / min(of)) for share, of in kinds))
        whole_gaps.append(log(middle) - min(log(min(of)) for _, of in kinds))
    if row.status != CONTENDED and not 0 < (row.median_us or 0.0) < inf:
        return None
    if logs:
        return Estimate(tuple(logs), fmean(variances), tuple(gaps), tuple(strata), tuple(whole_gaps))
    if row.median_us is None:
        return None
    deviation = (row.spread or 0.0) / NORMAL_IQR * OF_MEDIAN / sqrt(max(row.samples, 1))
    return Estimate((log(row.median_us),), deviation**2)


def _strata(times: Sequence[float], weights: Sequence[float]) -> list[tuple[float, list[float]]]:
    """Return runs by weight, which runs that met the same values have in common, each with its share of all weight."""
    strata: dict[float, list[float]] = defaultdict(list)
    for time, weight in zip(times, weights, strict=True):
        if weight > 0:
            strata[float(f"{weight:.9g}")].append(time)
    total = sum(weight * len(of) for weight, of in strata.items())
    return [(weight * len(of) / total, of) for weight, of in strata.items()]


def with_like_gaps(base: Estimate, new: Estimate) -> tuple[Estimate, Estimate]:
    """Return both with gaps that can be compared: strata count if all repeats tell as many apart."""
    if len({*base.strata, *new.strata}) <= 1:
        return base, new
    return replace(base, gaps=base.whole_gaps), replace(new, gaps=new.whole_gaps)


def contended_share(row: Result) -> float:
    """Return the share of contended runs among those that count: some may have been given no weight for it."""
    if row.status == CONTENDED:
        return 1.0
    runs, without_weight = row.samples, (row.weights or []).count(0.0)
    if runs <= without_weight:
        return 0.0
    contended = min(max(row.slowed or 0.0, 0.0), 1.0) * runs
    return max(0.0, contended - without_weight) / (runs - without_weight)


SHORT_US = 50
"""Calls below vary more from replay to replay: their time is of the host, of which each has its own moments."""
FEWEST = 10
"""Cases from whose repeats something is learned."""
LEAST = 1e-8
"""Variance of a case whose repeats gave the same."""
MOST_FREEDOM = 100.0


@dataclass(frozen=True, slots=True)
class Prior:
    """The variance of the logarithm of a median from one replay to the next.

    Attributes
    ----------
    variance : that cases have
    freedom : degrees of freedom that it counts as: many where cases are alike
    """

    variance: float
    freedom: float

    def posterior(self, squares: float, freedom: int) -> tuple[float, float]:
        """Variance of a case and its degrees of freedom, given its own sum of squares and freedom."""
        whole = self.freedom + freedom
        return (self.freedom * self.variance + squares) / whole, whole


DRIFT = {True: 0.025, False: 0.005}
"""Of short calls and of others, the deviation of what a machine's pace changes by from run to run."""
USUAL = {True: Prior(0.06**2, 4.0), False: Prior(0.03**2, 4.0)}
"""Of short calls and of others, where no case was repeated: measured by `benchmarks/compare_rates.py`."""


def learn(samples: Sequence[tuple[float, int]], usual: Prior) -> Prior:
    """The prior of cases from their repeats.

    Parameters
    ----------
    samples : of each case that was repeated, sum of squares and degrees of freedom
    """
    if len(samples) < FEWEST:
        return usual
    special = needed("scipy.special", "results")
    shifted, trigammas = [], []
    for squares, own_freedom in samples:
        half = own_freedom / 2
        shifted.append(log(max(squares / own_freedom, LEAST)) - float(special.digamma(half)) + log(half))
        trigammas.append(float(special.polygamma(1, half)))
    surplus = variance(shifted) - fmean(trigammas)
    freedom = min(2 * _inverse_trigamma(surplus), MOST_FREEDOM) if surplus > 0 else MOST_FREEDOM
    half = freedom / 2
    return Prior(exp(fmean(shifted) + float(special.digamma(half)) - log(half)), freedom)


def _inverse_trigamma(value: float) -> float:
    if value > 1e7:
        return float(value**-0.5)
    polygamma = needed("scipy.special", "results").polygamma
    guess, step = 0.5 + 1 / value, inf
    # Newton's method as Smyth's appendix has it, which comes from one side
    while abs(step) > 1e-8 * guess:
        trigamma = float(polygamma(1, guess))
        step = trigamma * (1 - trigamma / value) / float(polygamma(2, guess))
        guess += step
    return guess
