"""Variance of a case's median between replays, estimated from the case's repeats and from all other cases."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import exp, inf, log, sqrt
from statistics import fmean, median, variance

from opgrip.cli.plugins import needed
from opgrip.replay.results.results import CONTENDED, Result
from opgrip.replay.timing.samples import quantile

# for a normal distribution with standard deviation 1: interquartile range, and ratio of the standard error of a median
# to that of a mean
NORMAL_IQR, OF_MEDIAN = 1.349, 1.2533


@dataclass(frozen=True, slots=True)
class Estimate:
    """Logarithm of a row's median time in each repeat, with measures of its uncertainty.

    logs : logarithm of the median time of each repeat
    within : variance of one element of `logs`, estimated from the spread of the runs within a repeat
    """

    logs: tuple[float, ...]
    within: float
    gaps: tuple[float, ...] = ()
    kinds: tuple[int, ...] = ()

    @property
    def of_fastest(self) -> Estimate:
        return replace(self, logs=tuple(value - gap for value, gap in zip(self.logs, self.gaps, strict=True)))

    @property
    def mean(self) -> float:
        return fmean(self.logs)

    @property
    def squares(self) -> float:
        return sum((value - self.mean) ** 2 for value in self.logs)


def estimate(row: Result) -> Estimate | None:
    logs, variances, gaps, counts = [], [], [], []
    for times, weights, numbers in repeats_of(row):
        kinds, middle = _strata(times, weights, numbers), quantile(times, weights, 0.5)
        # 0.5 plus or minus one standard deviation of the median's rank, from a binomial distribution in each stratum
        ranks = [(share, len(of), (sum(time <= middle for time in of) + 0.5) / (len(of) + 1)) for share, of in kinds]
        step = min(0.5, sqrt(sum(share**2 * rank * (1 - rank) / runs for share, runs, rank in ranks)))
        low, high = (quantile(times, weights, share) for share in (0.5 - step, 0.5 + step))
        if not 0 < low <= high < inf or not min(times) > 0:
            return None
        logs.append(log(middle))
        counts.append(len(kinds))
        variances.append(((log(high) - log(low)) / 2) ** 2)
        gaps.append(sum(share * log(quantile(of, [1.0] * len(of), 0.5) / min(of)) for share, of in kinds))
    if row.status != CONTENDED and not 0 < (row.median_us or 0.0) < inf:
        return None
    if logs:
        return Estimate(tuple(logs), fmean(variances), tuple(gaps), tuple(counts))
    if row.median_us is None:
        return None
    deviation = (row.spread or 0.0) / NORMAL_IQR * OF_MEDIAN / sqrt(max(row.samples, 1))
    return Estimate((log(row.median_us),), deviation**2)


def _strata(times: Sequence[float], weights: Sequence[float], kinds: Sequence[int]) -> list[tuple[float, list[float]]]:
    strata: dict[int, list[float]] = defaultdict(list)
    shares: dict[int, float] = defaultdict(float)
    for time, weight, kind in zip(times, weights, kinds, strict=True):
        if weight > 0:
            strata[kind].append(time)
            shares[kind] += weight
    return [(shares[kind] / sum(shares.values()), of) for kind, of in strata.items()]


def contended_share(row: Result) -> float:
    if row.status == CONTENDED:
        return 1.0
    runs, without_weight = row.samples, (row.weights or []).count(0.0)
    if runs <= without_weight:
        return 0.0
    contended = min(max(row.slowed or 0.0, 0.0), 1.0) * runs
    return max(0.0, contended - without_weight) / (runs - without_weight)


SHORT_US = 50  # duration below which calls vary more between replays, because their time depends mostly on the host
FEWEST = 10  # smallest number of repeated cases from which a prior is learned
LEAST = 1e-8  # variance assumed for a case whose repeats are equal
MOST_FREEDOM = 100.0
# for a normal distribution: standard deviation divided by the median absolute deviation, and efficiency of the latter
MAD_TO_DEVIATION, MAD_EFFICIENCY = 1.4826, 0.37


@dataclass(frozen=True, slots=True)
class Prior:
    """The variance of a case's log median between replays, as known before the case's repeats are seen.

    freedom : degrees of freedom of this knowledge; high if the variances of cases are similar
    """

    variance: float
    freedom: float

    def posterior(self, squares: float, freedom: int) -> tuple[float, float]:
        whole = self.freedom + freedom
        return (self.freedom * self.variance + squares) / whole, whole


# standard deviation of the change in a machine's speed between runs, for short calls (True) and others
DRIFT = {True: 0.025, False: 0.005}
# priors for short calls (True) and others if no case was repeated, measured by `benchmarks/compare_rates.py`
USUAL = {True: Prior(0.06**2, 4.0), False: Prior(0.03**2, 4.0)}


def learn(samples: Sequence[tuple[float, int]], usual: Prior) -> Prior:
    """Return the prior for the variance of a case's log median, learned from the cases that were repeated."""
    if len(samples) < FEWEST:
        return usual
    special = needed("scipy.special")
    shifted, trigammas = [], []
    for squares, own_freedom in samples:
        half = own_freedom / 2
        shifted.append(log(max(squares / own_freedom, LEAST)) - float(special.digamma(half)) + log(half))
        trigammas.append(float(special.polygamma(1, half)))
    surplus = variance(shifted) - fmean(trigammas)
    freedom = min(2 * _inverse_trigamma(surplus), MOST_FREEDOM) if surplus > 0 else MOST_FREEDOM
    half = freedom / 2
    return Prior(exp(fmean(shifted) + float(special.digamma(half)) - log(half)), freedom)


def learn_from_differences(differences: Sequence[float], usual: Prior) -> Prior:
    # changes of most cases look like noise: it is never assumed to be larger than usual
    if len(differences) < FEWEST:
        return usual
    of_one = (MAD_TO_DEVIATION * median(map(abs, differences))) ** 2 / 2
    return min(usual, Prior(max(of_one, LEAST), MAD_EFFICIENCY * len(differences)), key=lambda prior: prior.variance)


def _inverse_trigamma(value: float) -> float:
    if value > 1e7:
        return float(value**-0.5)
    polygamma = needed("scipy.special").polygamma
    guess, step = 0.5 + 1 / value, inf
    # Newton's method from Smyth's appendix, which converges from one side
    while abs(step) > 1e-8 * guess:
        trigamma = float(polygamma(1, guess))
        step = trigamma * (1 - trigamma / value) / float(polygamma(2, guess))
        guess += step
    return guess


def weights_of(row: Result) -> list[float]:
    count, weights = len(row.times_us or ()), row.weights or []
    # files may contain invalid weights
    if len(weights) != count or min(weights, default=0.0) < 0 or not sum(weights) > 0:
        weights = [1.0] * count
    total = sum(weights)
    return [weight / total for weight in weights]


def repeats_of(row: Result) -> Iterator[tuple[Sequence[float], Sequence[float], Sequence[int]]]:
    times, weights = row.times_us or [], weights_of(row)
    # in files without kinds, runs of one kind have equal weights
    kinds = row.kinds if row.kinds and len(row.kinds) == len(times) else [round(1e9 * weight) for weight in weights]
    counts = row.repeats or []
    if sum(counts) != len(times) or min(counts, default=0) < 0:
        counts = [len(times)]
    start = 0
    for count in counts:
        if sum(weights[start : start + count]) > 0:
            end = start + count
            yield times[start:end], weights[start:end], kinds[start:end]
        start += count
