"""Which differences rounding explains."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from opgrip.replay.checks.closeness import distances, magnitudes
from opgrip.replay.checks.plain import Plain
from opgrip.replay.checks.tolerances import Tolerance

MULTIPLE = 8.0
"""How many times as far from the truth as the reference a result may be."""
TYPICAL = 0.99
"""Quantile of the reference's errors that stands for what an element's error can be."""


def rounded(met: Plain, reference: Plain, truth: Plain, disturbed: Sequence[Plain], tolerance: Tolerance) -> Tensor:
    """(elements,) bool, where a result of floating point is as near the truth as one can ask.

    Another order of sums, a fused kernel, a blocked or a transformed convolution err otherwise than the reference does,
    and the reference's error in one element may be nothing by luck. So an element may be off by what tolerance allows
    beside `MULTIPLE` times the largest of

    - the reference's own error there,
    - what a last bit in the arguments changes there, which is large where terms cancel,
    - the `TYPICAL` quantile of the reference's errors in all elements. A quantile and not the largest, for one element
      at a jump of the function would else excuse all others.

    The root mean square of errors must be in the same proportion too: an error just below the bound everywhere is a
    bias and no rounding. All are the same shape, and `truth` and `disturbed` are from float64.
    """
    error = distances(met.values, _as(truth, met))
    own = _finite(distances(reference.values, truth.values))
    for other in disturbed:
        own = torch.maximum(own, _finite(distances(other.values, truth.values)))
    typical = torch.quantile(_sample(_finite(distances(reference.values, truth.values))), TYPICAL)
    rtol, atol = tolerance.of(reference.dtype)
    base = atol + rtol * magnitudes(truth.values).nan_to_num(0, 0, 0)
    fine = error <= base + MULTIPLE * torch.maximum(own, typical)
    judged = fine & error.isfinite()
    if _root_mean_square(error[judged]) > _root_mean_square((base + MULTIPLE * own)[judged]):
        return fine & (error <= base + own)
    return fine


def unsettled(met: Plain, seen: Sequence[Plain]) -> Tensor:
    """(elements,) bool, where a whole number or a bool hangs on rounding, and is one of those that it may be.

    Such are those in which the runs disagree: the reference as it is, in float64, and in float64 with arguments that
    differ in their last bit. Then what lies between what they gave is right; elsewhere nothing but what all gave.
    """
    values = torch.stack([run.values.long() for run in seen])
    least, most = values.amin(0), values.amax(0)
    return (least < most) & (met.values.long() >= least) & (met.values.long() <= most)


def _as(truth: Plain, met: Plain) -> Tensor:
    """The truth, with infinities where the dtype of what it is held against has no larger numbers."""
    if met.dtype.is_complex or not met.dtype.is_floating_point:
        return truth.values
    most = torch.finfo(met.dtype).max
    overflown = met.values.isinf() & (truth.values.abs() >= most) & (met.values.sign() == truth.values.sign())
    return torch.where(overflown, met.values, truth.values)


def _finite(errors: Tensor) -> Tensor:
    return errors.nan_to_num(0, 0, 0)


def _sample(errors: Tensor) -> Tensor:
    """At most 2**20 of them, evenly, for torch.quantile takes no more than 2**24."""
    return errors[:: max(1, len(errors) >> 20)] if len(errors) else errors.new_zeros(1)


def _root_mean_square(errors: Tensor) -> float:
    return float(errors.square().mean().sqrt()) if len(errors) else 0.0
