"""Conversion of a call's arguments to nested specs, from which equal arguments can be made later."""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn

from opgrip.capture.grip.patterns import HEAP
from opgrip.capture.torch_compat.torch_private import is_transformed, storage_address, without_functions, without_modes
from opgrip.traces.rebuild import SAFE_OBJECTS, as_result, name_of
from opgrip.traces.schema.arguments import Opaque, leaves, map_leaves
from opgrip.traces.schema.python_objects import (
    ArraySpec,
    ModuleSpec,
    NamedSpec,
    ObjectSpec,
    SameSpec,
    ScalarSpec,
    SharedSpec,
    children,
    outline,
)
from opgrip.traces.schema.tensor_specs import plain_name

Array = np.ndarray[Any, Any]


class Arrays:
    """Converts numpy arrays to `ArraySpec` objects, whose tensors share the arrays' memory if possible."""

    def __init__(self) -> None:
        self._memory: dict[int, tuple[Array, torch.Tensor]] = {}

    def take(self, array: Array) -> ArraySpec:
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
        root = _root(array)
        offset, size = _address(array) - _address(root), array.itemsize
        steps = [step if length > 1 else size for length, step in zip(array.shape, array.strides, strict=True)]
        fits = all(step >= 0 and step % size == 0 for step in (*steps, offset, root.nbytes))
        # torch warns about read-only memory
        if not fits or not array.size or not root.flags.c_contiguous or not root.flags.writeable:
            return ArraySpec(torch.from_numpy(np.array(array, order="C")))
        memory = self._over(root).view(dtype)
        return ArraySpec(memory.as_strided(array.shape, [step // size for step in steps], offset // size))

    def _over(self, root: Array) -> torch.Tensor:
        # one tensor for each array, so that its views share a storage
        if id(root) not in self._memory:
            self._memory[id(root)] = root, torch.from_numpy(root.reshape(-1).view(np.uint8))
        return self._memory[id(root)][1]


def _root(array: Array) -> Array:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


ALIGNMENT = 16  # alignment of copies in memory in bytes, sufficient for every dtype


@contextmanager
def isolate_from_program() -> Iterator[None]:
    """Run the block without the program's dispatch and function modes and without gradients."""
    # leave inference mode, because tensors created inside it cannot be used outside
    with without_modes(), without_functions(), torch.inference_mode(False), torch.no_grad():
        yield


def copy_tensors(tree: Any) -> Any:
    with isolate_from_program():
        tensors = [leaf for leaf in leaves(tree) if isinstance(leaf, torch.Tensor)]
        copies = iter(_copies([tensor.resolve_conj().resolve_neg() for tensor in tensors]))
    return map_leaves(lambda leaf: next(copies) if isinstance(leaf, torch.Tensor) else leaf, tree)


def bytes_of(tree: Any) -> int:
    """Return the size in bytes of the memory that the tensors in nested values span; shared memory counts once."""
    spans = _spans(leaf for leaf in leaves(tree) if isinstance(leaf, torch.Tensor))
    return sum(end - first for first, end in spans.values())


def alike(one: Any, other: Any) -> bool:
    """Return True if two nested values are equal, including every bit of their tensors."""
    with isolate_from_program():
        return _alike(one, other)


def _alike(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and _equal(one, other)
    if isinstance(one, torch.Tensor):
        return _equal(one, other)
    inner, its = children(one), children(other)
    if inner is None or its is None:
        # nan != nan, while 1 == True
        return _represent(one) == _represent(other)
    names = outline(one) == outline(other) and (not isinstance(one, dict) or [*one] == [*other])
    return names and len(inner) == len(its) and all(map(_alike, inner, its))


def _represent(leaf: Any) -> object:
    return sorted(map(repr, leaf)) if isinstance(leaf, set | frozenset) else repr(leaf)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
        return False
    if one.is_meta or one.numel() == 0:
        return True
    return torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _copies(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    spans = _spans(tensors)
    memory = {}
    for tensor in tensors:
        address = storage_address(tensor)
        if address not in memory:
            first, end = spans[address]
            memory[address] = _part(tensor, first // ALIGNMENT * ALIGNMENT, end)
    return [_over(tensor, spans[storage_address(tensor)][0], memory[storage_address(tensor)]) for tensor in tensors]


def _over(tensor: torch.Tensor, first: int, memory: torch.UntypedStorage) -> torch.Tensor:
    offset = tensor.storage_offset() - first // ALIGNMENT * ALIGNMENT // tensor.dtype.itemsize
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    copy = empty.set_(memory, offset if tensor.numel() else 0, tensor.shape, tensor.stride())
    return as_result(copy) if tensor.requires_grad else copy


def _part(tensor: torch.Tensor, first: int, end: int) -> torch.UntypedStorage:
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), first, (end - first,), (1,)).clone().untyped_storage()


def _spans(tensors: Iterable[torch.Tensor]) -> dict[int, tuple[int, int]]:
    spans: dict[int, tuple[int, int]] = {}
    for tensor in tensors:
        address, (first, end) = storage_address(tensor), _span(tensor)
        span = spans.get(address, (first, end))
        spans[address] = min(span[0], first), max(span[1], end)
    return spans


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    if tensor.numel() == 0:
        return 0, 0
    reach = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    size, offset = tensor.dtype.itemsize, int(tensor.storage_offset())
    return offset * size, (offset + int(reach) + 1) * size


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
    pass


@dataclass(frozen=True, slots=True)
class SpecTree:
    tree: Any
    names: Mapping[str, Any]
    refused: str | None = None


def take(value: Any) -> SpecTree:
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
        if kind in _PLAIN or (
            kind is slice and all(item is None or type(item) is int for item in (value.start, value.stop, value.step))
        ):
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


def _type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
