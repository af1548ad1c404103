"""The JSON forms of tensors, and checks that their metadata can make them.

A trace may come from a stranger, and some of torch's constructors take a caller's word for such things.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from math import prod
from typing import Any

import torch

from opgrip.errors import FormatError
from opgrip.traces.schema.tensor_specs import (
    COMPRESSED_LAYOUTS,
    COMPRESSES_ROWS,
    DTYPES,
    LAYOUTS,
    LIMIT,
    QUANTIZED,
    Compressed,
    Coo,
    Json,
    MadeOf,
    Nested,
    PerChannel,
    PerTensor,
    TensorSpec,
    bounding_shape,
    device_name,
    plain_name,
    sizes,
)

BLOCKED = (torch.sparse_bsr, torch.sparse_bsc)


def check_made_of(spec: TensorSpec) -> None:
    """Raise `FormatError` where a tensor's parts or quantizer cannot make it."""
    for part in spec.parts:
        _ask(part.layout is torch.strided and part.stride is not None, "a part of a tensor that has no strides")
        _ask(part.cls is None, "a part of a tensor that is no plain tensor")
        _ask(part.device == spec.device, "a part of a tensor on another device")
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
    _ask(spec.layout is torch.sparse_coo, "indices of another layout's tensor")
    _ask(len(coo.indices.shape) == 2 and coo.indices.dtype == torch.int64, "indices that are no (N, nnz) int64 tensor")
    sparse, nnz = coo.indices.shape
    _ask(sparse <= len(spec.shape), "more sparse dimensions than there are")
    _ask(len(coo.rows) == sparse, "value models of other rows than the indices have")
    _check_values(spec, coo.values, (nnz, *spec.shape[sparse:]))
    places = prod(spec.shape[:sparse])
    _ask(nnz <= places or (places > 0 and not coo.coalesced), "more elements than there are places")


def _check_compressed(spec: TensorSpec, made_of: Compressed) -> None:
    _ask(spec.layout in COMPRESSED_LAYOUTS, "compressed indices of another layout's tensor")
    compressed, plain, values = made_of.compressed, made_of.plain, made_of.values
    _ask(compressed.dtype == plain.dtype and plain.dtype in (torch.int32, torch.int64), "indices that are no integers")
    _ask(len(compressed.shape) == len(plain.shape) > 0, "indices of different dimensions")
    batch, nnz = plain.shape[:-1], plain.shape[-1]
    first = len(batch)
    _ask(spec.shape[:first] == batch == compressed.shape[:-1], "indices of another batch")
    _ask(len(spec.shape) >= first + 2, "compressed indices of less than a matrix")
    block = values.shape[first + 1 : first + 3] if spec.layout in BLOCKED else (1, 1)
    _ask(len(block) == 2 and 0 not in block, "blocks that are none")
    height, width = spec.shape[first : first + 2]
    _ask(height % block[0] == width % block[1] == 0, "blocks that do not fill the matrix")
    rows, columns = compressed_grid(spec)
    _ask(compressed.shape[-1] == rows + 1, "compressed indices of another number of rows")
    _ask(nnz <= rows * columns, "more elements than there are places")
    dense = spec.shape[first + 2 :]
    _check_values(spec, values, (*batch, nnz, *(block if spec.layout in BLOCKED else ()), *dense))


def compressed_grid(spec: TensorSpec) -> tuple[int, int]:
    """How many rows a compressed sparse tensor has, of how many blocks; columns of rows where it is by column.

    A block is one element in the layouts that have none.
    """
    assert isinstance(spec.made_of, Compressed), "the caller's business"
    plain, values = spec.made_of.plain, spec.made_of.values
    first = len(plain.shape) - 1
    height, width = spec.shape[first : first + 2]
    if spec.layout in BLOCKED:
        height, width = height // values.shape[first + 1], width // values.shape[first + 2]
    return (height, width) if spec.layout in COMPRESSES_ROWS else (width, height)


def _check_values(spec: TensorSpec, values: TensorSpec, shape: tuple[int, ...]) -> None:
    _ask(values.shape == shape, f"values of shape {values.shape} where {shape} are stored")
    _ask(values.dtype == spec.dtype, "values of another dtype")


