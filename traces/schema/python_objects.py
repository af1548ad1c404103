"""Arguments that only functions take: objects, modules, arrays.

A reader builds nothing but these; to make the objects themselves, `making.py` asks its caller for their classes.
"""

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
    """An object of a class, dataclasses and named tuples among them.

    Attributes
    ----------
    cls : `module:qualname`
    fields : attributes by name
    content : what it holds as the builtin that its class extends: the items of a named tuple as a tuple, those of a
        dictionary as a dict, a tensor; None where its class extends none
    """

    cls: Annotated[str, hashed("object")] = field(metadata=CLASS)
    fields: Annotated[dict[str, Argument], ATTRIBUTES] = field(default_factory=dict, metadata=ALWAYS)
    content: Annotated[Argument, NESTED] = None


@dataclass(frozen=True, slots=True)
class ModuleSpec:
    """A module of torch.

    Attributes
    ----------
    cls : `module:qualname`
    parameters, buffers, modules : by name; None for one that is registered as none
    fields : all other attributes by name, `training` among them
    """

    cls: Annotated[str, hashed("object")] = field(metadata=CLASS)
    parameters: Annotated[dict[str, Argument], ATTRIBUTES]
    buffers: Annotated[dict[str, Argument], ATTRIBUTES]
    modules: Annotated[dict[str, Argument], ATTRIBUTES]
    fields: Annotated[dict[str, Argument], ATTRIBUTES]


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """A numpy array, as the tensor over its memory."""

    tensor: Annotated[Argument, NESTED]


@dataclass(frozen=True, slots=True)
class ScalarSpec:
    """A numpy scalar: the name of its dtype, and its value as Python has it."""

    dtype: Annotated[str, public("dtype")]
    value: Annotated[Argument, NESTED]


@dataclass(frozen=True, slots=True)
class NamedSpec:
    """A class, a function or a member of an enumeration: `module:qualname`."""

    name: Annotated[str, hashed("object")]


@dataclass(frozen=True, slots=True)
class SharedSpec:
    """A list, dictionary or object that stands in several places; this is the first."""

    number: Public[Count] = field(metadata=ID)
    value: Annotated[Argument, NESTED]


@dataclass(frozen=True, slots=True)
class SameSpec:
    """The same thing as the `SharedSpec` of this number, which it may stand inside of."""

    number: Public[Count]


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
