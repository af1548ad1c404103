"""Conversion of live arguments to nested specs, from which equal arguments can be made later.

An object becomes a spec with the name of its class and its fields, for example an `ObjectSpec`; tensors and plain
values remain as they are. Objects are read without calling any of the program's code; not even `isinstance` is used,
because classes can override it.
"""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn

from opgrip.capture.grip.copies import Arrays, isolate_from_program
from opgrip.capture.grip.patterns import HEAP
from opgrip.capture.torch_compat.torch_private import is_transformed
from opgrip.traces.rebuild import SAFE_OBJECTS, name_of
from opgrip.traces.schema.arguments import Opaque
from opgrip.traces.schema.python_objects import (
    ArraySpec,
    ModuleSpec,
    NamedSpec,
    ObjectSpec,
    SameSpec,
    ScalarSpec,
    SharedSpec,
)
from opgrip.traces.schema.tensor_specs import plain_name

MOST_VALUES = 100_000  # maximum number of values in the arguments of a recorded call

_PLAIN = frozenset(
    {
        *(type(None), bool, int, float, complex, str, bytes, range, type(...)),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
    }
)
_HASHABLE = _PLAIN - {type(...)}
# builtin types from which classes may derive; the content of such objects is read as the builtin type
_BUILTIN = (list, tuple, dict, set, frozenset, str, int, float, complex, bytes)
# classes implemented in C whose objects can still be read and created
_ROOTS = frozenset({object, *_BUILTIN, OrderedDict, defaultdict, deque, SimpleNamespace, *torch.Tensor.__mro__})
_MODULE_TABLES = ("_parameters", "_buffers", "_modules")
_FRESH_MODULE = vars(nn.Module())
_MODULE_HOOKS = frozenset(name for name, value in _FRESH_MODULE.items() if isinstance(value, dict)) - {*_MODULE_TABLES}
_MODULE_NOTHING = frozenset(name for name, value in _FRESH_MODULE.items() if value is None)
_NAMES_BY_ID = {id(thing): name for name, thing in SAFE_OBJECTS.items()}


