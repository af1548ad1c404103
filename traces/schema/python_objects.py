"""Arguments that only functions take (objects, modules, arrays), and their JSON forms.

A reader builds nothing but these; to make the objects themselves, `making.py` asks its caller for their classes.
"""

from __future__ import annotations

import base64
import binascii
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch

from opgrip.errors import FormatError
from opgrip.traces.schema.limits import check_hashes
from opgrip.traces.schema.privacy import ATTRIBUTES, NESTED, Public, hashed, public
from opgrip.traces.schema.tensor_specs import LIMIT, Json, TensorSpec


@dataclass(frozen=True, slots=True)
class ObjectSpec:
    """An object of a class, dataclasses and named tuples among them.

    Attributes
    ----------
    cls : `module:qualname`
    fields : attributes by name
    content : what it holds as the builtin that its class extends: the items of a named tuple as a tuple, those of a
        dictionary as a dict, a tensor; None where its class extends none
    """

    cls: Annotated[str, hashed("object")]
    fields: Annotated[dict[str, Any], ATTRIBUTES] = field(default_factory=dict)
    content: Annotated[Any, NESTED] = None


@dataclass(frozen=True, slots=True)
class ModuleSpec:
    """A module of torch.

    Attributes
    ----------
    cls : `module:qualname`
    parameters, buffers, modules : by name; None for one that is registered as none
    fields : all other attributes by name, `training` among them
    """

    cls: Annotated[str, hashed("object")]
    parameters: Annotated[dict[str, Any], ATTRIBUTES] = field(default_factory=dict)
    buffers: Annotated[dict[str, Any], ATTRIBUTES] = field(default_factory=dict)
    modules: Annotated[dict[str, Any], ATTRIBUTES] = field(default_factory=dict)
    fields: Annotated[dict[str, Any], ATTRIBUTES] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """A numpy array, as the tensor over its memory."""

    tensor: Annotated[Any, NESTED]


@dataclass(frozen=True, slots=True)
class ScalarSpec:
    """A numpy scalar: the name of its dtype, and its value as Python has it."""

    dtype: Annotated[str, public("dtype")]
    value: Annotated[bool | int | float | complex, NESTED]


@dataclass(frozen=True, slots=True)
class NamedSpec:
    """A class, a function or a member of an enumeration: `module:qualname`."""

    name: Annotated[str, hashed("object")]


@dataclass(frozen=True, slots=True)
class SharedSpec:
    """A list, dictionary or object that stands in several places; this is the first."""

    number: Public[int]
    value: Annotated[Any, NESTED]


@dataclass(frozen=True, slots=True)
class SameSpec:
    """The same thing as the `SharedSpec` of this number, which it may stand inside of."""

    number: Public[int]


BRANCHES = (ObjectSpec, ModuleSpec, ArraySpec, SharedSpec)
"""Those that other arguments stand in."""


def children(value: object) -> Sequence[Any] | None:
    """The arguments that stand in one, in order; None for a leaf."""
    match value:
        case list() | tuple():
            return value
        case dict():
            return tuple(value.values())
        case ObjectSpec(_, fields, content):
            return tuple(fields.values()) if content is None else (*fields.values(), content)
        case ModuleSpec():
            return tuple(item for group in _groups(value) for item in group.values())
        case ArraySpec(tensor):
            return (tensor,)
        case SharedSpec(_, inner):
            return (inner,)
    return None


def with_children(value: Any, function: Callable[[Any], Any]) -> Any:
    """The same argument with `function` applied to each that stands in it; a leaf as it is."""
    match value:
        case torch.Size():
            return value
        case list():
            return _alike(value, [function(item) for item in value])
        case tuple():
            return _alike(value, tuple(function(item) for item in value))
        case dict():
            return _alike(value, {key: function(item) for key, item in value.items()})
        case ObjectSpec(cls, fields, content):
            return ObjectSpec(cls, with_children(fields, function), None if content is None else function(content))
        case ModuleSpec(cls):
            return ModuleSpec(cls, *(with_children(group, function) for group in _groups(value)))
        case ArraySpec(tensor):
            return ArraySpec(function(tensor))
        case SharedSpec(number, inner):
            return SharedSpec(number, function(inner))
    return value


def _alike(value: Any, children: Any) -> Any:
    """A list, tuple or dictionary as one of the class of another, which has as many."""
    if type(value) is type(children):
        return children
    if isinstance(value, tuple):
        return value._make(children) if hasattr(value, "_make") else type(value)(children)
    twin = _copy(value)
    for place, item in children.items() if isinstance(children, dict) else enumerate(children):
        twin[place] = item
    return twin


def _copy(value: Any) -> Any:
    """A list or dictionary of a class of its own, copied; a dictionary perhaps without its entries."""
    try:
        return copy.copy(value)
    except Exception:
        # Python 3.10 asks `__getattr__` for `__getstate__`, and one that reads entries raises KeyError
        cls: Any = type(value)
        twin = cls.__new__(cls)
        vars(twin).update(vars(value))
        if isinstance(value, list):
            list.extend(twin, value)
        return twin


def outline(value: object) -> tuple[object, ...]:
    """All of a branch but what stands in it, to tell it from others."""
    match value:
        case ObjectSpec(cls, fields, _):
            return (cls, *fields)
        case ModuleSpec(cls):
            return (cls, *(tuple(group) for group in _groups(value)))
        case SharedSpec(number, _):
            return (number,)
    return ()


def _groups(module: ModuleSpec) -> tuple[dict[str, Any], ...]:
    return module.parameters, module.buffers, module.modules, module.fields


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
