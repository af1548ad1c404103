"""How much a case's median differs from one replay to the next: learned from all cases, for those with few repeats.

The variance of each case over its repeats is drawn towards that of all, as by G. K. Smyth, "Linear models and
empirical Bayes methods for assessing differential expression in microarray experiments", Statistical Applications in
Genetics and Molecular Biology 3 (2004), article 3, section 6.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, inf, log
from statistics import fmean, variance

from opgrip.cli.plugins import needed

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
