"""Distances between results and the reference's results, and which of them rounding can explain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod, sqrt
from typing import Any, Literal

import torch
from torch import Tensor

from opgrip.cli.command import counted
from opgrip.replay.modes import RunOutputs
from opgrip.replay.run.checks.verdicts import ResultDifference, ResultVerdict, Tolerance
from opgrip.traces.schema.tensor_specs import QUANTIZED, memory_dtype


@dataclass(frozen=True, slots=True)
class ResultPosition:
    kind: Literal["output", "argument"]
    number: int

    def of(self, results: RunOutputs) -> Any:
        leaves = results.outputs if self.kind == "output" else results.arguments
        return leaves[self.number] if self.number < len(leaves) else None

    def __str__(self) -> str:
        return f"{self.kind} {self.number}"


class Unpaired(Exception):
    """Raised if results cannot be compared one by one with the reference's results; the message is the reason."""


def paired(actual: RunOutputs, reference: RunOutputs) -> list[tuple[ResultPosition, Any]]:
    if len(actual.outputs) == len(reference.outputs):
        outputs = list(range(len(reference.outputs)))
        ours: Sequence[Any] = actual.outputs
    else:
        outputs = [number for number, leaf in enumerate(reference.outputs) if isinstance(leaf, Tensor)]
        ours = [leaf for leaf in actual.outputs if isinstance(leaf, Tensor)]
        if len(ours) != len(outputs):
            raise Unpaired(f"{counted(len(ours), 'output tensor')} instead of {len(outputs)}")
    if len(actual.arguments) != len(reference.arguments):
        raise Unpaired(f"{len(actual.arguments)} written arguments instead of {len(reference.arguments)}")
    pairs = [(ResultPosition("output", number), leaf) for number, leaf in zip(outputs, ours, strict=True)]
    return pairs + [(ResultPosition("argument", number), leaf) for number, leaf in enumerate(actual.arguments)]


def within(shape: Sequence[Any], run_shapes: Sequence[Sequence[Any]], *, beyond: bool = False) -> bool:
    if any(len(other) != len(shape) for other in run_shapes):
        return len(set(map(len, run_shapes))) > 1 and len(shape) in set(map(len, run_shapes))
    if not all(isinstance(size, int) for one in (shape, *run_shapes) for size in one):
        return False
    ranges = [(min(sizes), max(sizes)) for sizes in zip(*run_shapes, strict=True)]
    if all(least == most for least, most in ranges):
        return False
    return all(
        least <= size <= most or (beyond and least < most) for size, (least, most) in zip(shape, ranges, strict=True)
    )


Shape = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Plain:
    """The values of a tensor or number, as a dense array on the CPU.

    values : (elements,) float64, complex128, int64 or bool
    step : (elements,) float64, distance between neighbouring values of a quantized dtype; None for other dtypes
    """

    shape: Shape
    dtype: torch.dtype
    values: Tensor
    step: Tensor | None = None

    @property
    def numeric(self) -> bool:
        return self.values.is_floating_point() or self.values.is_complex()

    def place(self, element: int) -> list[int]:
        if not all(isinstance(size, int) for size in self.shape):
            return [element]
        indices = []
        for size in reversed(self.shape):
            element, index = divmod(element, size)
            indices.append(index)
        return indices[::-1]


def plain(leaf: Any) -> Plain | None:
    if isinstance(leaf, Tensor):
        return _plain_tensor(leaf.detach())
    if isinstance(leaf, bool):
        return Plain((), torch.bool, torch.tensor([leaf]))
    if isinstance(leaf, int) and abs(leaf) < 1 << 63:
        return Plain((), torch.int64, torch.tensor([leaf]))
    if isinstance(leaf, float):
        return Plain((), torch.float32, torch.tensor([leaf], dtype=torch.float64))
    if isinstance(leaf, complex):
        return Plain((), torch.complex64, torch.tensor([leaf], dtype=torch.complex128))
    return None


def _plain_tensor(tensor: Tensor) -> Plain:
    if tensor.is_nested:
        parts = [_plain_tensor(part) for part in tensor.unbind()]
        values = torch.cat([part.values for part in parts]) if parts else torch.empty(0, dtype=torch.float64)
        return Plain(tuple(part.shape for part in parts), tensor.dtype, values)
    shape, dtype = tuple(tensor.shape), tensor.dtype
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    tensor = tensor.cpu()
    if dtype in QUANTIZED:
        return Plain(shape, dtype, tensor.dequantize().double().flatten(), _steps(tensor).flatten())
    return Plain(shape, dtype, _widest(tensor.resolve_conj().resolve_neg()).flatten())


def _widest(tensor: Tensor) -> Tensor:
    dtype = tensor.dtype
    if dtype.is_complex:
        return tensor.to(torch.complex128)
    if memory_dtype(dtype) is not dtype:
        # bit patterns of such a dtype are not numbers, but can be tested for equality
        return tensor.contiguous().view(memory_dtype(dtype)).long()
    if dtype.is_floating_point:
        # some 8-bit floats convert only to float32
        return tensor.float().double() if dtype.itemsize == 1 else tensor.double()
    if dtype is torch.uint64:
        return tensor.contiguous().view(torch.int64)
    return tensor if dtype is torch.bool else tensor.long()


def _steps(tensor: Tensor) -> Tensor:
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return torch.full((prod(tensor.shape),), tensor.q_scale(), dtype=torch.float64)
    axis = tensor.q_per_channel_axis()
    sizes = [-1 if place == axis else 1 for place in range(tensor.dim())]
    return tensor.q_per_channel_scales().double().reshape(sizes).expand(tensor.shape)