def _check_quantizer(spec: TensorSpec, quantizer: PerTensor | PerChannel) -> None:
    _ask(spec.dtype in QUANTIZED and spec.stride is not None, "a quantizer of a tensor that is not quantized")
    zero_points = (quantizer.zero_point,) if isinstance(quantizer, PerTensor) else quantizer.zero_points
    bounds = torch.iinfo(QUANTIZED[spec.dtype])
    held = (isinstance(zero, float) or bounds.min <= zero <= bounds.max for zero in zero_points)
    _ask(all(held), "a zero point that the dtype cannot hold")
    if isinstance(quantizer, PerTensor):
        return
    _ask(quantizer.axis < len(spec.shape), "a quantizer of a dimension that is not there")
    channels = spec.shape[quantizer.axis]
    _ask(len(quantizer.scales) == len(quantizer.zero_points) == channels, "a quantizer of other channels")


def _check_nested(spec: TensorSpec, nested: Nested) -> None:
    _ask(spec.layout is torch.strided and spec.stride is None, "nested tensors of another layout's tensor")
    _ask(len(nested.buffer.shape) == 1 and nested.buffer.dtype == spec.dtype, "nested tensors without a buffer")
    count = len(nested.sizes)
    _ask(len(nested.strides) == len(nested.offsets) == count, "nested tensors of unequal numbers")
    dimensions = len(spec.shape) - 1
    items = zip(nested.sizes, nested.strides, nested.offsets, strict=True)
    for size, stride, offset in items:
        _ask(len(size) == len(stride) == dimensions, "a nested tensor of other dimensions")
        end = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True)) + 1
        _ask(0 in size or end <= nested.buffer.shape[0], "a nested tensor that its buffer does not hold")
    _ask(spec.shape == bounding_shape(nested.sizes, dimensions + 1), "nested tensors of another shape")


def _ask(holds: bool, problem: str) -> None:
    if not holds:
        raise FormatError(problem)


def tensor_form(spec: TensorSpec) -> dict[str, Json]:
    """The JSON object of a tensor; fields that have their default are left out."""
    form: dict[str, Json] = {
        "shape": list(spec.shape),
        "stride": None if spec.stride is None else list(spec.stride),
        "dtype": plain_name(spec.dtype),
        "device": spec.device,
    }
    for field in _OPTIONAL:
        value = getattr(spec, field.name)
        if value != field.default:
            form[field.name] = _FORMS[field.name](value) if field.name in _FORMS else value
    return form


def tensor_of(body: Mapping[str, Json]) -> TensorSpec:
    """The tensor of a JSON object.

    Raises
    ------
    FormatError, KeyError, TypeError, ValueError : for an object that is none
    """
    shape = sizes(body["shape"])
    stride = None if body["stride"] is None else sizes(body["stride"])
    if stride is not None and len(stride) != len(shape):
        raise FormatError(f"a tensor of {len(shape)} dimensions and {len(stride)} strides")
    spec = TensorSpec(
        shape=shape,
        stride=stride,
        dtype=DTYPES[body["dtype"]],
        device=device_name(body["device"]),
        **{field.name: _READERS[field.name](body[field.name]) for field in _OPTIONAL if field.name in body},
    )
    check_made_of(spec)
    return spec


def _made_of_form(made_of: MadeOf) -> Json:
    match made_of:
        case Coo(indices, rows, values, coalesced):
            parts = {"indices": tensor_form(indices), "values": tensor_form(values)}
            return {"coo": parts | {"rows": list(rows), "coalesced": coalesced}}
        case Compressed():
            return {"compressed": {item.name: tensor_form(getattr(made_of, item.name)) for item in fields(made_of)}}
        case PerTensor(scale, zero_point):
            return {"per_tensor": {"scale": _float_form(scale), "zero_point": zero_point}}
        case PerChannel(scales, zero_points, axis):
            floats = [_float_form(scale) for scale in scales]
            zeros = [_float_form(zero) for zero in zero_points]
            return {"per_channel": {"scales": floats, "zero_points": zeros, "axis": axis}}
        case Nested(buffer, item_sizes, strides, offsets):
            places = {"sizes": list(map(list, item_sizes)), "strides": list(map(list, strides))}
            return {"nested": {"buffer": tensor_form(buffer), **places, "offsets": list(offsets)}}


