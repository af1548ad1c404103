"""Tests whether random results, such as dropout's, have the same distribution as the reference's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import log, sqrt
from typing import Any

import torch
from torch import Tensor

from opgrip.replay.checks.choosing_operators import Named
from opgrip.replay.checks.plain import Plain
from opgrip.replay.checks.verdicts import Tolerance
from opgrip.replay.operators.memory import Arguments

DROPOUT = frozenset({"dropout", "dropout_", "native_dropout"})


def dropped_otherwise(operator: Named, arguments: Arguments, actual: Sequence[Any], tolerance: Tolerance) -> str | None:
    """Return why a result is not a dropout of the input: each element is 0 or input / (1 - p)."""
    bound = operator.bound(arguments)
    source, share = bound["input"].detach().cpu(), bound["p"]
    exact = torch.complex128 if source.is_complex() else torch.float64
    result = actual[0].detach().cpu().to(exact)
    scaled = source.to(exact) / (1 - share) if share < 1 else torch.zeros_like(source, dtype=exact)
    mask = actual[1].cpu() if operator.packet == "native_dropout" and isinstance(actual[1], Tensor) else result != 0
    rtol, atol = tolerance.of(source.dtype)
    # the factor is rounded to the dtype too, where the product is
    expected = scaled * mask
    wrong = int(((result - expected).abs() > atol + (rtol + torch.finfo(source.dtype).eps) * expected.abs()).sum())
    return f"{wrong:,} elements are not what the mask makes of the input" if wrong else None


RUNS = 32
"""Runs of the reference for a random result."""
MOST_RUNS = 256
"""The same for results of few elements, which are pooled."""
POOLED = 4096
"""Size of a pool from which on more runs are not worth their time."""
POSITIONS = 1 << 16
"""Elements of a result that are tested, evenly spaced."""
FALSE_ALARM = 1e-7
"""Probability that a test rejects a correct result."""
COMPARED = 8
"""Runs of the reference that are compared with its others."""
DEPENDENT = 2.0
"""How many times the distance between the reference's own runs a result may have."""


def drawn_otherwise(actual: Plain, runs: Sequence[Plain]) -> str | None:
    """Return why a random result is not drawn as the reference's runs were; None if nothing shows it.

    Three tests, each with a false alarm rate of one in ten million:
    - a permutation holds the same numbers in every run,
    - all elements are distributed as those of all runs (two-sample Kolmogorov-Smirnov),
    - the rank of each element among the runs' elements in its place is uniform (one-sample Kolmogorov-Smirnov), which
    detects scales, biases and zeros that vary by place, as with dropout.
    The bounds hold for independent elements. If one draw makes many elements, the reference's runs are as far from each
    other; a result may be `DEPENDENT` times as far as any of them is from the rest.
    """
    ours, theirs = _real(actual), torch.stack([_real(run) for run in runs])
    for name, is_special in (("NaN", torch.isnan), ("infinity", torch.isinf)):
        if bool(is_special(ours).any()) and not bool(is_special(theirs).any()):
            return f"{name}, where the reference has numbers"
    ours, theirs = ours.nan_to_num(torch.inf, torch.inf), theirs.nan_to_num(torch.inf, torch.inf)
    if _same_numbers(runs) and not torch.equal(_sorted(actual), _sorted(runs[0])):
        return "no permutation of what the reference gives"
    if _constant(ours, theirs):
        return "the same number in all elements, where the reference's differ"
    if _farther(_two_sample, ours, theirs, _two_sample_bound(len(ours), theirs.numel())):
        return "its numbers are distributed otherwise than the reference's"
    if _farther(_ranks, ours, theirs, sqrt(log(2 / FALSE_ALARM) / (2 * max(len(ours), 1)))):
        return "its numbers lie otherwise than the reference's in the same places"
    return None


def runs_wanted(elements: int) -> int:
    """Return how many runs of the reference are needed."""
    return min(max(RUNS, POOLED // max(elements, 1)), MOST_RUNS)


def _real(result: Plain) -> Tensor:
    """(places,) float64, the numbers at evenly spaced places, with real and imaginary parts in turn."""
    values = result.values[:: max(1, len(result.values) // POSITIONS)]
    return (torch.view_as_real(values).flatten() if values.is_complex() else values).double()


def _sorted(result: Plain) -> Tensor:
    return (torch.view_as_real(result.values) if result.values.is_complex() else result.values).flatten().sort().values


def _same_numbers(runs: Sequence[Plain]) -> bool:
    first = _sorted(runs[0])
    return all(torch.equal(_sorted(run), first) for run in runs[1:])


def _constant(ours: Tensor, theirs: Tensor) -> bool:
    """Return True if all elements are equal, which is too unlikely for numbers drawn as the runs' were.

    Its probability is at most p**(m - 1) for m elements, with the commonest number's share p and its sampling error.
    """
    if len(ours) < 2 or bool((ours != ours[0]).any()) or bool((theirs == theirs[:, :1]).all(1).any()):
        return False
    commonest = int(theirs.unique(return_counts=True)[1].max()) / theirs.numel()
    doubt = sqrt(log(2 / FALSE_ALARM) / (2 * theirs.numel()))
    return bool(min(commonest + doubt, 1.0) ** (len(ours) - 1) < FALSE_ALARM)


def _farther(distance: Callable[[Tensor, Tensor], float], ours: Tensor, theirs: Tensor, bound: float) -> bool:
    """Return True if the distance exceeds the bound, and the distances of the runs from each other."""
    if not len(ours):
        return False
    distance_to_runs = distance(ours, theirs)
    if distance_to_runs <= bound:
        return False
    among = (
        distance(theirs[one], torch.cat([theirs[:one], theirs[one + 1 :]])) for one in range(min(len(theirs), COMPARED))
    )
    return distance_to_runs > DEPENDENT * max(among)


def _two_sample(ours: Tensor, theirs: Tensor) -> float:
    one, others = ours.sort().values, theirs.flatten().sort().values
    places = torch.cat([one, others])
    below = torch.searchsorted(one, places, right=True).double() / len(one)
    return float((below - torch.searchsorted(others, places, right=True) / len(others)).abs().max())


def _two_sample_bound(one: int, others: int) -> float:
    """Return the largest difference of two empirical distribution functions of one distribution, except for
    `FALSE_ALARM`.

    The sum of each one's bound: P(sup |F_n - F| > e) <= 2 exp(-2 n e**2).
    Source: Massart 1990, The tight constant in the Dvoretzky-Kiefer-Wolfowitz inequality.
    """
    return sqrt(log(4 / FALSE_ALARM) / 2) * (1 / sqrt(max(one, 1)) + 1 / sqrt(max(others, 1)))


def _ranks(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference of the ranks' distribution function from the uniform one. Ties are broken at
    random.
    """
    runs = len(theirs)
    tied = (theirs == ours).sum(0)
    chance = torch.rand(len(ours), generator=torch.Generator().manual_seed(0))
    rank = (theirs < ours).sum(0) + (chance * (tied + 1)).long().clamp_max(tied)
    share = torch.bincount(rank, minlength=runs + 1).double().cumsum(0) / len(ours)
    return float((share - torch.arange(1, runs + 2) / (runs + 1)).abs().max())