STEPPED = 0.01  # share of a quantized result's elements that may be off by one step, because ties may round either way


@dataclass(frozen=True, slots=True)
class Gap:
    """The distance between a result and the reference's result, element by element.

    distance : (elements,) float64; 0 if equal or both NaN, inf if they differ and are not both finite
    size : (elements,) float64, absolute value of the reference's element
    exceeds_tolerance : (elements,) bool
    """

    distance: Tensor
    size: Tensor
    exceeds_tolerance: Tensor


def gap(actual: Plain, reference: Plain, tolerance: Tolerance) -> Gap:
    distance = distances(actual.values, reference.values)
    size = magnitudes(reference.values)
    exceeds_tolerance = (distance > allowance(reference.dtype, size, tolerance)) & (distance > 0)
    if reference.step is not None:
        steps = distance > 0.5 * reference.step
        if int(steps.sum()) <= max(1, int(STEPPED * len(distance))):
            exceeds_tolerance &= distance > 1.01 * reference.step
    return Gap(distance, size, exceeds_tolerance)


def allowance(dtype: torch.dtype, size: Tensor, tolerance: Tolerance) -> Tensor:
    """Return the tolerated error of each element, (elements,) float64.

    size : (elements,) float64, absolute values of the reference's elements
    """
    # the product with an infinite size would allow any finite number there
    size = size.nan_to_num(0, 0, 0)
    rtol, atol = tolerance.of(dtype)
    if tolerance.atol is None and len(size):
        # programs of many compilers flush subnormal numbers to 0
        least = torch.finfo(dtype).smallest_normal if dtype.is_floating_point or dtype.is_complex else 0.0
        atol = max(atol * min(1.0, float(size.max())), least)
    return atol + rtol * size


def distances(one: Tensor, other: Tensor) -> Tensor:
    """Return |one - other|, (elements,) float64: 0 if equal or both NaN, inf if they differ and are not both finite."""
    same = one == other
    if one.is_floating_point() or one.is_complex():
        same = same | (one.isnan() & other.isnan())
        distance = (one - other).abs()
    else:
        # unequal integers beyond 2**53 may be equal as float64
        distance = (one.double() - other.double()).abs().clamp_min(1)
    return distance.masked_fill(same, 0).nan_to_num(torch.inf, torch.inf)


def magnitudes(values: Tensor) -> Tensor:
    return values.abs() if values.is_floating_point() or values.is_complex() else values.double().abs()


def verdict_on(name: str, reference: Plain, between: Gap, wrong: Tensor) -> ResultVerdict:
    distance, relative = between.distance, _relative(between, wrong)
    if not len(distance):
        return ResultVerdict()
    count = int(wrong.sum())
    if not count:
        return ResultVerdict(float(distance.max()), float(relative.max()))
    worst = int(torch.where(wrong, distance, -1).argmax())
    largest = float(distance[worst]), float(relative[wrong].max())
    at = tuple(reference.place(worst)) if reference.shape else ()
    return ResultVerdict(faults=(ResultDifference(name, count, len(wrong), *largest, at),))


def _relative(between: Gap, wrong: Tensor) -> Tensor:
    no_number = between.distance.isinf() | ((between.size == 0) & wrong)
    sized = (between.size > 0) & between.size.isfinite()
    relative = torch.where(sized, between.distance / between.size, 0)
    return relative.masked_fill(no_number, torch.inf)


# maximum error of a result as a multiple of the reference's error. In float32, another order of sums needs 1, 10,000
# products added one by one 12, Winograd's F(4x4, 3x3) over 64 channels 53; 100 partial sums rounded to 16 bits need 8
MULTIPLE, MULTIPLE_OF_HALF = 64.0, 8.0
# the same for TF32 products, in addition to the effect of TF32's last bit; three of 480 calls needed more than 8
MULTIPLE_OF_TF32 = 16.0
# multiple per square root of the number of terms, used if it exceeds `MULTIPLE`: the error of n terms added one by one
# grows with n, the effect of their last bits with its root; a million terms need 40 to 170
ONE_BY_ONE = 0.25
# part of the maximum error that the root mean square of all errors may reach; in the measurements above, 8 in float32
OVERALL = 0.25
TYPICAL = 0.99  # quantile of the reference's errors that is taken as the typical error of an element
ENOUGH = 64  # minimum number of elements for which the root mean square is meaningful

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
    base = allowance(reference.dtype, magnitudes(truth.values), tolerance)
    error = distances(actual.values, _overflown(truth, actual))
    own = _finite(distances(reference.values, truth.values))
    typical = torch.quantile(_sample(own), TYPICAL)
    for other in disturbed:
        own = torch.maximum(own, _finite(distances(other.values, truth.values)))
    if tf32:
        # an exact reference does not show the errors of TF32, and in a single element a few runs may show no effect
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
    values = torch.stack([run.values.long() for run in runs])
    least, most = values.amin(0), values.amax(0)
    return (least < most) & (actual.values.long() >= least) & (actual.values.long() <= most)


def _overflown(truth: Plain, actual: Plain) -> Tensor:
    if actual.dtype.is_complex or not actual.dtype.is_floating_point:
        return truth.values
    most = torch.finfo(actual.dtype).max
    overflown = actual.values.isinf() & (truth.values.abs() >= most) & (actual.values.sign() == truth.values.sign())
    return torch.where(overflown, actual.values, truth.values)


def _finite(errors: Tensor) -> Tensor:
    return errors.nan_to_num(0, 0, 0)


def _sample(errors: Tensor) -> Tensor:
    return errors[:: max(1, len(errors) >> 20)] if len(errors) else errors.new_zeros(1)


def _mean_square(errors: Tensor) -> float:
    return float(errors.square().mean())
