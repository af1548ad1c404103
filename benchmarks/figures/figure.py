"""Define figures, how they are measured, and their uncertainty.

Every figure is a ratio of two quantities measured in the same round, so that a slow or busy machine changes both. Its
interval comes from a bootstrap over the rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"
# a quantity and its reference for each round; `ratio_of_added` also has a base for each of them
Rounds: TypeAlias = Sequence[tuple[float, ...]]

RESAMPLES = 2000
INTERVAL = (0.05, 0.95)
UNDISTURBED = 0.25  # quantile of a time over rounds that disturbed rounds do not change


class NotMeasuredError(Exception):
    """Reason why figures have no rounds here: a missing package or file."""


def ratio_of_medians(rounds: Array) -> Array:
    """Return the median quantity divided by the median reference: for times, in which disturbed rounds must not count.

    The ratio is infinite if the reference is at or below zero, because noise is then larger than it.

    rounds : (..., N, 2), quantity and reference of each of N rounds
    """
    quantity, reference = np.moveaxis(np.median(rounds, axis=-2), -1, 0)
    return _over(quantity, reference)


def _over(quantity: Array, reference: Array) -> Array:
    """Return `quantity` divided by `reference`, or infinity where the reference is not positive."""
    return np.where(reference > 0, quantity / np.where(reference > 0, reference, 1.0), np.inf)


def ratio_of_added(rounds: Array) -> Array:
    """Return a quantity above its base, divided by a reference above its base, each by its lower quartile.

    For times that add to others, on a machine that other programs slow for seconds. The ratio is infinite if the
    reference is at or below its base, because noise is then larger than their difference.

    rounds : (..., N, 4), each a quantity, its base, the reference and the reference's base
    """
    quantity, base, reference, other_base = np.moveaxis(np.quantile(rounds, UNDISTURBED, axis=-2), -1, 0)
    return _over(quantity - base, reference - other_base)


def ratio_of_sums(rounds: Array) -> Array:
    """Return the sum of the quantity divided by that of the reference: for counts, and for times of different tasks.

    rounds : (..., N, 2), quantity and reference of each of N rounds
    """
    quantity, reference = np.moveaxis(np.sum(rounds, axis=-2), -1, 0)
    return np.asarray(quantity / reference)


def median_of_ratios(rounds: Array) -> Array:
    """Return the median of the ratios of the rounds, for figures whose rounds differ more than the two quantities.

    rounds : (..., N, 2), quantity and reference of each of N rounds
    """
    return np.asarray(np.median(rounds[..., 0] / rounds[..., 1], axis=-1))


def offset_of_ratios(rounds: Array) -> Array:
    """Return the distance of the median ratio from one.

    rounds : (..., N, 2), quantity and reference of each of N rounds
    """
    return np.abs(np.median(rounds[..., 0] / rounds[..., 1], axis=-1) - 1)


@dataclass(frozen=True, slots=True)
class Figure:
    """A performance figure, a ratio of measured quantities that is compared with a threshold.

    name : name in the table of thresholds
    unit : unit of the ratio, such as `x`; may be empty
    meaning : description of the quantity and of the quantity that divides it
    statistic : computes the figure from rounds `(..., N, 2)`, unless it documents another shape
    larger_is_better : True if the threshold is a minimum, False if it is a maximum
    """

    name: str
    meaning: str
    unit: str = "x"
    statistic: Callable[[Array], Array] = ratio_of_medians
    larger_is_better: bool = False

    def is_worse(self, value: float, bound: float) -> bool:
        """Return True if a value is worse than `bound`: below it if larger is better, else above it."""
        return value < bound if self.larger_is_better else value > bound

    def worst(self, values: Sequence[float]) -> float:
        """Return the worst value."""
        return min(values) if self.larger_is_better else max(values)


@dataclass(frozen=True, slots=True)
class Experiment:
    """Figures that are measured together.

    measure : function that takes a number of rounds and returns the rounds of each figure, in order
    rounds, quick_rounds : number of rounds in a full and in a quick run; 0 to leave the experiment out
    """

    name: str
    figures: tuple[Figure, ...]
    measure: Callable[[int], Sequence[Rounds]]
    rounds: int
    quick_rounds: int = 0


@dataclass(frozen=True, slots=True)
class Reading:
    """A figure's value in a run, and the ends of its bootstrap interval, `low` and `high`."""

    value: float
    low: float
    high: float

    def best(self, figure: Figure) -> float:
        """Return the better end of the interval: the upper one if a larger value of the figure is better."""
        return self.high if figure.larger_is_better else self.low

    def worst(self, figure: Figure) -> float:
        """Return the worse end of the interval: the lower one if a larger value of the figure is better."""
        return self.low if figure.larger_is_better else self.high


def read_figure(figure: Figure, rounds: Rounds) -> Reading:
    """Return the value of a figure's rounds, with a bootstrap interval."""
    every = np.asarray(rounds, dtype=np.float64)
    draws = np.random.default_rng(0).integers(len(every), size=(RESAMPLES, len(every)))
    low, high = np.quantile(figure.statistic(every[draws]), INTERVAL, method="nearest")
    return Reading(float(figure.statistic(every)), float(low), float(high))