class CannotHold(Exception):
    """Raised if a sample cannot hold a value, such as a lock or a sparse tensor; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class SpecTree:
    """Arguments of a call as nested specs.

    tree : nested specs, live tensors and plain values; `Opaque` for values that a sample cannot hold
    names : classes, functions and enum members to which `tree` refers by name
    refused : first reason why a sample cannot hold an argument, None if it can; fields of objects do not count
    """

    tree: Any
    names: Mapping[str, Any]
    refused: str | None = None


def take(value: Any) -> SpecTree:
    """Return a value as nested specs; raise `CannotHold` if the value is too large."""
    taker = _Taker()
    taker.count(value)
    return SpecTree(taker.take(value), taker.names, next(iter(taker.refused), None))


@dataclass(frozen=True, slots=True)
class _Parts:
    cls: type
    fields: Mapping[str, Any]
    content: Any = None


@dataclass(slots=True)
class _Taker:
    names: dict[str, Any] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    _occurrences: Counter[int] = field(default_factory=Counter)
    _alive: list[Any] = field(default_factory=list)
    _numbers: dict[int, int] = field(default_factory=dict)
    _new_number: Iterator[int] = field(default_factory=count)
    _open: set[int] = field(default_factory=set)
    _arrays: Arrays = field(default_factory=Arrays)
    _in_field: bool = False

    def count(self, value: Any) -> None:
        stack = [value]
        while stack:
            item = stack.pop()
            inner = _inner(item)
            if inner is None:
                continue
            self._occurrences[id(item)] += 1
            if self._occurrences[id(item)] == 1:
                # keep the object alive, as its id could otherwise be reused
                self._alive.append(item)
                stack.extend(inner)
                if len(self._occurrences) + len(stack) > MOST_VALUES:
                    raise CannotHold(f"more than {MOST_VALUES:,} values")

    def take(self, value: Any) -> Any:
        try:
            return self._take(value) if self._occurrences[id(value)] < 2 else self._take_shared(value)
        except CannotHold as error:
            if not self._in_field:
                self.refused.append(str(error))
            return Opaque(_type_name(value))

    def _take_shared(self, value: Any) -> Any:
        number = id(value)
        if number in self._open and isinstance(value, tuple):
            raise CannotHold("a tuple that contains itself")
        if number in self._numbers:
            return SameSpec(self._numbers[number])
        shared_number = self._numbers[number] = next(self._new_number)
        self._open.add(number)
        try:
            return SharedSpec(shared_number, self._take(value))
        except CannotHold:
            # forget the number, since no spec has it
            del self._numbers[number]
            raise
        finally:
            self._open.discard(number)

    def _take(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN or (kind is slice and _is_plain_slice(value)):
            return value
        if kind is list:
            return [self.take(item) for item in value]
        if kind is tuple:
            return tuple(self.take(item) for item in value)
        if kind is dict:
            return self._dict(value)
        if kind is set or kind is frozenset:
            # copy, so that the call cannot change it
            return kind(_checked_set(value))
        if issubclass(kind, torch.Tensor):
            return self._tensor(value)
        if kind is np.ndarray:
            return self._array(value)
        if issubclass(kind, np.generic):
            return _scalar(value)
        named = _name(value)
        if named is not None:
            return NamedSpec(self._add_name(named, value))
        if issubclass(kind, torch.Generator):
            fields = {"device": value.device, "state": value.get_state()}
            return ObjectSpec(self._add_name(name_of(torch.Generator), torch.Generator), fields)
        if issubclass(kind, nn.Module):
            return self._module(value)
        return self._object(_parts(value))

    def _add_name(self, name: str, thing: Any) -> str:
        if self.names.setdefault(name, thing) is not thing:
            raise CannotHold(f"two different objects with the name {name}")
        return name

    def _dict(self, value: Mapping[Any, Any]) -> dict[Any, Any]:
        for key in value:
            if not _is_hashable(key):
                raise CannotHold(f"a dictionary with keys of type {_type_name(key)}")
        return {key: self.take(item) for key, item in value.items()}

    def _tensor(self, tensor: torch.Tensor) -> Any:
        kind = type(tensor)
        _check_tensor(tensor)
        if kind is torch.Tensor:
            return tensor
        name = self._add_name(name_of(kind), kind)
        if kind is nn.Parameter:
            return ObjectSpec(name, {}, tensor)
        with isolate_from_program():
            plain = torch.Tensor._make_subclass(torch.Tensor, tensor.detach(), tensor.requires_grad)
        return ObjectSpec(name, self._fields(vars(tensor)), plain)

    def _array(self, array: np.ndarray[Any, Any]) -> ArraySpec:
        try:
            return self._arrays.take(array)
        except (TypeError, ValueError) as error:
            raise CannotHold(f"a numpy array of type {array.dtype}") from error

    def _object(self, parts: _Parts) -> ObjectSpec:
        name = self._add_name(name_of(parts.cls), parts.cls)
        # fields come first, because objects are restored in this order
        content = None if parts.content is None else self._take(parts.content)
        return ObjectSpec(name, self._fields(parts.fields), content)

    def _module(self, module: nn.Module) -> ModuleSpec:
        parts = _module_parts(module)
        name = self._add_name(name_of(parts.cls), parts.cls)
        parameters, buffers, modules = (self._fields(vars(module)[table]) for table in _MODULE_TABLES)
        return ModuleSpec(name, parameters, buffers, modules, self._fields(parts.fields))

    def _fields(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        before, self._in_field = self._in_field, True
        try:
            return {name: self.take(value) for name, value in fields.items()}
        finally:
            self._in_field = before


def _inner(value: Any) -> list[Any] | None:
    kind = type(value)
    if kind in _PLAIN or issubclass(kind, torch.Tensor | np.ndarray | np.generic):
        return None
    if kind is list or kind is tuple:
        return list(value)
    if kind is dict:
        return list(value.values())
    if kind is set:
        return []
    if kind is frozenset or _name(value) is not None:
        return None
    try:
        if issubclass(kind, nn.Module):
            tables = (vars(value)[table] for table in _MODULE_TABLES)
            return [item for table in (*tables, _module_parts(value).fields) for item in table.values()]
        parts = _parts(value)
    except CannotHold:
        # the error is reported when the value itself is converted
        return None
    inside = [] if parts.content is None else _inner(parts.content) or []
    return [*parts.fields.values(), *inside]


def _parts(value: Any) -> _Parts:
    cls = type(value)
    _check_class(cls)
    fields = dict(_fields_of(value))
    if issubclass(cls, defaultdict):
        fields["default_factory"] = value.default_factory
    if issubclass(cls, deque):
        if value.maxlen is not None:
            raise CannotHold("a deque with maxlen")
        return _Parts(cls, fields, list(value))
    for base in _BUILTIN:
        if issubclass(cls, base):
            return _Parts(cls, fields, _CONTENTS[base](value))
    return _Parts(cls, fields)


_CONTENTS: dict[type, Callable[[Any], Any]] = {
    list: lambda value: list(list.__iter__(value)),
    tuple: lambda value: tuple(tuple.__iter__(value)),
    dict: lambda value: dict(dict.items(value)),
    set: lambda value: set(set.__iter__(value)),
    frozenset: lambda value: frozenset(frozenset.__iter__(value)),
    str: str.__str__,
    int: int.__int__,
    float: float.__float__,
    complex: lambda value: complex(value.real, value.imag),
    bytes: lambda value: bytes.__getitem__(value, slice(None)),
}


def _module_parts(module: nn.Module) -> _Parts:
    if issubclass(type(module), torch.jit.ScriptModule):
        raise CannotHold("a module that torch.jit made")
    _check_class(type(module))
    fields = {}
    for name, value in vars(module).items():
        if name in _MODULE_HOOKS:
            if value:
                raise CannotHold(f"a {type(module).__qualname__} with hooks")
        elif name not in _MODULE_TABLES and not (value is None and name in _MODULE_NOTHING):
            fields[name] = value
    return _Parts(type(module), fields)


def _fields_of(value: Any) -> Iterator[tuple[str, Any]]:
    for base in type(value).__mro__:
        for name, slot in vars(base).items():
            if isinstance(slot, MemberDescriptorType) and base.__flags__ & HEAP:
                try:
                    yield name, slot.__get__(value)
                except AttributeError:
                    continue
    try:
        named = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return
    if not isinstance(named, dict) or any(type(name) is not str for name in named):
        raise CannotHold(f"an object of type {_type_name(value)}, whose __dict__ is not a dictionary of its fields")
    yield from named.items()


def _check_class(cls: type) -> None:
    if cls not in _checked:
        _checked[cls] = _refusal(cls)
    if (reason := _checked[cls]) is not None:
        raise CannotHold(reason)


_checked: WeakKeyDictionary[type, str | None] = WeakKeyDictionary()


def _refusal(cls: type) -> str | None:
    name = f"{cls.__module__}.{cls.__qualname__}"
    if cls in SAFE_OBJECTS.values():
        return None
    root: Any = next(base for base in cls.__mro__ if base in _ROOTS or not base.__flags__ & HEAP)
    try:
        # Python refuses this for objects with parts that only their own class can create, such as a lock
        can_be_made = root in _ROOTS and cls not in _ROOTS and root.__new__(cls) is not None
    except TypeError:
        can_be_made = False
    if can_be_made and hasattr(cls, "__del__"):
        # a finalizer would run for each copy
        return f"an object of type {name}, which has a finalizer"
    return None if can_be_made else f"an object of type {name}"


def _name(value: Any) -> str | None:
    if (listed_name := _NAMES_BY_ID.get(id(value))) is not None:
        return listed_name
    kind = type(value)
    if issubclass(kind, enum.Enum):
        return f"{name_of(type(value))}.{value.name}"
    if issubclass(kind, type):
        return name_of(value)
    if kind in (FunctionType, BuiltinFunctionType) and isinstance(value.__module__, str):
        name = name_of(value)
        return None if "<" in name else name
    return None


def _check_tensor(tensor: torch.Tensor) -> None:
    cls = type(tensor)
    if is_transformed(tensor):
        raise CannotHold("a tensor under a transform of torch.func")
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        layout = plain_name(tensor.layout)
        raise CannotHold(f"a {'quantized' if tensor.is_quantized else layout} tensor")
    if cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise CannotHold(f"a tensor of type {cls.__qualname__}")


def _scalar(value: np.generic) -> ScalarSpec:
    number = value.item()
    if type(number) not in (bool, int, float, complex) or value.dtype.kind not in "biufc":
        raise CannotHold(f"a numpy scalar of type {value.dtype}")
    return ScalarSpec(value.dtype.name, number)


def _checked_set(value: set[Any] | frozenset[Any]) -> set[Any] | frozenset[Any]:
    for item in value:
        if not _is_hashable(item):
            raise CannotHold(f"a set of {_type_name(item)}")
    return value


def _is_hashable(value: Any) -> bool:
    return type(value) in _HASHABLE or (type(value) is tuple and all(map(_is_hashable, value)))


def _is_plain_slice(value: slice) -> bool:
    return all(item is None or type(item) is int for item in (value.start, value.stop, value.step))


def _type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
