"""Which differences rounding explains."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import torch
from torch import Tensor

from opgrip.replay.checks.closeness import allowance, distances, magnitudes
from opgrip.replay.checks.plain import Plain
from opgrip.replay.checks.tolerances import Tolerance

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
