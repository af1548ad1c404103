"""The JSON forms of tensors; `tensor_of` gives back what `tensor_form` took."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from opgrip.errors import FormatError
from opgrip.traces.schema.tensor_checks import check_made_of
from opgrip.traces.schema.tensor_specs import Compressed, Coo, MadeOf, Nested, PerChannel, PerTensor, TensorSpec
from opgrip.traces.schema.torch_names import DTYPES, LAYOUTS, LIMIT, Json, device_name, plain_name, sizes


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
