"""Distance between the results of two runs of a call, and the part of it that rounding explains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite, sqrt
from typing import Any

import torch
from torch import Tensor

from opgrip.replay.modes import RunOutputs
from opgrip.replay.operators.memory import Arguments
from opgrip.replay.run.checks.closeness import MULTIPLE, MULTIPLE_OF_HALF, OVERALL
from opgrip.replay.run.checks.reference import DISTURBED, truths_of

LARGEST = 1e30  # error of results that are not finite although the reference's are
PLAIN_UNITS = 2.0  # error in units in the last place that needs no comparison with float64
HALF_EPS = 1e-4  # machine epsilon from which a dtype counts as half precision


@dataclass(frozen=True, slots=True)
class LocalError:
    """The error of a call's results if it runs on the reference's inputs.

    relative : root mean square of the error, relative to that of the exact result; for integers, the share of
        elements that differ
    units : `relative` in units in the last place of the dtype; for integers, `relative`
    excess : `relative` divided by the error that rounding explains
    exceeds_noise : True if rounding does not explain the error
    """

    relative: float = 0.0
    units: float = 0.0
    excess: float = 0.0
    exceeds_noise: bool = False


def relative_error(ours: Tensor, reference: Tensor) -> float:
    """Return the root mean square of `ours - reference`, relative to that of `reference`; `LARGEST` if `ours` has NaN
    or infinity where `reference` is finite.
    """
    if reference.numel() == 0:
        return 0.0
    ours = ours.to(reference.device)
    if not (reference.is_floating_point() or reference.is_complex()):
        return float((ours != reference).double().mean())
    one, other = _wide(ours), _wide(reference)
    distance = _norm(one - other)
    if not isfinite(distance):
        is_finite = other.isfinite()
        if bool((is_finite & ~one.isfinite()).any()):
            return LARGEST
        distance = _norm((one - other).masked_fill(~is_finite | (one == other), 0))
        other = other.masked_fill(~is_finite, 0)
    size = _norm(other)
    # relative to a zero, each error would be infinite
    return min(distance / size if size > 0 else distance / sqrt(other.numel()), LARGEST)


def has_no_number(tensor: Tensor) -> bool:
    return (tensor.is_floating_point() or tensor.is_complex()) and not bool(_wide(tensor).isfinite().all())


def unit_of(tensor: Tensor, dtype: torch.dtype | None) -> float:
    """Return the distance of 1 to the next number of the coarser of `dtype` and the tensor's; 1 for integers."""
    if not _has_unit(tensor.dtype):
        return 1.0
    return max(torch.finfo(kind).eps for kind in (tensor.dtype, dtype) if kind is not None)


def local_error(
    function: Callable[..., Any],
    make_arguments: Callable[[], Arguments],
    mutates: bool,
    ours: Sequence[Tensor],
    reference: Sequence[Tensor],
    pick: Callable[[RunOutputs], list[Tensor]],
    dtype: torch.dtype | None,
    cast: Callable[[Any], Any],
) -> LocalError:
    """Return the largest error of a call's results.

    ours, reference : results of the variant and of the reference; `pick` selects the same results of other runs
    dtype, cast : dtype in which the variant computes, and the function that casts its arguments
    """
    units = [unit_of(tensor, dtype) for tensor in reference]
    errors = [relative_error(one, other) for one, other in zip(ours, reference, strict=True)]
    relative, in_units = _largest(errors, units)
    if not any(error for error, unit in zip(errors, units, strict=True) if unit == 1) and in_units <= PLAIN_UNITS:
        return LocalError(relative, in_units, 2 * in_units)
    truths = truths_of(function, make_arguments, mutates, 0, 0)
    exact = [] if truths is None else pick(truths.exact)
    if [tensor.shape for tensor in exact] != [tensor.shape for tensor in reference]:
        return LocalError(relative, in_units, 2 * in_units, 2 * in_units > OVERALL * MULTIPLE)
    explained = [relative_error(own, truth) for own, truth in zip(reference, exact, strict=True)]
    explained = [own if unit == 1 else max(own, unit / 2) for own, unit in zip(explained, units, strict=True)]
    errors = [relative_error(one, truth) for one, truth in zip(ours, exact, strict=True)]
    multiples = [OVERALL * (2 * MULTIPLE_OF_HALF if HALF_EPS < unit < 1 else MULTIPLE) for unit in units]
    if _exceeds(errors, explained, multiples):
        disturbed = truths_of(function, lambda: cast(make_arguments()), mutates, 0, DISTURBED)
        for run in () if disturbed is None else disturbed.all:
            pairs = zip(pick(run), exact, strict=False)
            others = [relative_error(one, truth) if one.shape == truth.shape else 0.0 for one, truth in pairs]
            explained = list(map(max, explained, others))
    both = zip(errors, explained, strict=True)
    ratios = [min(error / own, LARGEST) if own else LARGEST * (error > 0) for error, own in both]
    return LocalError(*_largest(errors, units), max(ratios), _exceeds(errors, explained, multiples))


def _largest(errors: Sequence[float], units: Sequence[float]) -> tuple[float, float]:
    pairs = [(error, error / unit) for error, unit in zip(errors, units, strict=True)]
    return max(pairs, key=lambda pair: pair[1], default=(0.0, 0.0))


def _exceeds(errors: Sequence[float], explained: Sequence[float], multiples: Sequence[float]) -> bool:
    return any(error > most * own for error, own, most in zip(errors, explained, multiples, strict=True))


def _wide(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    return tensor.float() if tensor.itemsize < 4 else tensor


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def _has_unit(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex
