"""How far apart two results are, element by element."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from opgrip.replay.checks.plain import Plain
from opgrip.replay.checks.verdicts import Difference, Tolerance, Verdict

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


MULTIPLE, MULTIPLE_OF_HALF = 64.0, 8.0
"""How many times as far from the truth as the reference a result may be, and the same in dtypes of 16 bits.

Measured against torch on a CPU: summing in another order or in blocks takes 1; 10,000 products added one by one, as a
compiler without tuning does, 12; Winograd's F(4x4, 3x3) over 64 channels 53. All of those in float32, which has the
digits to spare: 64 times its rounding is still 1e-5 of a number. Programs add numbers of 16 bits in float32, so there
only intermediate results matter; 100 partial sums rounded to them take 8.
"""
MULTIPLE_OF_TF32 = 16.0
"""The same where products may be of TF32, beside what its last bit changes.

Measured on products, convolutions and a layer with softmax whose arguments were cut or rounded to TF32: of 480 draws
three took more than 8, and none took 16.
"""
ONE_BY_ONE = 0.25
"""That multiple over the root of the number of terms, where that is more.

Of n terms that are added one by one the error grows as n, and what their last bits change as the root of it. A million
take 40 to 170.
"""
OVERALL = 0.25
"""The part of that multiple which errors may reach in root mean square: the cases above take up to 8 in float32."""
TYPICAL = 0.99
"""Quantile of the reference's errors that stands for what an element's error can be."""
ENOUGH = 64
"""Elements whose root mean square says more than the largest."""

_HALF = frozenset({torch.float16, torch.bfloat16, torch.complex32})


def rounded(
    actual: Plain,
    reference: Plain,
    truth: Plain,
    disturbed: Sequence[Plain],
    tolerance: Tolerance,
    terms: float,
    tf32: bool = False,
) -> Tensor:
    """(elements,) bool, where a result of floating point is as near the truth as one can ask.

    Another order of sums, a fused kernel, a blocked or a transformed convolution err otherwise than the reference does,
    and the reference's error in one element may be nothing by luck. So an element may be off by what tolerance allows
    beside `MULTIPLE` times the largest of

    - the reference's own error there,
    - what a last bit in the arguments changes there, which is large where terms cancel,
    - the `TYPICAL` quantile of the reference's errors in all elements. A quantile and not the largest, for one element
      at a jump of the function would else excuse all others.

    In root mean square, errors must stay below `OVERALL` of that: near the bound everywhere is a bias, no rounding.

    Parameters
    ----------
    truth, disturbed : from float64, of the same shape as the others
    terms : how many numbers may have been added to make one element
    tf32 : whether products may be of TF32, by which `disturbed` is then off; they are added in float32
    """
    base = allowance(reference.dtype, magnitudes(truth.values), tolerance)
    error = distances(actual.values, _overflown(truth, actual))
    own = _finite(distances(reference.values, truth.values))
    typical = torch.quantile(_sample(own), TYPICAL)
    for other in disturbed:
        own = torch.maximum(own, _finite(distances(other.values, truth.values)))
    if tf32:
        # errors of an exact reference tell nothing of TF32's, and what a few runs change in one element may be nothing
        typical = torch.maximum(typical, torch.quantile(_sample(own), 0.5))
    multiple = max(MULTIPLE, ONE_BY_ONE * sqrt(terms))
    if tf32 or reference.dtype in _HALF:
        multiple = MULTIPLE_OF_TF32 if tf32 else MULTIPLE_OF_HALF
    bound = multiple * torch.maximum(own, typical)
    fine = error <= base + bound
    if int(fine.sum()) < ENOUGH or _mean_square(error[fine]) <= _mean_square((base + OVERALL * bound)[fine]):
        return fine
    return error <= base


def unsettled(actual: Plain, runs: Sequence[Plain]) -> Tensor:
    """(elements,) bool, where a whole number or a bool hangs on rounding, and is one of those that it may be.

    Such are those in which the runs disagree: the reference as it is, in float64, and in float64 with arguments that
    differ in their last bit. Then what lies between what they gave is right; elsewhere nothing but what all gave.
    """
    values = torch.stack([run.values.long() for run in runs])
    least, most = values.amin(0), values.amax(0)
    return (least < most) & (actual.values.long() >= least) & (actual.values.long() <= most)


def _overflown(truth: Plain, actual: Plain) -> Tensor:
    """The truth, with infinities where the dtype of what it is held against has no larger numbers."""
    if actual.dtype.is_complex or not actual.dtype.is_floating_point:
        return truth.values
    most = torch.finfo(actual.dtype).max
    overflown = actual.values.isinf() & (truth.values.abs() >= most) & (actual.values.sign() == truth.values.sign())
    return torch.where(overflown, actual.values, truth.values)


def _finite(errors: Tensor) -> Tensor:
    return errors.nan_to_num(0, 0, 0)


def _sample(errors: Tensor) -> Tensor:
    """At most 2**20 of them, evenly, for torch.quantile takes no more than 2**24."""
    return errors[:: max(1, len(errors) >> 20)] if len(errors) else errors.new_zeros(1)


def _mean_square(errors: Tensor) -> float:
    return float(errors.square().mean())