def _made_of(form: Json) -> MadeOf | None:
    if not isinstance(form, dict) or len(form) != 1:
        raise FormatError(f"{str(form)[:60]} is nothing that a tensor is made of")
    ((kind, body),) = form.items()
    reader = _MADE_OF.get(kind)
    # of a kind that a later version knows: the tensor cannot be made, all else can be read
    return None if reader is None else reader(body)


def _coo(body: Mapping[str, Json]) -> Coo:
    rows = tuple(None if number is None else _whole(number) for number in _list(body["rows"]))
    return Coo(_part(body["indices"]), rows, _part(body["values"]), _boolean(body["coalesced"]))


def _compressed(body: Mapping[str, Json]) -> Compressed:
    return Compressed(*(_part(body[field.name]) for field in fields(Compressed)))


def _per_tensor(body: Mapping[str, Json]) -> PerTensor:
    return PerTensor(_float(body["scale"]), _integer(body["zero_point"]))


def _per_channel(body: Mapping[str, Json]) -> PerChannel:
    scales, zeros = (_list(body[name]) for name in ("scales", "zero_points"))
    whole = all(type(zero) is int for zero in zeros)
    zero_points = tuple(map(_integer, zeros)) if whole else tuple(map(_float, zeros))
    return PerChannel(tuple(map(_float, scales)), zero_points, _whole(body["axis"]))


def _nested(body: Mapping[str, Json]) -> Nested:
    item_sizes, strides = (tuple(map(sizes, _list(body[name]))) for name in ("sizes", "strides"))
    return Nested(_part(body["buffer"]), item_sizes, strides, sizes(body["offsets"]))


def _part(body: Mapping[str, Json]) -> TensorSpec:
    if "made_of" in body:
        raise FormatError("a part of a tensor that is itself made of parts")
    return tensor_of(body)


def _list(body: Json) -> list[Json]:
    if not isinstance(body, list):
        raise FormatError(f"{str(body)[:60]} is not a list")
    return body


def _integer(body: Json) -> int:
    if type(body) is not int or not -LIMIT <= body < LIMIT:
        raise FormatError(f"{str(body)[:60]} is not a whole number of 64 bits")
    return body


def _whole(body: Json) -> int:
    if _integer(body) < 0:
        raise FormatError(f"{body} is less than nothing")
    return int(body)


def _boolean(body: Json) -> bool:
    if type(body) is not bool:
        raise FormatError(f"{str(body)[:60]} is not true or false")
    return body


def _text(body: Json) -> str:
    if not isinstance(body, str):
        raise FormatError(f"{str(body)[:60]} is not a text")
    return body


def _float_form(value: float) -> Json:
    # nan and the infinities are no JSON
    return value if type(value) is int or abs(value) < float("inf") else {"float": str(value)}


def _float(body: Json) -> float:
    if isinstance(body, dict) and body.get("float") in ("nan", "inf", "-inf"):
        return float(body["float"])
    if type(body) is not float:
        raise FormatError(f"{str(body)[:60]} is not a float")
    return body


_OPTIONAL = [field for field in fields(TensorSpec) if field.name not in ("shape", "stride", "dtype", "device")]
_FORMS: dict[str, Callable[[Any], Json]] = {"layout": plain_name, "made_of": _made_of_form}
_READERS: dict[str, Callable[[Any], Any]] = {
    "layout": lambda body: LAYOUTS[body],
    "offset": _whole,
    "requires_grad": _boolean,
    "storage": _whole,
    "values": _whole,
    "conj": _boolean,
    "neg": _boolean,
    "cls": _text,
    "pinned": _boolean,
    "made_of": _made_of,
}
_MADE_OF: dict[str, Callable[[Any], MadeOf]] = {
    "coo": _coo,
    "compressed": _compressed,
    "per_tensor": _per_tensor,
    "per_channel": _per_channel,
    "nested": _nested,
}
