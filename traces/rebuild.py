"""Construction of live arguments from the specs in a trace, using only classes that the caller provides."""

from __future__ import annotations

import builtins
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from opgrip.errors import FormatError, UserError, one_line
from opgrip.traces.schema.arguments import GroupSpec, Opaque, ReductionSpec
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

_BUILTINS = ("bool", "int", "float", "complex", "str", "bytes", "list", "tuple", "dict", "set", "frozenset", "object")

# prefixes of functions in torch.nn.functional that are internal
_NOT_OF_TENSORS = ("_", "assert_", "boolean_", "handle_", "has_")


def _safe_objects() -> Iterator[tuple[str, Any]]:
    for name in _BUILTINS:
        yield f"builtins:{name}", getattr(builtins, name)
    for cls in (OrderedDict, defaultdict, deque, SimpleNamespace, nn.Parameter, torch.Tensor, torch.Generator):
        yield name_of(cls), cls
    for value in vars(torch.return_types).values():
        if isinstance(value, type):
            yield name_of(value), value
    for value in vars(nn).values():
        if isinstance(value, type) and issubclass(value, nn.Module):
            yield name_of(value), value
    for name, function in vars(nn.functional).items():
        if isinstance(function, FunctionType | BuiltinFunctionType) and not name.startswith(_NOT_OF_TENSORS):
            yield f"torch.nn.functional:{name}", function
    for value in vars(np).values():
        if isinstance(value, type) and issubclass(value, np.generic):
            yield name_of(value), value


def name_of(definition: Any) -> str:
    return f"{definition.__module__}:{definition.__qualname__}"


# classes and functions that any trace may name, because they are harmless as arguments
SAFE_OBJECTS: dict[str, Any] = {}
SAFE_OBJECTS.update(_safe_objects())


class CannotMake(Exception):
    pass


def make_arguments(tree: Any, classes: Mapping[str, Any], make_tensor: Callable[[Any], Any] = lambda leaf: leaf) -> Any:
    """Return the arguments described by nested specs, as tensors, objects and plain values.

    classes : classes and functions that may occur, by `module:qualname`, by qualname, or by the first part of the
        qualname
    """
    try:
        return _Maker(classes, make_tensor).make(tree)
    except CannotMake as error:
        raise UserError(
            f"an argument cannot be created: {error}", "pass its class in `classes`, or grip the function again"
        ) from error
    except (TypeError, ValueError, KeyError, RuntimeError, OverflowError, AttributeError) as error:
        # a trace may make false claims about classes of torch and numpy; RecursionError is a RuntimeError
        raise UserError(f"an argument cannot be created: {one_line(error)}", "grip the function again") from error


