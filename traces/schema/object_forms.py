"""The JSON forms of the arguments that functions take and operators do not."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping
from typing import Any

from opgrip.errors import FormatError
from opgrip.traces.schema.limits import check_hashes
from opgrip.traces.schema.python_objects import (
    ArraySpec,
    ModuleSpec,
    NamedSpec,
    ObjectSpec,
    SameSpec,
    ScalarSpec,
    SharedSpec,
)
from opgrip.traces.schema.tensor_specs import TensorSpec
from opgrip.traces.schema.torch_names import LIMIT, Json

Encode = Callable[[Any], Json]
Decode = Callable[[Json], Any]

GROUPS = ("parameters", "buffers", "modules", "fields")


def object_encoders(encode: Encode) -> dict[type, Encode]:
    """What makes the form of each of these kinds.

    Parameters
    ----------
    encode : makes that of any argument
    """

    def named(items: Mapping[str, Any]) -> Json:
        return {name: encode(item) for name, item in items.items()}

    def encode_object(value: ObjectSpec) -> Json:
        form = {"class": value.cls, "fields": named(value.fields)}
        return {"object": form if value.content is None else form | {"content": encode(value.content)}}

    def encode_module(value: ModuleSpec) -> Json:
        return {"module": {"class": value.cls} | {name: named(getattr(value, name)) for name in GROUPS}}

    def encode_scalar(value: ScalarSpec) -> Json:
        return {"numpy_scalar": {"dtype": value.dtype, "value": encode(value.value)}}

    return {
        ObjectSpec: encode_object,
        ModuleSpec: encode_module,
        ArraySpec: lambda value: {"numpy": encode(value.tensor)},
        ScalarSpec: encode_scalar,
        NamedSpec: lambda value: {"named": value.name},
        SharedSpec: lambda value: {"shared": {"id": value.number, "value": encode(value.value)}},
        SameSpec: lambda value: {"same": value.number},
        set: lambda value: {"set": [encode(item) for item in value]},
        frozenset: lambda value: {"frozenset": [encode(item) for item in value]},
        slice: lambda value: {"slice": [encode(item) for item in (value.start, value.stop, value.step)]},
        range: lambda value: {"range": [value.start, value.stop, value.step]},
        bytes: lambda value: {"bytes": base64.b64encode(value).decode("ascii")},
        type(...): lambda value: {"ellipsis": True},
    }


def object_decoders(decode: Decode) -> dict[str, Decode]:
    """What reads each of these kinds.

    Parameters
    ----------
    decode : reads any argument
    """

    def named(body: Json) -> dict[str, Any]:
        if not isinstance(body, dict):
            raise FormatError(f"{str(body)[:60]} is not an object of named arguments")
        return {name: decode(item) for name, item in body.items()}

    def decode_object(body: Mapping[str, Json]) -> ObjectSpec:
        content = decode(body["content"]) if "content" in body else None
        return ObjectSpec(_name(body["class"]), named(body["fields"]), content)

    def decode_module(body: Mapping[str, Json]) -> ModuleSpec:
        return ModuleSpec(_name(body["class"]), *(named(body[name]) for name in GROUPS))

    def decode_array(body: Json) -> ArraySpec:
        tensor = decode(body)
        if not isinstance(tensor, TensorSpec):
            raise FormatError("an array that is no tensor")
        return ArraySpec(tensor)

    def decode_scalar(body: Mapping[str, Json]) -> ScalarSpec:
        value = decode(body["value"])
        if type(value) not in (bool, int, float, complex):
            raise FormatError(f"{str(value)[:60]} is not a number")
        return ScalarSpec(_name(body["dtype"]), value)

    def decode_slice(body: list[Json]) -> slice:
        start, stop, step = (decode(item) for item in body)
        if any(item is not None and type(item) is not int for item in (start, stop, step)):
            raise FormatError("a slice of other than whole numbers")
        return slice(start, stop, step)

    return {
        "object": decode_object,
        "module": decode_module,
        "numpy": decode_array,
        "numpy_scalar": decode_scalar,
        "named": lambda body: NamedSpec(_name(body)),
        "shared": lambda body: SharedSpec(_number(body["id"]), decode(body["value"])),
        "same": lambda body: SameSpec(_number(body)),
        "set": lambda body: set(_members(body, decode)),
        "frozenset": lambda body: frozenset(_members(body, decode)),
        "slice": decode_slice,
        "range": lambda body: range(*_list(body, _whole)),
        "bytes": _bytes,
        "ellipsis": lambda body: ...,
    }


def _list(body: Json, read: Decode) -> list[Any]:
    if not isinstance(body, list):
        raise FormatError(f"{str(body)[:60]} is not a list")
    return [read(item) for item in body]


def _members(body: Json, read: Decode) -> list[Any]:
    members = _list(body, read)
    check_hashes(members)
    return members


def _name(body: Json) -> str:
    if not isinstance(body, str):
        raise FormatError(f"{str(body)[:60]} is not a name")
    return body


def _whole(body: Json) -> int:
    if type(body) is not int or not -LIMIT <= body < LIMIT:
        raise FormatError(f"{str(body)[:60]} is not a whole number of 64 bits")
    return body


def _number(body: Json) -> int:
    if _whole(body) < 0:
        raise FormatError(f"{body} is less than nothing")
    return int(body)


def _bytes(body: Json) -> bytes:
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, TypeError) as error:
        raise FormatError("bytes that are not in base64") from error
