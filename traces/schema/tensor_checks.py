"""Reading of tensor metadata from JSON, with checks that such a tensor can be created.

The checks are needed because a trace may be untrusted, and some of torch's constructors do not check their arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch

from opgrip.errors import FormatError
from opgrip.traces.schema.json_values import Json, convert, readers
from opgrip.traces.schema.tensor_specs import (
    BLOCKED,
    COMPRESSED_LAYOUTS,
    DTYPES,
    LAYOUTS,
    QUANTIZED,
    AnyMadeOf,
    AnyPart,
    Compressed,
    Coo,
    MadeOf,
    Nested,
    PerChannel,
    PerTensor,
    TensorSpec,
    bounding_shape,
    compressed_grid,
)


def check_made_of(spec: TensorSpec) -> None:
    """Raise `FormatError` if a sparse, quantized or nested tensor cannot be created from its parts or quantization."""
    for part in spec.parts:
        _ask(
            part.layout is torch.strided and part.stride is not None,
            "a part of a sparse or nested tensor has no strides",
        )
        _ask(part.cls is None, f"a part of a sparse or nested tensor is a {part.cls}, not a plain tensor")
        _ask(
            part.device == spec.device,
            f"a sparse or nested tensor is on {spec.device}, but a part of it is on {part.device}",
        )
    match spec.made_of:
        case Coo() as coo:
            _check_coo(spec, coo)
        case Compressed() as compressed:
            _check_compressed(spec, compressed)
        case PerTensor() | PerChannel() as quantizer:
            _check_quantizer(spec, quantizer)
        case Nested() as nested:
            _check_nested(spec, nested)


def _check_coo(spec: TensorSpec, coo: Coo) -> None:
    _ask(spec.layout is torch.sparse_coo, f"a tensor of layout {spec.layout} has the indices of a sparse_coo tensor")
    _ask(
        len(coo.indices.shape) == 2 and coo.indices.dtype == torch.int64,
        "the indices of a sparse_coo tensor are not of shape (dimensions, elements) and dtype int64",
    )
    sparse, nnz = coo.indices.shape
    _ask(
        sparse <= len(spec.shape),
        f"a sparse_coo tensor has {len(spec.shape)} dimensions, but indices for {sparse}",
    )
    _ask(len(coo.rows) == sparse, f"indices of {sparse} rows have value models for {len(coo.rows)} rows")
    _check_values(spec, coo.values, (nnz, *spec.shape[sparse:]))
    places = prod(spec.shape[:sparse])
    _ask(
        nnz <= places or (places > 0 and not coo.coalesced),
        f"a sparse_coo tensor stores {nnz} elements, but has {places} positions",
    )


def _check_compressed(spec: TensorSpec, made_of: Compressed) -> None:
    _ask(spec.layout in COMPRESSED_LAYOUTS, f"a tensor of layout {spec.layout} has compressed indices")
    compressed, plain, values = made_of.compressed, made_of.plain, made_of.values
    _ask(
        compressed.dtype == plain.dtype and plain.dtype in (torch.int32, torch.int64),
        f"compressed indices have the dtypes {compressed.dtype} and {plain.dtype}, not int32 or int64",
    )
    _ask(
        len(compressed.shape) == len(plain.shape) > 0,
        f"compressed indices have {len(compressed.shape)} and {len(plain.shape)} dimensions",
    )
    batch, nnz = plain.shape[:-1], plain.shape[-1]
    first = len(batch)
    _ask(
        spec.shape[:first] == batch == compressed.shape[:-1],
        f"a tensor of shape {spec.shape} has indices of batch {batch}",
    )
    _ask(len(spec.shape) >= first + 2, f"a tensor with compressed indices has fewer than two dimensions: {spec.shape}")
    block = values.shape[first + 1 : first + 3] if spec.layout in BLOCKED else (1, 1)
    _ask(len(block) == 2 and 0 not in block, f"a sparse tensor has blocks of the invalid size {block}")
    height, width = spec.shape[first : first + 2]
    _ask(
        height % block[0] == width % block[1] == 0, f"blocks of size {block} do not divide a matrix of {height}x{width}"
    )
    rows, columns = compressed_grid(spec)
    _ask(
        compressed.shape[-1] == rows + 1,
        f"{rows} rows or columns need {rows + 1} compressed indices, got {compressed.shape[-1]}",
    )
    _ask(nnz <= rows * columns, f"a sparse tensor stores {nnz} elements, but has {rows * columns} positions")
    dense = spec.shape[first + 2 :]
    _check_values(spec, values, (*batch, nnz, *(block if spec.layout in BLOCKED else ()), *dense))


def _check_values(spec: TensorSpec, values: TensorSpec, shape: tuple[int, ...]) -> None:
    _ask(values.shape == shape, f"expected stored values of shape {shape}, got {values.shape}")
    _ask(values.dtype == spec.dtype, f"a sparse tensor of {spec.dtype} stores values of {values.dtype}")


def _check_quantizer(spec: TensorSpec, quantizer: PerTensor | PerChannel) -> None:
    _ask(
        spec.dtype in QUANTIZED and spec.stride is not None,
        f"a tensor of dtype {spec.dtype} has a quantizer, but is not quantized",
    )
    scales = (quantizer.scale,) if isinstance(quantizer, PerTensor) else quantizer.scales
    zero_points = (quantizer.zero_point,) if isinstance(quantizer, PerTensor) else quantizer.zero_points
    _ask(all(type(scale) is float for scale in scales), "a scale of a quantized tensor is not a float")
    _ask(
        {type(zero) for zero in zero_points} in (set(), {int}, {float}),
        "zero points of a quantized tensor are neither all integers nor all floats",
    )
    bounds = torch.iinfo(QUANTIZED[spec.dtype])
    held = (isinstance(zero, float) or bounds.min <= zero <= bounds.max for zero in zero_points)
    _ask(all(held), f"a zero point of a tensor of {spec.dtype} is out of range")
    if isinstance(quantizer, PerTensor):
        return
    _ask(
        quantizer.axis < len(spec.shape),
        f"a tensor of {len(spec.shape)} dimensions is quantized along dimension {quantizer.axis}",
    )
    channels = spec.shape[quantizer.axis]
    _ask(
        len(quantizer.scales) == len(quantizer.zero_points) == channels,
        f"{channels} channels have {len(quantizer.scales)} scales and {len(quantizer.zero_points)} zero points",
    )


def _check_nested(spec: TensorSpec, nested: Nested) -> None:
    _ask(
        spec.layout is torch.strided and spec.stride is None,
        f"a tensor of layout {spec.layout} with strides is described as nested",
    )
    _ask(
        len(nested.buffer.shape) == 1 and nested.buffer.dtype == spec.dtype,
        "the buffer of a nested tensor has another dtype, or more than one dimension",
    )
    count = len(nested.sizes)
    _ask(
        len(nested.strides) == len(nested.offsets) == count,
        f"a nested tensor has {count} sizes, {len(nested.strides)} strides and {len(nested.offsets)} offsets",
    )
    dimensions = len(spec.shape) - 1
    items = zip(nested.sizes, nested.strides, nested.offsets, strict=True)
    for size, stride, offset in items:
        _ask(
            len(size) == len(stride) == dimensions,
            f"a nested tensor of {dimensions + 1} dimensions has a part of {len(size)}",
        )
        end = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True)) + 1
        _ask(0 in size or end <= nested.buffer.shape[0], "a part of a nested tensor exceeds its buffer")
    _ask(
        spec.shape == bounding_shape(nested.sizes, dimensions + 1),
        f"a nested tensor of shape {spec.shape} has parts of another total shape",
    )


def _ask(holds: bool, problem: str) -> None:
    if not holds:
        raise FormatError(problem)


def read_tensor(body: Json) -> TensorSpec:
    """Return the `TensorSpec` that a JSON object describes; raise `FormatError` if such a tensor cannot be created."""
    spec: TensorSpec = convert(body, TensorSpec)
    if spec.stride is not None and len(spec.stride) != len(spec.shape):
        raise FormatError(f"a tensor has {len(spec.shape)} dimensions and {len(spec.stride)} strides")
    check_made_of(spec)
    return spec


def _named(kind: str, values: Mapping[str, Any]) -> Callable[[Json], Any]:
    def read(name: Json) -> Any:
        if not isinstance(name, str) or name not in values:
            raise FormatError(f"unknown {kind}: {str(name)[:60]!r}")
        return values[name]

    return read


def _read_part(body: Json) -> TensorSpec:
    if isinstance(body, dict) and "made_of" in body:
        raise FormatError("a part of a sparse or nested tensor, such as its values, is itself sparse or nested")
    return read_tensor(body)


def _read_made_of(form: Json) -> MadeOf | None:
    if not isinstance(form, dict) or len(form) != 1:
        raise FormatError(f"expected a JSON object of one member, got {str(form)[:60]!r}")
    ((name, body),) = form.items()
    # a kind from a later version: the tensor cannot be created, but the rest of the trace can be read
    return convert(body, MADE_OF[name], name) if name in MADE_OF else None


MADE_OF: dict[str, type] = {
    "coo": Coo,
    "compressed": Compressed,
    "per_tensor": PerTensor,
    "per_channel": PerChannel,
    "nested": Nested,
}
readers[torch.dtype] = _named("dtype", DTYPES)
readers[torch.layout] = _named("layout", LAYOUTS)
readers[AnyMadeOf] = _read_made_of
readers[AnyPart] = _read_part