class _Maker:
    def __init__(self, classes: Mapping[str, Any], make_tensor: Callable[[Any], Any]) -> None:
        self._classes = classes
        self._make_tensor = make_tensor
        self._shared: dict[int, Any] = {}

    def make(self, value: Any, shared: int | None = None) -> Any:
        match value:
            case torch.Size() | None | bool() | int() | float() | complex() | str():
                return value
            case list():
                items = self._keep(shared, [])
                items.extend(self.make(item) for item in value)
                return items
            case tuple():
                return self._keep(shared, tuple(self.make(item) for item in value))
            case dict():
                entries = self._keep(shared, {})
                entries.update((key, self.make(item)) for key, item in value.items())
                return entries
            case set():
                return self._keep(shared, set(value))
            case ObjectSpec():
                return self._object(value, shared)
            case ModuleSpec():
                return self._module(value, shared)
            case ArraySpec(tensor):
                return self._keep(shared, self._make_tensor(tensor).numpy())
            case ScalarSpec(dtype, number):
                return self._scalar(dtype, number)
            case NamedSpec(name):
                return self._find(name)
            case SharedSpec(number, inner):
                return self.make(inner, number)
            case SameSpec(number):
                if number not in self._shared:
                    raise CannotMake("it refers to an object that contains it, or that the trace lacks")
                return self._shared[number]
            case Opaque(name) | GroupSpec(name) | ReductionSpec(name):
                raise CannotMake(f"a trace does not contain the contents of a {name}")
            case torch.Tensor() | TensorSpec():
                return self._make_tensor(value)
        return value

    def _keep(self, number: int | None, value: Any) -> Any:
        if number is not None:
            self._shared[number] = value
        return value

    def _find(self, name: str) -> Any:
        module, _, qualname = name.partition(":")
        places = ((name, self._classes), (name, SAFE_OBJECTS), (qualname, self._classes))
        definition = next((objects[key] for key, objects in places if key in objects), None)
        if definition is None:
            # a class defined inside a function is provided under its short name
            first, *rest = qualname.rpartition("<locals>.")[2].split(".")
            definition = self._classes.get(first)
            for part in rest:
                # only through classes: a module would expose everything that it has imported
                definition = vars(definition).get(part) if isinstance(definition, type) else None
        if not (isinstance(definition, type | FunctionType | Enum) or name in SAFE_OBJECTS):
            raise CannotMake(f"the class or function {qualname} of {module} was not provided")
        return definition

    def _class(self, name: str) -> type:
        definition = self._find(name)
        if not isinstance(definition, type):
            raise CannotMake(f"{name} is not a class")
        return definition

    def _object(self, spec: ObjectSpec, shared: int | None) -> Any:
        cls = self._class(spec.cls)
        if cls is torch.Generator:
            return self._generator(spec)
        instance, fill = _blank(cls, spec.content, self.make)
        self._keep(shared, instance)
        fill()
        for name, field in self._make_fields(spec.fields):
            _set_field(instance, name, field)
        return instance

    def _module(self, spec: ModuleSpec, shared: int | None) -> Any:
        cls = self._class(spec.cls)
        module = self._keep(shared, object.__new__(cls))
        fields = dict(spec.fields)
        if issubclass(cls, nn.Module):
            nn.Module.__init__(module)
            module._parameters.update(self._make_fields(spec.parameters))
            module._buffers.update(self._make_fields(spec.buffers))
            module._modules.update(self._make_fields(spec.modules))
        else:
            # a plain class with these fields suffices if the function does not use it as a module
            fields |= spec.parameters | spec.buffers | spec.modules
        for name, field in self._make_fields(fields):
            _set_field(module, name, field)
        return module

    def _make_fields(self, fields: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        for name, value in fields.items():
            try:
                argument = self.make(value)
            except CannotMake:
                # code that accesses the field gets an AttributeError
                continue
            yield name, argument

    def _generator(self, spec: ObjectSpec) -> torch.Generator:
        state = self._make_tensor(spec.fields["state"])
        generator = torch.Generator(spec.fields["device"])
        generator.set_state(state)
        return generator

    def _scalar(self, dtype: str, number: bool | int | float | complex) -> Any:
        try:
            kind = np.dtype(dtype)
        except TypeError as error:
            raise CannotMake(f"numpy has no dtype {dtype[:60]}") from error
        if kind.kind not in "biufc":
            raise CannotMake(f"{dtype[:60]} is not a numeric dtype")
        # NumPy before 2.0 wraps the number around
        if kind.kind in "iu" and isinstance(number, int) and not np.iinfo(kind).min <= number <= np.iinfo(kind).max:
            raise CannotMake(f"{number} is out of range for {dtype}")
        return kind.type(number)


def _blank(cls: type, content: Any, make: Callable[[Any], Any]) -> tuple[Any, Callable[[], None]]:
    # objects of types such as tuples and tensors must be created with their content; the function does nothing then
    nothing = lambda: None  # noqa: E731
    match content:
        case None:
            # object.__new__ cannot create a SimpleNamespace
            new = SimpleNamespace.__new__ if issubclass(cls, SimpleNamespace) else object.__new__
            return new(cls), nothing
        case tuple() if cls.__module__ == "torch.return_types":
            return cls(make(content)), nothing
        case tuple() | frozenset() | str() | int() | float() | complex() | bytes() if issubclass(cls, type(content)):
            builtin: Any = type(content)
            return builtin.__new__(cls, make(content)), nothing
        case list() if issubclass(cls, deque):
            queue: deque[Any] = deque.__new__(cls)
            return queue, lambda: deque.extend(queue, make(content))
        case list() if issubclass(cls, list):
            items: list[Any] = list.__new__(cls)
            return items, lambda: list.extend(items, make(content))
        case set() if issubclass(cls, set):
            members: set[Any] = set.__new__(cls)
            return members, lambda: set.update(members, content)
        case dict() if issubclass(cls, dict):
            kind = OrderedDict if issubclass(cls, OrderedDict) else dict
            mapping = kind.__new__(cls)
            return mapping, lambda: _fill_dict(kind, mapping, make(content))
        case torch.Tensor() | TensorSpec() if issubclass(cls, torch.Tensor):
            tensor = make(content)
            return torch.Tensor._make_subclass(cls, tensor.detach(), tensor.requires_grad), nothing
    raise CannotMake(f"{cls.__qualname__} is not a subclass of {type(content).__name__}, as it was in the recording")


def _fill_dict(kind: type[dict[Any, Any]], mapping: dict[Any, Any], items: Mapping[Any, Any]) -> None:
    # an ordered dictionary keeps its order in a separate structure
    for key, item in items.items():
        kind.__setitem__(mapping, key, item)


def _set_field(instance: Any, name: str, value: Any) -> None:
    # bypasses properties and `__setattr__`
    for cls in type(instance).__mro__:
        slot = vars(cls).get(name)
        if isinstance(slot, MemberDescriptorType):
            slot.__set__(instance, value)
            return
    # not isinstance, which asks the object for its class
    if issubclass(type(instance), defaultdict) and name == "default_factory":
        instance.default_factory = value
        return
    try:
        fields = object.__getattribute__(instance, "__dict__")
    except AttributeError as error:
        raise CannotMake(f"{type(instance).__qualname__} has no field {name}") from error
    fields[name] = value


Values = Callable[[TensorSpec, tuple[int, ...]], torch.Tensor]


def lay_out(specs: Sequence[TensorSpec], values: Values, device: Callable[[str], str] = str) -> list[torch.Tensor]:
    """Return a tensor for each spec; specs with equal storage numbers share memory.

    values : returns a tensor's values in the requested shape, in which dimensions of stride 0 have size 1
    device : maps a recorded device to the device to use
    """
    extents: dict[Any, int] = {}
    for place, spec in enumerate(specs):
        if spec.stride is None or spec.made_of is not None or spec.layout is not torch.strided or spec.cls is not None:
            raise FormatError(
                f"a tensor of layout {spec.layout} is sparse, quantized or of a subclass, so it cannot share memory"
            )
        key = _key(place, spec)
        extents[key] = max(extents.get(key, 0), spec.extent)
    memory: dict[Any, torch.UntypedStorage] = {}
    tensors = []
    for place, spec in enumerate(specs):
        key = _key(place, spec)
        if key not in memory:
            zeros = torch.zeros(extents[key], dtype=torch.uint8, device=device(spec.device))
            memory[key] = zeros.untyped_storage()
        tensor = tensor_over(memory[key], spec)
        if 0 not in spec.shape and spec.device != "meta":
            once = once_shape(spec)
            tensor.as_strided(once, spec.stride or (), spec.offset).copy_(values(spec, once))
        tensors.append(tensor)
    # only after all values are set, because they are written in place
    return [as_result(tensor) if spec.requires_grad else tensor for spec, tensor in zip(specs, tensors, strict=True)]


def once_shape(spec: TensorSpec) -> tuple[int, ...]:
    """Return a tensor's shape with size 1 in each dimension of stride 0."""
    steps = spec.stride or (1,) * len(spec.shape)
    return tuple(1 if step == 0 else size for size, step in zip(spec.shape, steps, strict=True))


def tensor_over(storage: torch.UntypedStorage, spec: TensorSpec) -> torch.Tensor:
    assert spec.stride is not None, "the tensor is strided"
    empty = torch.empty(0, dtype=spec.dtype, device=storage.device)
    return empty.set_(storage, spec.offset, spec.shape, spec.stride)


def as_result(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the same memory that requires a gradient and that autograd sees as an operator's result."""
    with torch.enable_grad():
        result: torch.Tensor = _Result.apply(torch.zeros((), requires_grad=True), tensor)
    return result


class _Result(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.zeros(()), None


def _key(place: int, spec: TensorSpec) -> Any:
    return ("own", place) if spec.storage is None else (spec.storage, spec.device)
