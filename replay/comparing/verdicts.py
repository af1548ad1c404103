"""Whether cases became faster or slower, of many that are compared at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import ceil, exp, inf, log, sqrt

from opgrip.traces.extras import needed

ERROR = 0.002
"""Share of the cases called faster or slower that may be so by chance: Y. Benjamini and Y. Hochberg, "Controlling the
false discovery rate", Journal of the Royal Statistical Society B 57 (1995) 289-300."""
CONFIDENCE = 0.95
"""Of the intervals that are shown, and of what is called the same."""
MOST_RUNS = 100


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
    """

    log_ratio: float
    variance: float
    freedom: float
    base_runs: int
    new_runs: int
    drift: float = 0.0

    @property
    def own_variance(self) -> float:
        """Of the ratio, without what all cases of a run have in common."""
        return self.variance * (1 / self.base_runs + 1 / self.new_runs)

    @property
    def error(self) -> float:
        """Standard error of the ratio's logarithm."""
        return sqrt(self.own_variance + 2 * self.drift**2)


@dataclass(frozen=True, slots=True)
class Judgement:
    """What is known of a ratio.

    Attributes
    ----------
    ratio, low, high : of the new time over the base, with its interval at `CONFIDENCE`
    probability : that a case that did not change looks so different
    more_runs : repeats of each run, beside those that were made, that would decide it; None where it is decided, or
        where no number of them would
    """

    verdict: Verdict
    ratio: float
    low: float
    high: float
    probability: float
    more_runs: int | None = None


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
    probabilities = [2 * float(special.stdtr(item.freedom, -abs(item.log_ratio) / item.error)) for item in differences]
    level = _level(probabilities)
    judgements = []
    for item, probability in zip(differences, probabilities, strict=True):
        half = -float(special.stdtrit(item.freedom, (1 - CONFIDENCE) / 2)) * item.error
        low, high = item.log_ratio - half, item.log_ratio + half
        more_runs = None
        if max(-low, high) <= log(1 + margin):
            verdict = Verdict.SAME
        elif probability <= level:
            verdict = Verdict.SLOWER if item.log_ratio > 0 else Verdict.FASTER
        else:
            verdict = Verdict.UNSURE
            more_runs = _more_runs(item, margin, -float(special.stdtrit(item.freedom, level / 2)))
        judgements.append(Judgement(verdict, exp(item.log_ratio), exp(low), exp(high), probability, more_runs))
    return judgements


def _level(probabilities: Sequence[float]) -> float:
    """The probability up to which a difference is not by chance."""
    count = len(probabilities)
    below = [
        ERROR * rank / count for rank, value in enumerate(sorted(probabilities), 1) if value <= ERROR * rank / count
    ]
    return max(below, default=ERROR / count)


def _more_runs(item: Difference, margin: float, quantile: float) -> int | None:
    """Repeats of each run that are missing until the ratio is outside of chance, or within the margin."""
    size, room = abs(item.log_ratio), log(1 + margin)
    errors = [size / quantile, (room - size) / 2]
    least = max(errors) ** 2 - 2 * item.drift**2
    runs = ceil(2 * item.variance / least) if least > 0 else inf
    more = max(runs - min(item.base_runs, item.new_runs), 1)
    return int(more) if more <= MOST_RUNS else None
