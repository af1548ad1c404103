"""Sparse, quantized and nested tensors; drawn indices are made valid, because kernels do not check them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch

from opgrip.replay.inputs.filling import draw
from opgrip.replay.operators.agreement.indices import fitting_lengths
from opgrip.replay.operators.lookup import Unsupported
from opgrip.traces.schema.python_objects import PACKED_BY, PACKERS, ObjectSpec
from opgrip.traces.schema.tensor_specs import (
    PACKED,
    QUANTIZED,
    STORAGE,
    Compressed,
    Coo,
    Nested,
    PerChannel,
    PerTensor,
    TensorSpec,
    compressed_grid,
    contiguous,
)
from opgrip.traces.values import Drawable

MOST_PLACES = 1 << 60  # maximum number of elements in a sparse tensor that 64-bit arithmetic can index


def distinct_in_rows(drawn: torch.Tensor, lengths: torch.Tensor, most: int) -> torch.Tensor:
    """Return distinct column numbers for each row, in ascending order.

    drawn : (elements,) int64, random column numbers of all rows, one row after another
    lengths : (rows,) int64, number of elements in each row, at most `most`
    """
    if drawn.numel() == 0:
        return drawn
    row = torch.arange(lengths.numel(), device=drawn.device).repeat_interleave(lengths)
    begin = (lengths.cumsum(0) - lengths)[row]
    place = torch.arange(drawn.numel(), device=drawn.device) - begin
    columns = (drawn.remainder(most) + row * most).sort().values - row * most
    # the second of two equal columns, and all that it then collides with, move on by one
    span = 2 * most
    lifted = columns - place + row * span
    columns = lifted.cummax(0).values - row * span + place
    # the last columns may exceed the row; move them back
    return torch.minimum(columns, most - lengths[row] + place)


def distinct_places(drawn: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
    """Return distinct indices in ascending order.

    drawn : (dimensions, elements) int64, random indices, each less than the size of its dimension
    """
    if not sizes or drawn.shape[1] == 0:
        return drawn
    steps = [prod(sizes[place + 1 :]) for place in range(len(sizes))]
    flat = torch.zeros_like(drawn[0])
    for row, step in zip(drawn, steps, strict=True):
        flat += row * step
    flat = distinct_in_rows(flat, torch.tensor([flat.numel()], device=flat.device), prod(sizes))
    return torch.stack([flat // step % size for step, size in zip(steps, sizes, strict=True)])


def check_layout(spec: TensorSpec) -> None:
    quantized = spec.dtype in QUANTIZED
    if quantized and (spec.dtype in PACKED or spec.made_of is None):
        raise Unsupported(
            f"an argument has the dtype {str(spec.dtype).removeprefix('torch.')}, which a replay cannot create"
        )
    if not spec.parts and (spec.stride is None or spec.layout is not torch.strided):
        raise Unsupported(
            f"an argument has the layout {str(spec.layout).removeprefix('torch.')}, which a replay cannot create"
        )
    match spec.made_of:
        case Coo(indices, _, values):
            _check_places(prod(spec.shape[: indices.shape[0]]), (indices,))
            # torch 2.13 reads such values beyond their end
            if indices.shape[0] == 0 and values.stride != contiguous(values.shape):
                raise Unsupported("a sparse argument without sparse dimensions has values that are not contiguous")
        case Compressed(compressed, plain):
            _check_places(prod(compressed_grid(spec)) * prod(plain.shape[:-1]), (compressed, plain))
        case PerTensor(scale):
            _check_scales((scale,))
        case PerChannel(scales):
            _check_scales(scales)


def draw_indices(
    spec: TensorSpec, values: Mapping[int, Drawable], generator: torch.Generator
) -> tuple[torch.Tensor, ...]:
    match spec.made_of:
        case Coo():
            return (_draw_coo(spec, spec.made_of, values, generator),)
        case Compressed():
            return _draw_compressed(spec, spec.made_of, values, generator)
    return ()


def assemble(spec: TensorSpec, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    with warnings.catch_warnings():
        # ignore warnings that these layouts are new
        warnings.simplefilter("ignore")
        match spec.made_of:
            case Coo(coalesced=coalesced):
                indices, values = parts
                return torch.sparse_coo_tensor(
                    indices, values, spec.shape, check_invariants=True, is_coalesced=coalesced
                )
            case Compressed():
                compressed, plain, values = parts
                return torch.sparse_compressed_tensor(
                    compressed, plain, values, spec.shape, layout=spec.layout, check_invariants=True
                )
            case Nested(sizes=()):
                return torch.nested.nested_tensor([], dtype=spec.dtype, device=parts[0].device)
            case Nested(_, sizes, strides, offsets):
                places = (torch.tensor(numbers, dtype=torch.int64) for numbers in (sizes, strides, offsets))
                return torch._nested_view_from_buffer(parts[0], *places)
    raise AssertionError("only sparse, quantized and nested tensors are made of parts")


def pack(value: Any) -> Any:
    """Return torch's object for packed parameters if `value` describes one, else `value`."""
    if isinstance(value, ObjectSpec) and value.cls in PACKERS:
        return getattr(torch.ops.quantized, value.cls.removeprefix(PACKED_BY))(*value.content)
    return value


