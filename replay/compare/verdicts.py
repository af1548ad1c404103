"""Whether cases became faster or slower, of many that are compared at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import ceil, exp, log, sqrt

from opgrip.cli.plugins import needed

ERROR = 0.002
"""Share of the cases called faster or slower that may be so by chance: Y. Benjamini and Y. Hochberg, "Controlling the
false discovery rate", Journal of the Royal Statistical Society B 57 (1995) 289-300."""
CONFIDENCE = 0.95
"""Of the intervals that are shown, and of what is called the same."""
MOST_RUNS = 100
MOST_SHOWN = 1_000
"""Ratio above which the end of an interval says nothing."""
MOST_LOG = 40.0
"""Of a ratio and the ends of its interval."""


class Verdict(Enum):
    """What a comparison says of a case."""

    SLOWER = "SLOWER"
    FASTER = "FASTER"
    SAME = "SAME"
    UNSURE = "UNSURE"


@dataclass(frozen=True, slots=True)
class Difference:
    """Of the logarithms of two medians.

    Attributes
    ----------
    log_ratio : of the new over the base
    variance : of a single repeat
    freedom : of that variance, in degrees
    base_runs, new_runs : repeats of each
    drift : deviation of what the machine's pace changes by from run to run, which no repeats within one show
    base_excess, new_excess : most by which a run's logarithm may be too high, as for contended runs or a slower clock
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
        """Of the ratio, without what all cases of a run have in common."""
        return self.variance * (1 / self.base_runs + 1 / self.new_runs)

    @property
    def error(self) -> float:
        """Standard error of the ratio's logarithm."""
        return sqrt(self.own_variance + 2 * self.drift**2)

    @property
    def least(self) -> float:
        """Size of the logarithm that remains if the run that took longer is too high by all of its excess."""
        return max(0.0, abs(self.log_ratio) - (self.new_excess if self.log_ratio > 0 else self.base_excess))


@dataclass(frozen=True, slots=True)
class Judgement:
    """What is known of a ratio.

    Attributes
    ----------
    ratio, low, high : of the new time over the base, with its interval at `CONFIDENCE`
    probability : that a case that did not change looks so different
    more_runs : repeats of each run, beside those that were made, that would decide it; None where it is decided, or
        where no number of them would
    more_new_runs : the same of the new run alone
    """

    verdict: Verdict
    ratio: float
    low: float
    high: float
    probability: float
    more_runs: int | None = None
    more_new_runs: int | None = None


def interval_text(low: float, high: float) -> str:
    """Return the text of an interval of a ratio; an end that contention leaves open is shown as a bound."""
    return f"{low:.3f} to {high:.3f}" if high < MOST_SHOWN else f"{low:.3f} to over {MOST_SHOWN:,}"


def judge(differences: Sequence[Difference], margin: float) -> list[Judgement]:
    """What is to be said of each, given that there are so many.

    FASTER and SLOWER are by a test of Benjamini and Hochberg over all; SAME is where the interval is within the margin.

    Parameters
    ----------
    margin : relative difference up to which times are the same, 0 to 1
    """
    if not differences:
        return []
    special = needed("scipy.special", "results")
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
        else:
            verdict = Verdict.UNSURE
            room = _room(item, margin, -float(special.stdtrit(item.freedom, level / 2)))
            more_runs, more_new_runs = _more_runs(item, room), _more_new_runs(item, room)
        ratio, least, most = (_exp(value) for value in (item.log_ratio, low, high))
        judgements.append(Judgement(verdict, ratio, least, most, probability, more_runs, more_new_runs))
    return judgements


def _level(probabilities: Sequence[float]) -> float:
    """The probability up to which a difference is not by chance."""
    count = len(probabilities)
    below = [
        ERROR * rank / count for rank, value in enumerate(sorted(probabilities), 1) if value <= ERROR * rank / count
    ]
    return max(below, default=ERROR / count)


def _room(item: Difference, margin: float, quantile: float) -> float:
    """The variance without drift from which on a ratio is outside of chance, or within the margin."""
    within = log(1 + margin) - max(item.base_excess + item.log_ratio, item.new_excess - item.log_ratio)
    return max(item.least / quantile, within / 2) ** 2 - 2 * item.drift**2


def _more_runs(item: Difference, room: float) -> int | None:
    """Repeats of each run that are missing until that is its variance."""
    return _missing(2 * item.variance, room, min(item.base_runs, item.new_runs))


def _more_new_runs(item: Difference, room: float) -> int | None:
    """Repeats of the new run that are missing, the base having those that it has."""
    return _missing(item.variance, room - item.variance / item.base_runs, item.new_runs)


def _missing(variance: float, room: float, runs: int) -> int | None:
    if not room > 0 or variance / room > runs + MOST_RUNS:
        return None
    return max(ceil(variance / room) - runs, 1)


def _exp(value: float) -> float:
    """Of two times nobody measures more than this between them, and a number it has to be."""
    return exp(min(max(value, -MOST_LOG), MOST_LOG))
