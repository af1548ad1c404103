"""The time of a case in one run divided by its time in another, with its error, and verdicts on many cases together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import ceil, exp, fsum, inf, log, sqrt
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


# expected share of false positives among the cases with the verdict FASTER or SLOWER
#
# Source: Y. Benjamini and Y. Hochberg, "Controlling the false discovery rate", Journal of the Royal Statistical Society
# B 57 (1995) 289-300.
ERROR = 0.002
CONFIDENCE = 0.95  # confidence level of the intervals shown, and of the verdict SAME
MOST_RUNS = 100
MOST_SHOWN = 10  # ratio above which an end of an interval is shown as open, and likewise its reciprocal
MOST_LOG = 40.0  # limit of the logarithm of a ratio and of the ends of its interval


class Verdict(Enum):
    SLOWER = "SLOWER"
    FASTER = "FASTER"
    SAME = "SAME"
    UNSURE = "UNSURE"


@dataclass(frozen=True, slots=True)
class Difference:
    """Difference of the logarithms of a case's times in two runs, with its uncertainties.

    variance : variance of the logarithm of a run's time from repeat to repeat
    drift : standard deviation of the change in the machine's speed between runs, which repeats within a run do not show
    base_excess, new_excess : maximum amount by which the logarithm of a run's time may be too high, for example because
        of contention or a slower clock
    """

    log_ratio: float
    variance: float
    freedom: float
    base_runs: int
    new_runs: int
    drift: float = 0.0
    base_excess: float = 0.0
    new_excess: float = 0.0

    @property
    def own_variance(self) -> float:
        return self.variance * (1 / self.base_runs + 1 / self.new_runs)

    @property
    def error(self) -> float:
        return sqrt(self.own_variance + 2 * self.drift**2)

    @property
    def least(self) -> float:
        return max(0.0, abs(self.log_ratio) - (self.new_excess if self.log_ratio > 0 else self.base_excess))


@dataclass(frozen=True, slots=True)
class RatioVerdict:
    """Verdict on the ratio of a case's times, with the ratio's interval.

    probability : probability that an unchanged case shows at least this difference
    """

    verdict: Verdict
    ratio: float
    low: float
    high: float
    probability: float
    more_runs: int | None = None
    more_new_runs: int | None = None


def interval_text(low: float, high: float) -> str:
    if low > 1 / MOST_SHOWN:
        return f"{low:.3f} to {high:.3f}" if high < MOST_SHOWN else f"at least {low:.3f}"
    return f"at most {high:.3f}" if high < MOST_SHOWN else "unknown"


def judge(differences: Sequence[Difference], margin: float) -> list[RatioVerdict]:
    """Return the verdict on each difference; the verdicts account for the number of differences.

    margin : largest relative difference at which times count as the same
    """
    if not differences:
        return []
    special = needed("scipy.special")
    probabilities = [2 * float(special.stdtr(item.freedom, -item.least / item.error)) for item in differences]
    level = _level(probabilities)
    judgements = []
    for item, probability in zip(differences, probabilities, strict=True):
        half = -float(special.stdtrit(item.freedom, (1 - CONFIDENCE) / 2)) * item.error
        low, high = item.log_ratio - half - item.new_excess, item.log_ratio + half + item.base_excess
        more_runs = more_new_runs = None
        if max(-low, high) <= log(1 + margin):
            verdict = Verdict.SAME
        elif probability <= level:
            verdict = Verdict.SLOWER if item.log_ratio > 0 else Verdict.FASTER
        elif abs(item.log_ratio) <= log(1 + margin) and max(-low, high) <= 2 * log(1 + margin):
            verdict = Verdict.SAME
        else:
            verdict = Verdict.UNSURE
            room = _room(item, margin, -float(special.stdtrit(item.freedom, level / 2)))
            more_runs = _missing(2 * item.variance, room, min(item.base_runs, item.new_runs))
            more_new_runs = _missing(item.variance, room - item.variance / item.base_runs, item.new_runs)
        ratio, least, most = (exp(min(max(value, -MOST_LOG), MOST_LOG)) for value in (item.log_ratio, low, high))
        judgements.append(RatioVerdict(verdict, ratio, least, most, probability, more_runs, more_new_runs))
    return judgements


def _level(probabilities: Sequence[float]) -> float:
    count = len(probabilities)
    below = [
        ERROR * rank / count for rank, value in enumerate(sorted(probabilities), 1) if value <= ERROR * rank / count
    ]
    return max(below, default=ERROR / count)


def _room(item: Difference, margin: float, quantile: float) -> float:
    most = log(1 + margin) * (2 if abs(item.log_ratio) <= log(1 + margin) else 1)
    within = most - max(item.base_excess + item.log_ratio, item.new_excess - item.log_ratio)
    return max(item.least / quantile, within / 2) ** 2 - 2 * item.drift**2


def _missing(variance: float, room: float, runs: int) -> int | None:
    if not room > 0 or variance / room > runs + MOST_RUNS:
        return None
    return max(ceil(variance / room) - runs, 1)


# relative differences of a device's clock and of the memory read rate above which they may explain a slower run
#
# On a quiet virtual machine, the median of the memory rate varies by up to 16 % from run to run.
CLOCKS, MEMORY = 0.05, 0.2
# factors by which the mean of a run varies more than its repeats suggest: for medians, and for fastest runs
#
# Repeats are seconds apart, while the speed of a machine changes over minutes. Measured by
# `benchmarks/compare_rates.py` on a shared virtual machine, over 15 runs of 40 cases each: 2.4 to 4.5 for medians and
# 1.5 to 2.0 for fastest runs, and more for whichever of the two repeats better.
ALIKE, ALIKE_FASTEST = 3.0, 2.5
# maximum share of contended runs, and maximum change of the gap between median and fastest run, for which medians are
# compared; beyond these, medians contain the work of other processes
FEW_CONTENDED, SAME_GAP = 0.05, 0.15
# logarithm of the slowdown that even the fastest run may have if all runs were contended; 4/3 is the threshold at which
# contention is detected
CONTENDED_LOG = log(4 / 3)
# the same limit for rows with status `contended`: practically none, because a time slice of the scheduler can be a
# thousand times as long as the call
UNBOUNDED_LOG = log(1e6)


@dataclass(frozen=True, slots=True)
class ComparedRows:
    difference: Difference
    base: Estimate
    new: Estimate

    @property
    def base_us(self) -> float:
        return exp(self.base.mean)

    @property
    def new_us(self) -> float:
        return exp(self.new.mean)


# rates in GB/s at which memory was read in the base run and in the new run: medians over their rows
MemoryRates = tuple[float | None, float | None]


def memory_rates(timed: Sequence[tuple[Result, Result]]) -> MemoryRates:
    base = [row.memory_gb_per_s for row, _ in timed if row.memory_gb_per_s]
    new = [row.memory_gb_per_s for _, row in timed if row.memory_gb_per_s]
    return median(base) if base else None, median(new) if new else None


def compare_rows(timed: Sequence[tuple[Result, Result]], rates: MemoryRates) -> list[ComparedRows | None]:
    chosen = [_choose(*rows) for rows in timed]
    learned = {}
    for is_short, usual in USUAL.items():
        pairs = [
            pair
            for (row, new), pair in zip(timed, chosen, strict=True)
            if pair is not None and _is_short(row) == is_short and CONTENDED not in (row.status, new.status)
        ]
        single = [pair for pair in pairs if pair.repeats == 2]
        differences = [pair.new.mean - pair.base.mean for pair in single]
        samples = [(pair.base.squares + pair.new.squares, pair.repeats - 2) for pair in pairs if pair.repeats > 2]
        learned[is_short] = learn(samples, learn_from_differences(differences, usual))
    return [
        None if pair is None else _compare(rows, pair, learned[_is_short(rows[0])], rates)
        for rows, pair in zip(timed, chosen, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class _Chosen:
    base: Estimate
    new: Estimate
    is_fastest: bool
    missed: float = 0.0

    @property
    def repeats(self) -> int:
        return len(self.base.logs) + len(self.new.logs)

    @property
    def within(self) -> float:
        return (self.base.within + self.new.within) / 2


def _choose(base: Result, new: Result) -> _Chosen | None:
    old, now = estimate(base), estimate(new)
    if old is None or now is None:
        return None
    # a gap between kinds of runs is not one between a median and a fastest run
    if not (old.gaps and now.gaps) or len({*old.kinds, *now.kinds}) > 1:
        return _Chosen(old, now, is_fastest=False)
    missed = fmean(now.gaps) - fmean(old.gaps)
    by_chance = 3 * sqrt(sum(variance(of.gaps) / len(of.gaps) for of in (old, now) if len(of.gaps) > 1))
    is_contended = max(contended_share(base), contended_share(new)) > FEW_CONTENDED
    fastest = old.of_fastest, now.of_fastest
    # short calls on a shared machine: their medians follow its pace, and their fastest runs do not
    medians_repeat_best = old.squares + now.squares <= sum(of.squares for of in fastest)
    if medians_repeat_best and not is_contended and abs(missed) <= max(SAME_GAP, by_chance):
        return _Chosen(old, now, is_fastest=False)
    return _Chosen(*fastest, is_fastest=True, missed=missed)


def _compare(rows: tuple[Result, Result], pair: _Chosen, prior: Prior, rates: MemoryRates) -> ComparedRows:
    base, new = rows
    freedom = pair.repeats - 2
    own, whole = prior.posterior(pair.base.squares + pair.new.squares, freedom)
    if freedom:
        own *= ALIKE_FASTEST if pair.is_fastest else ALIKE
    # without repeats the prior covers usual runs; the error of a median of few or noisy runs is not well known
    elif pair.within > own:
        own, whole = own + pair.within, min(whole, USUAL[True].freedom)
    slow_base, slow_new = _pace_excess(base, new, rates)
    difference = Difference(
        pair.new.mean - pair.base.mean,
        own,
        whole,
        len(pair.base.logs),
        len(pair.new.logs),
        DRIFT[_is_short(base)],
        # medians may have moved away from the fastest runs through contention, or because only some calls became slower
        base_excess=_contention_excess(base) + slow_base + max(0.0, pair.missed),
        new_excess=_contention_excess(new) + slow_new,
    )
    return ComparedRows(difference, pair.base, pair.new)


def difference_of_sums(rows: Sequence[tuple[float, ComparedRows]]) -> Difference:
    """Return the difference of the summed times of several cases, each given as (number of calls, comparison)."""
    parts = [row.difference for _, row in rows]
    base, new = (fsum(count * row.base_us for count, row in rows), fsum(count * row.new_us for count, row in rows))
    shares = [count * row.new_us / new for count, row in rows]
    runs = min(part.base_runs for part in parts), min(part.new_runs for part in parts)
    variances = [(share**2 * part.own_variance, part.freedom) for part, share in zip(parts, shares, strict=True)]
    own = fsum(value for value, _ in variances)
    # degrees of freedom of a sum of variances: F. E. Satterthwaite, Biometrics Bulletin 2 (1946) 110-114
    freedom = own**2 / fsum(value**2 / freedom for value, freedom in variances)
    own /= 1 / runs[0] + 1 / runs[1]
    together = _variance_of_repeats(
        [(count * row.base_us, row.base) for count, row in rows], [(count * row.new_us, row.new) for count, row in rows]
    )
    # rows of one repeat share the machine's pace, so their errors may add up
    if together is not None and ALIKE * together[0] > own:
        own, freedom = ALIKE * together[0], together[1]
    # drift and excess are common to all cases and do not average out
    drift = fsum(share * part.drift for part, share in zip(parts, shares, strict=True))
    least_base = fsum(count * row.base_us * exp(-row.difference.base_excess) for count, row in rows)
    least_new = fsum(count * row.new_us * exp(-row.difference.new_excess) for count, row in rows)
    return Difference(log(new / base), own, freedom, *runs, drift, log(base / least_base), log(new / least_new))


def _variance_of_repeats(*sides: Sequence[tuple[float, Estimate]]) -> tuple[float, int] | None:
    squares, freedom = 0.0, 0
    for rows in sides:
        counts = {len(row.logs) for _, row in rows}
        if len(counts) > 1:
            return None
        repeats = counts.pop()
        if repeats > 1:
            sums = [fsum(time * exp(row.logs[repeat] - row.mean) for time, row in rows) for repeat in range(repeats)]
            squares += (repeats - 1) * variance(map(log, sums))
            freedom += repeats - 1
    return (squares / freedom, freedom) if freedom else None


def _is_short(row: Result) -> bool:
    return (row.median_us or 0.0) < SHORT_US


def _contention_excess(row: Result) -> float:
    return UNBOUNDED_LOG if row.status == CONTENDED else contended_share(row) * CONTENDED_LOG


def _pace_excess(base: Result, new: Result, rates: MemoryRates) -> tuple[float, float]:
    changes = [_change(base.clock_mhz, new.clock_mhz, CLOCKS), _change(*rates, MEMORY)]
    return max(0.0, *(-change for change in changes)), max(0.0, *changes)


def _change(base: float | None, new: float | None, least: float) -> float:
    if not base or not new or base < 0 or new < 0:
        return 0.0
    change = log(base / new)
    return change if abs(change) > least else 0.0


def doubts(base: Result, new: Result, rates: MemoryRates) -> Iterator[str]:
    """Yield the facts that widen the interval of a ratio of times, such as contended runs."""
    contended = [
        f"{share:.0%} of the runs in {name} were contended"
        for name, row in (("BASE", base), ("NEW", new))
        if (share := contended_share(row)) > 0
    ]
    if contended:
        yield ", ".join(contended)
    if _change(base.clock_mhz, new.clock_mhz, CLOCKS):
        yield f"the device's clock was {base.clock_mhz:,.0f} MHz in BASE, {new.clock_mhz:,.0f} MHz in NEW"
    if _change(*rates, MEMORY):
        yield f"memory was read at {rates[0]:.1f} GB/s in BASE, {rates[1]:.1f} GB/s in NEW"
