"""Specs of arguments that only Python functions take: objects, modules, arrays."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch

from opgrip.traces.schema.json_values import ALWAYS, CLASS, ID, Argument, Count
from opgrip.traces.schema.privacy import ATTRIBUTES, NESTED, Public, hashed, public


@dataclass(frozen=True, slots=True)
class ObjectSpec:
    """An object of a Python class.

    cls : `module:qualname` of the class; for packed parameters, the operator that packs them
    fields : attributes by name
    content : the object's value as a builtin type, if its class derives from one, such as a tuple for a named tuple;
        for packed parameters, the arguments of the operator
    """

    cls: Annotated[str, hashed("object")] = field(metadata=CLASS)
    fields: Annotated[dict[str, Argument], ATTRIBUTES] = field(default_factory=dict, metadata=ALWAYS)
    content: Annotated[Argument, NESTED] = None


@dataclass(frozen=True, slots=True)
class ModuleSpec:
    """A module of torch.

    cls : class of the module: `module:qualname`
    parameters, buffers, modules : parameters, buffers and submodules by name
    fields : all other attributes by name, including `training`
    """

    cls: Annotated[str, hashed("object")] = field(metadata=CLASS)
    parameters: Annotated[dict[str, Argument], ATTRIBUTES]
    buffers: Annotated[dict[str, Argument], ATTRIBUTES]
    modules: Annotated[dict[str, Argument], ATTRIBUTES]
    fields: Annotated[dict[str, Argument], ATTRIBUTES]


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """A numpy array, described by the spec of a tensor that has the same memory."""

    tensor: Annotated[Argument, NESTED]


@dataclass(frozen=True, slots=True)
class ScalarSpec:
    """A numpy scalar.

    dtype : name of its numpy dtype
    value : its value as a Python number
    """

    dtype: Annotated[str, public("dtype")]
    value: Annotated[Argument, NESTED]


@dataclass(frozen=True, slots=True)
class NamedSpec:
    """A class, a function or a member of an enumeration, by its name `module:qualname`."""

    name: Annotated[str, hashed("object")]


@dataclass(frozen=True, slots=True)
class SharedSpec:
    """The first occurrence of a list, dictionary or object that occurs several times in the arguments.

    number : number by which a `SameSpec` refers to it
    """

    number: Public[Count] = field(metadata=ID)
    value: Annotated[Argument, NESTED]


@dataclass(frozen=True, slots=True)
class SameSpec:
    """A further occurrence of the value of the `SharedSpec` with this number."""

    number: Public[Count]


# prefix of `ObjectSpec.cls` for packed parameters, followed by the operator that packs the content
PACKED_BY = "torch.ops.quantized:"
PACKERS = frozenset(
    PACKED_BY + name
    for name in (
        *("linear_prepack", "linear_prepack_fp16", "conv2d_prepack", "conv3d_prepack"),
        *("conv_transpose2d_prepack", "conv_transpose3d_prepack", "embedding_bag_prepack"),
    )
)

BRANCHES = (ObjectSpec, ModuleSpec, ArraySpec, SharedSpec)  # specs that contain other arguments


def children(value: object) -> Sequence[Any] | None:
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
    if type(value) is type(children):
        return children
    if isinstance(value, tuple):
        return value._make(children) if hasattr(value, "_make") else type(value)(children)
    twin = _copy(value)
    for place, item in children.items() if isinstance(children, dict) else enumerate(children):
        twin[place] = item
    return twin


def _copy(value: Any) -> Any:
    try:
        return copy.copy(value)
    except Exception:
        # Python 3.10 calls `__getattr__` for `__getstate__`, and a class whose `__getattr__` reads entries raises
        # KeyError
        cls: Any = type(value)
        twin = cls.__new__(cls)
        vars(twin).update(vars(value))
        if isinstance(value, list):
            list.extend(twin, value)
        return twin


def outline(value: object) -> tuple[object, ...]:
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
