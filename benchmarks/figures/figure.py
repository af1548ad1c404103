"""What a figure is, how it is measured, and how sure it is.

Every figure is a ratio of two quantities that were measured in the same round, so that a slow or busy machine changes
both. Its interval comes from drawing the rounds anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"
Rounds: TypeAlias = Sequence[tuple[float, ...]]
"""A quantity and the one that it is compared with, of each round; `ratio_of_added` takes each with its own base."""

RESAMPLES = 2000
INTERVAL = (0.05, 0.95)
UNDISTURBED = 0.25
"""Quantile of a time over rounds that some of them, disturbed, do not move."""


class NotMeasuredError(Exception):
    """Why figures have no rounds here: a package that is not installed, a file that is not there."""


def ratio_of_medians(rounds: Array) -> Array:
    """The median quantity over the median reference: for times, where a disturbed round should not count.

    A reference at or below zero, a difference lost in noise, gives infinity.

    Parameters
    ----------
    rounds : (..., N, 2)
    """
    quantity, reference = np.moveaxis(np.median(rounds, axis=-2), -1, 0)
    return _over(quantity, reference)


def _over(quantity: Array, reference: Array) -> Array:
    """Their ratio; infinity where the reference, a difference, is lost in noise."""
    return np.where(reference > 0, quantity / np.where(reference > 0, reference, 1.0), np.inf)


def ratio_of_added(rounds: Array) -> Array:
    """What a quantity is above its base over what its reference is, each by its lower quartile: for times that add to
    others, on a machine that others make half as fast for seconds.

    A reference at or below its base, a difference lost in noise, gives infinity.

    Parameters
    ----------
    rounds : (..., N, 4), each a quantity, its base, the reference and that one's base
    """
    quantity, base, reference, other_base = np.moveaxis(np.quantile(rounds, UNDISTURBED, axis=-2), -1, 0)
    return _over(quantity - base, reference - other_base)


def ratio_of_sums(rounds: Array) -> Array:
    """The sum of the quantity over that of the reference: for counts, and for times of different tasks.

    Parameters
    ----------
    rounds : (..., N, 2)
    """
    quantity, reference = np.moveaxis(np.sum(rounds, axis=-2), -1, 0)
    return np.asarray(quantity / reference)


def median_of_ratios(rounds: Array) -> Array:
    """The median over the rounds of the quantity over its reference: for what differs by less than rounds do.

    Parameters
    ----------
    rounds : (..., N, 2)
    """
    return np.asarray(np.median(rounds[..., 0] / rounds[..., 1], axis=-1))


def offset_of_ratios(rounds: Array) -> Array:
    """How far the median of the rounds' ratios is from one.

    Parameters
    ----------
    rounds : (..., N, 2)
    """
    return np.abs(np.median(rounds[..., 0] / rounds[..., 1], axis=-1) - 1)


@dataclass(frozen=True, slots=True)
class Figure:
    """A number that is held.

    Attributes
    ----------
    name : in the table of bounds
    unit : empty for a plain ratio
    meaning : what over what
    statistic : the figure of rounds `(..., N, 2)`, or as it says itself
    larger_is_better : whether a bound is the least that the figure may be; else it is the most
    """

    name: str
    meaning: str
    unit: str = "x"
    statistic: Callable[[Array], Array] = ratio_of_medians
    larger_is_better: bool = False

    def is_worse(self, value: float, bound: float) -> bool:
        """Whether a value is on the wrong side of a bound."""
        return value < bound if self.larger_is_better else value > bound

    def worst(self, values: Sequence[float]) -> float:
        """The value that every other one is at least as good as."""
        return min(values) if self.larger_is_better else max(values)


@dataclass(frozen=True, slots=True)
class Experiment:
    """Figures that are measured together.

    Attributes
    ----------
    measure : gives the rounds of each figure, in order; takes how many
    rounds : of a whole run; `quick_rounds` of a quick one, 0 where it is left out of it
    """

    name: str
    figures: tuple[Figure, ...]
    measure: Callable[[int], Sequence[Rounds]]
    rounds: int
    quick_rounds: int = 0


@dataclass(frozen=True, slots=True)
class Reading:
    """A figure's value in a run, and the interval in which it may as well have been."""

    value: float
    low: float
    high: float

    def best(self, figure: Figure) -> float:
        """The end of the interval that speaks for the figure."""
        return self.high if figure.larger_is_better else self.low

    def worst(self, figure: Figure) -> float:
        """The end of the interval that speaks against it."""
        return self.low if figure.larger_is_better else self.high


def read_figure(figure: Figure, rounds: Rounds) -> Reading:
    """The value of a figure's rounds, with the interval of a bootstrap over them."""
    every = np.asarray(rounds, dtype=np.float64)
    draws = np.random.default_rng(0).integers(len(every), size=(RESAMPLES, len(every)))
    low, high = np.quantile(figure.statistic(every[draws]), INTERVAL, method="nearest")
    return Reading(float(figure.statistic(every)), float(low), float(high))
