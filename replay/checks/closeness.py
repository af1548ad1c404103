"""How far apart two results are, element by element."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from opgrip.replay.checks.plain import Plain
from opgrip.replay.checks.tolerances import Tolerance
from opgrip.replay.checks.verdicts import Difference, Verdict

STEPPED = 0.01
"""Share of a quantized result's elements that may be the next one: what is rounded in the middle goes either way."""


@dataclass(frozen=True, slots=True)
class Gap:
    """What lies between a result and its reference, both of the same shape.

    Attributes
    ----------
    distance : (elements,) float64; 0 where they are equal or both NaN, inf where only one is finite
    size : (elements,) float64, |reference|
    exceeds_tolerance : (elements,) bool, where the distance is beyond tolerance
    """

    distance: Tensor
    size: Tensor
    exceeds_tolerance: Tensor


def gap(actual: Plain, reference: Plain, tolerance: Tolerance) -> Gap:
    """How far a result is from its reference."""
    distance = distances(actual.values, reference.values)
    size = magnitudes(reference.values)
    exceeds_tolerance = (distance > allowance(reference.dtype, size, tolerance)) & (distance > 0)
    if reference.step is not None:
        steps = distance > 0.5 * reference.step
        if int(steps.sum()) <= max(1, int(STEPPED * len(distance))):
            exceeds_tolerance &= distance > 1.01 * reference.step
    return Gap(distance, size, exceeds_tolerance)


def allowance(dtype: torch.dtype, size: Tensor, tolerance: Tolerance) -> Tensor:
    """(elements,) float64, what numbers of these sizes may be off by.

    The absolute tolerance that comes with a dtype is meant for numbers around 1. Where the largest is less, such as
    among gradients, it shrinks with it, for it would else hide whatever is wrong with them.
    """
    # a product with an infinite size would allow any finite number there
    size = size.nan_to_num(0, 0, 0)
    rtol, atol = tolerance.of(dtype)
    if tolerance.atol is None and len(size):
        # numbers too small for a normal float become 0 under many compilers
        least = torch.finfo(dtype).smallest_normal if dtype.is_floating_point or dtype.is_complex else 0.0
        atol = max(atol * min(1.0, float(size.max())), least)
    return atol + rtol * size


def distances(one: Tensor, other: Tensor) -> Tensor:
    """(elements,) float64, |one - other|; 0 where both are equal or NaN, inf where that is no number."""
    same = one == other
    if one.is_floating_point() or one.is_complex():
        same = same | (one.isnan() & other.isnan())
        distance = (one - other).abs()
    else:
        # whole numbers beyond 2**53 may differ by less than a float64 tells
        distance = (one.double() - other.double()).abs().clamp_min(1)
    return distance.masked_fill(same, 0).nan_to_num(torch.inf, torch.inf)


def magnitudes(values: Tensor) -> Tensor:
    """(elements,) float64, absolute values."""
    return values.abs() if values.is_floating_point() or values.is_complex() else values.double().abs()


def verdict_on(name: str, reference: Plain, between: Gap, wrong: Tensor) -> Verdict:
    """Return the verdict over a result.

    Parameters
    ----------
    name : of the result, such as `output 1`
    wrong : (elements,) bool, which of its elements are not right
    """
    distance, relative = between.distance, _relative(between, wrong)
    if not len(distance):
        return Verdict()
    count = int(wrong.sum())
    if not count:
        return Verdict(float(distance.max()), float(relative.max()))
    worst = int(torch.where(wrong, distance, -1).argmax())
    largest = float(distance[worst]), float(relative[wrong].max())
    at = tuple(reference.place(worst)) if reference.shape else ()
    return Verdict(faults=(Difference(name, count, len(wrong), *largest, at),))


def _relative(between: Gap, wrong: Tensor) -> Tensor:
    """(elements,) float64, the distance as a part of the reference's size.

    Where the reference is zero it is inf if the element is wrong and 0 else; inf too where one of both is no number.
    """
    no_number = between.distance.isinf() | ((between.size == 0) & wrong)
    sized = (between.size > 0) & between.size.isfinite()
    relative = torch.where(sized, between.distance / between.size, 0)
    return relative.masked_fill(no_number, torch.inf)
