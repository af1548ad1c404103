"""Uncertainty of replayed times and scores."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum, sqrt

import numpy as np

from opgrip.replay.comparison.priors import DRIFT, SHORT_US, USUAL, estimate
from opgrip.replay.results.results import Result

RESAMPLES, SEED = 10_000, 0  # number of bootstrap samples of the models, and their random seed
DRAWN_AT_ONCE = 1 << 20  # models drawn at a time, because an untrusted file can contain any number of models
MOST_DEVIATION = 10.0  # limit of the deviation of a logarithm; no measurement exceeds it


def deviation_of(row: Result) -> float:
    """Return the standard deviation of the logarithm of a row's median time."""
    estimated = estimate(row)
    if estimated is None:
        return 0.0
    repeats = len(estimated.logs)
    variance, _ = USUAL[(row.median_us or 0.0) < SHORT_US].posterior(estimated.squares, repeats - 1)
    deviation = sqrt((variance + (estimated.within if repeats == 1 else 0.0)) / repeats)
    # this form also replaces NaN
    return deviation if deviation < MOST_DEVIATION else MOST_DEVIATION


@dataclass(frozen=True, slots=True)
class Uncertainty:
    """Uncertainty of a computed time, as standard deviations of its logarithm.

    own : deviation that each measured time causes, by name of the measurement
    drift : deviation from changes in the machine's speed, which all measurements share
    """

    own: Mapping[Hashable, float] = field(default_factory=dict)
    drift: float = 0.0

    @property
    def deviation(self) -> float:
        return sqrt(fsum(part**2 for part in self.own.values()) + self.drift**2)


def of_sum(parts: Iterable[tuple[Hashable, float, float, float]]) -> Uncertainty:
    """Return the uncertainty of a sum of times.

    parts : for each case, the name of its measurement, the time of all its calls, the time of one call in us, and the
        standard deviation of the logarithm of that time
    """
    cases = list(parts)
    total = fsum(time for _, time, _, _ in cases)
    if not total:
        return Uncertainty()
    drift = fsum(time / total * DRIFT[one_us < SHORT_US] for _, time, one_us, _ in cases)
    return Uncertainty(_added((name, time / total * deviation) for name, time, _, deviation in cases), drift)


def of_ratio(first: Uncertainty, second: Uncertainty) -> Uncertainty:
    return Uncertainty({**first.own, **second.own}, sqrt(first.drift**2 + second.drift**2))


def of_mean(parts: Iterable[tuple[float, Uncertainty]]) -> Uncertainty:
    """Return the uncertainty of a weighted geometric mean of times.

    parts : weight and uncertainty of each time; the weights sum to 1
    """
    weighted = list(parts)
    own = _added((name, weight * moved) for weight, part in weighted for name, moved in part.own.items())
    return Uncertainty(own, fsum(weight * part.drift for weight, part in weighted))


def interval_of(models: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """Return the 95 % confidence interval of the weighted geometric mean of the models' scores.

    models : logarithm of the score, and weight, of each model
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