def as_argument(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor | torch.UntypedStorage:
    return tensor.untyped_storage() if spec.cls == STORAGE else tensor


def empty_quantized(spec: TensorSpec, device: torch.device) -> torch.Tensor:
    none = [0] * len(spec.shape)
    match spec.made_of:
        case PerTensor(scale, zero_point):
            return torch._empty_affine_quantized(
                none, scale=scale, zero_point=zero_point, dtype=spec.dtype, device=device
            )
        case PerChannel(scales, zero_points, axis):
            floats = any(isinstance(zero, float) for zero in zero_points)
            return torch._empty_per_channel_affine_quantized(
                none,
                scales=torch.tensor(scales, dtype=torch.float32 if floats else torch.float64, device=device),
                zero_points=torch.tensor(zero_points, dtype=torch.float32 if floats else torch.int64, device=device),
                axis=axis,
                dtype=spec.dtype,
                device=device,
            )
    raise Unsupported("an argument is quantized by a scale that the trace does not contain")


def _check_places(places: int, indices: tuple[TensorSpec, ...]) -> None:
    if places > MOST_PLACES:
        raise Unsupported("a sparse argument has more positions than int64 can number")
    if any(prod(part.shape) * part.dtype.itemsize > part.extent for part in indices):
        raise Unsupported("an argument is sparse with indices that share memory with each other")


def _check_scales(scales: tuple[float, ...]) -> None:
    if not all(0 < scale < math.inf for scale in scales):
        raise Unsupported("an argument is quantized by a scale that is not positive")


def _draw_coo(spec: TensorSpec, coo: Coo, values: Mapping[int, Drawable], generator: torch.Generator) -> torch.Tensor:
    sparse, nnz = coo.indices.shape
    if not sparse or not nnz:
        return torch.zeros((sparse, nnz), dtype=torch.int64, device=generator.device)
    sizes = spec.shape[:sparse]
    rows = torch.stack([_draw_whole((nnz,), row, values, generator) for row in coo.rows])
    rows = rows.remainder(torch.tensor(sizes, device=rows.device)[:, None])
    return distinct_places(rows, sizes) if coo.coalesced else rows


def _draw_compressed(
    spec: TensorSpec, made_of: Compressed, values: Mapping[int, Drawable], generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = compressed_grid(spec)
    *batch, nnz = made_of.plain.shape
    drawn = _draw_whole((*batch, rows), made_of.compressed.values, values, generator)
    lengths = fitting_lengths(drawn, columns, nnz)
    begin = torch.zeros((*batch, 1), dtype=torch.int64, device=generator.device)
    plain = _draw_whole((prod(batch) * nnz,), made_of.plain.values, values, generator)
    plain = distinct_in_rows(plain, lengths.reshape(-1), columns)
    return torch.cat([begin, lengths.cumsum(-1)], dim=-1), plain.reshape(*batch, nnz)


def _draw_whole(
    shape: tuple[int, ...], number: int | None, values: Mapping[int, Drawable], generator: torch.Generator
) -> torch.Tensor:
    model = None if number is None else values.get(number)
    if 0 in shape:
        return torch.zeros(shape, dtype=torch.int64, device=generator.device)
    return draw(shape, torch.int64, model, generator)
