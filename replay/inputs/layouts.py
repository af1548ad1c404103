"""Tensors that are made of others: sparse, quantized and nested ones."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from math import prod

import torch

from opgrip.replay.inputs.filling import draw
from opgrip.replay.inputs.indices import MOST_PLACES, distinct_in_rows, distinct_places, fitting_lengths
from opgrip.replay.operators.lookup import Unsupported
from opgrip.traces.schema.tensor_checks import compressed_grid
from opgrip.traces.schema.tensor_specs import (
    PACKED,
    QUANTIZED,
    Compressed,
    Coo,
    Nested,
    PerChannel,
    PerTensor,
    TensorSpec,
)
from opgrip.traces.values import Drawable


def check_layout(spec: TensorSpec) -> None:
    """Raise `Unsupported` for a tensor that cannot be made here."""
    quantized = spec.dtype in QUANTIZED
    if quantized and (spec.dtype in PACKED or spec.made_of is None):
        raise Unsupported(f"an argument has the dtype {str(spec.dtype).removeprefix('torch.')}")
    if not spec.parts and (spec.stride is None or spec.layout is not torch.strided):
        raise Unsupported(f"an argument has the layout {str(spec.layout).removeprefix('torch.')}")
    match spec.made_of:
        case Coo(indices, _, values):
            _check_places(prod(spec.shape[: indices.shape[0]]), (indices,))
            # torch 2.13 reads such values past their end
            if indices.shape[0] == 0 and values.stride != _dense_strides(values.shape):
                raise Unsupported("an argument has no sparse dimensions and values with gaps")
        case Compressed(compressed, plain):
            _check_places(prod(compressed_grid(spec)) * prod(plain.shape[:-1]), (compressed, plain))
        case PerTensor(scale):
            _check_scales((scale,))
        case PerChannel(scales):
            _check_scales(scales)


def draw_indices(
    spec: TensorSpec, values: Mapping[int, Drawable], generator: torch.Generator
) -> tuple[torch.Tensor, ...]:
    """The indices of a sparse tensor, valid ones, in the order of its parts; of other tensors none."""
    match spec.made_of:
        case Coo():
            return (_draw_coo(spec, spec.made_of, values, generator),)
        case Compressed():
            return _draw_compressed(spec, spec.made_of, values, generator)
    return ()


def assemble(spec: TensorSpec, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """A sparse or nested tensor over the memory of its parts.

    torch looks at the indices of a sparse one again.
    """
    with warnings.catch_warnings():
        # that these layouts are new
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
    raise AssertionError("other tensors have no parts")


def empty_quantized(spec: TensorSpec, device: torch.device) -> torch.Tensor:
    """A tensor without elements, of the dtype and the quantizer of another."""
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
    raise Unsupported("an argument is quantized, and the trace does not say by which scale")


def _check_places(places: int, indices: tuple[TensorSpec, ...]) -> None:
    if places > MOST_PLACES:
        raise Unsupported("an argument is sparse in more places than there are numbers for")
    if any(prod(part.shape) * part.dtype.itemsize > part.extent for part in indices):
        raise Unsupported("an argument is sparse with indices that share memory with each other")


def _dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(shape[place + 1 :]) for place in range(len(shape)))


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
