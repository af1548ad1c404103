"""How sure a replayed time is: of one case, of the sum of many, and of a mean over models."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum, sqrt

import numpy as np

from opgrip.replay.comparison.priors import DRIFT, SHORT_US, USUAL, estimate
from opgrip.replay.results.results import Result

RESAMPLES, SEED = 10_000, 0
"""Of the models, for the interval."""
DRAWN_AT_ONCE = 1 << 20
"""Of them: a results file of a stranger can name any number of models."""
MOST_DEVIATION = 10.0
"""Of a logarithm: more is no measurement's."""


def deviation_of(row: Result) -> float:
    """The standard deviation of the logarithm of a row's median.

    Of its repeats, drawn towards what cases usually have; of a row without repeats, what cases usually differ by from
    one replay to the next, and how sure its runs make the median.
    """
    estimated = estimate(row)
    if estimated is None:
        return 0.0
    repeats = len(estimated.logs)
    variance, _ = USUAL[(row.median_us or 0.0) < SHORT_US].posterior(estimated.squares, repeats - 1)
    deviation = sqrt((variance + (estimated.within if repeats == 1 else 0.0)) / repeats)
    # also of what is no number
    return deviation if deviation < MOST_DEVIATION else MOST_DEVIATION


@dataclass(frozen=True, slots=True)
class Uncertainty:
    """Of the logarithm of a time.

    Attributes
    ----------
    own : by time that was measured, by how much one deviation of it moves the logarithm; these are independent, and a
        time that counts in several sums is one
    drift : deviation that all cases of a run have in common: the machine's pace
    """

    own: Mapping[Hashable, float] = field(default_factory=dict)
    drift: float = 0.0

    @property
    def deviation(self) -> float:
        """Of both together."""
        return sqrt(fsum(part**2 for part in self.own.values()) + self.drift**2)


def of_sum(parts: Iterable[tuple[Hashable, float, float, float]]) -> Uncertainty:
    """Of a sum of times.

    Parameters
    ----------
    parts : of each case what its measurement is called, the time of all its calls, that of one in us, and the deviation
        of its logarithm
    """
    cases = list(parts)
    total = fsum(time for _, time, _, _ in cases)
    if not total:
        return Uncertainty()
    drift = fsum(time / total * DRIFT[one_us < SHORT_US] for _, time, one_us, _ in cases)
    return Uncertainty(_added((name, time / total * deviation) for name, time, _, deviation in cases), drift)


def of_ratio(first: Uncertainty, second: Uncertainty) -> Uncertainty:
    """Of the ratio of two times of different runs, whose measurements are called otherwise."""
    return Uncertainty({**first.own, **second.own}, sqrt(first.drift**2 + second.drift**2))


def of_mean(parts: Iterable[tuple[float, Uncertainty]]) -> Uncertainty:
    """Of a weighted geometric mean, whose weights sum to 1."""
    weighted = list(parts)
    own = _added((name, weight * moved) for weight, part in weighted for name, moved in part.own.items())
    return Uncertainty(own, fsum(weight * part.drift for weight, part in weighted))


def interval_of(models: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """A bootstrap's 95 % interval over models: the 2.5th and 97.5th percentile of the mean of models drawn with return.

    Parameters
    ----------
    models : logarithm of the score and weight of each
    """
    if len(models) < 2:
        return None
    logs, weights = (np.array(column) for column in zip(*models, strict=True))
    generator, means = np.random.default_rng(SEED), []
    at_once = max(DRAWN_AT_ONCE // len(models), 1)
    for first in range(0, RESAMPLES, at_once):
        drawn = generator.integers(0, len(models), (min(at_once, RESAMPLES - first), len(models)))
        means.append((logs[drawn] * weights[drawn]).sum(axis=1) / weights[drawn].sum(axis=1))
    low, high = np.exp(np.quantile(np.concatenate(means), (0.025, 0.975)))
    return float(low), float(high)


def _added(parts: Iterable[tuple[Hashable, float]]) -> dict[Hashable, float]:
    sums: dict[Hashable, float] = defaultdict(float)
    for name, moved in parts:
        sums[name] += moved
    return dict(sums)
