"""Conversion of a call's arguments and results to and from the form that they have in a node of an execution trace."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple

import torch

from opgrip.errors import FormatError
from opgrip.traces.formats.execution_trace.nodes import NONE, ROOT, Port
from opgrip.traces.formats.operator_schemas import CODE_OF_VALUE, DTYPE_OF_ELEMENT, ELEMENT_NAMES, VALUE_OF_CODE, pieces
from opgrip.traces.schema.arguments import GeneratorSpec, Opaque, TensorSpec, map_leaves
from opgrip.traces.schema.json_values import LIMIT, device_name, sizes
from opgrip.traces.schema.records import NO_STORAGE
from opgrip.traces.schema.tensor_specs import DTYPES, contiguous, plain_name

NO_STRIDES = "strides: files before schema 1.1.1 have only the strides of views, so other tensors are contiguous"
PLACEHOLDER = re.compile(r"<(\w+)>")
LIST = re.compile(r"(GenericList|Tuple)\[(.*)\]", re.DOTALL)
TENSOR = re.compile(r"Tensor\((.*)\)", re.DOTALL)
UNDEFINED = "nullptr (uninitialized)"
DEFAULT_DEVICE = "cpu"


@dataclass(slots=True)
class PortValues:
    items: list[Any]
    storages: list[int] = field(default_factory=list)
    identities: list[int] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    tensors: int = 0


@dataclass(slots=True)
class KnownStrides:
    """Strides of views in a file without strides, taken from the `as_strided` calls that made the views."""

    _strides: dict[tuple[int, int, tuple[int, ...]], tuple[int, ...]] = field(default_factory=dict)

    def note(self, inputs: PortValues, tensor: Any, shape: Any) -> None:
        stride = inputs.items[2] if len(inputs.items) > 2 else None
        if isinstance(tensor, list) and len(tensor) > 1 and isinstance(stride, list):
            self._strides[self._key(tensor, sizes(shape))] = sizes(stride)

    def forget(self, tensor: Any, shape: Any) -> None:
        if not self._strides or not isinstance(tensor, list) or not isinstance(shape, list):
            return
        if any(isinstance(item, list) for item in tensor):
            for item, size in zip(tensor, shape, strict=False):
                self.forget(item, size)
        elif len(tensor) > 1:
            self._strides.pop(self._key(tensor, sizes(shape)), None)

    def of(self, tensor: list[Any], shape: tuple[int, ...]) -> tuple[int, ...]:
        return self._strides.get(self._key(tensor, shape)) or contiguous(shape)

    @staticmethod
    def _key(tensor: list[Any], shape: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
        return whole(tensor[0]), whole(tensor[1]), shape


def decode_port(port: Port, kinds: Sequence[str], strides: KnownStrides) -> PortValues:
    lists = (port.values, port.shapes, port.types)
    own_strides = port.strides if port.strides is not None else [None] * len(port.values)
    values = PortValues([])
    context = _Context(values, strides)
    for index, (value, shape, kind, stride) in enumerate(zip(*lists, own_strides, strict=True)):
        values.items.append(_decode(value, shape, kind, stride, kinds[index] if index < len(kinds) else "", context))
    return values


@dataclass(frozen=True, slots=True)
class _Context:
    values: PortValues
    strides: KnownStrides


def _decode(value: Any, shape: Any, kind: Any, stride: Any, schema_kind: str, context: _Context) -> Any:
    if not isinstance(kind, str):
        raise FormatError(f"the type of an argument is not a string: {str(kind)[:60]}")
    if match := TENSOR.fullmatch(kind):
        return _tensor(value, shape, match[1], stride, context)
    if match := LIST.fullmatch(kind):
        return _list(value, shape, match, stride, schema_kind, context)
    return _scalar(value, kind, schema_kind.rstrip("?"))


def _list(value: Any, shape: Any, match: re.Match[str], stride: Any, schema_kind: str, context: _Context) -> Any:
    kinds = list(pieces(match[2]))
    if not isinstance(value, list) or len(value) != len(kinds):
        raise FormatError(f"a list of the type {match[0][:60]} does not have {len(kinds)} values: {str(value)[:60]}")
    empty = [None] * len(value)
    shapes = shape if isinstance(shape, list) and len(shape) == len(value) else empty
    strides = stride if isinstance(stride, list) and len(stride) == len(value) else empty
    inner = schema_kind.rstrip("?").removesuffix("[]")
    columns = zip(value, shapes, kinds, strides, strict=True)
    items = [_decode(item, size, kind, step, inner, context) for item, size, kind, step in columns]
    return items if match[1] == "GenericList" else tuple(items)


def _scalar(value: Any, kind: str, schema_kind: str) -> Any:
    if isinstance(value, str):
        return _text(value, kind)
    if type(value) is float:
        return value
    if type(value) is bool or value is None:
        return value
    if type(value) is not int or not -LIMIT <= value < LIMIT:
        raise FormatError(f"unsupported argument of type {kind[:40]}: {str(value)[:60]}")
    if schema_kind in VALUE_OF_CODE:
        return VALUE_OF_CODE[schema_kind].get(value, Opaque(f"{schema_kind} {value}"))
    return float(value) if kind == "Double" or schema_kind == "float" else value


def _text(value: str, kind: str) -> Any:
    if kind == "String":
        return value
    if value in (NONE, "<Generator>"):
        # the default generator of a call
        return None
    if kind == "Double" or value.lstrip("-") in ("inf", "nan"):
        number = float(value)
        return math.nan if math.isnan(number) else number
    if kind == "Device":
        try:
            return torch.device(device_name(value))
        except RuntimeError:
            return Opaque(f"{value} device")
    if match := PLACEHOLDER.fullmatch(value):
        return Opaque(match[1])
    return value


def _tensor(value: Any, shape: Any, element: str, stride: Any, context: _Context) -> TensorSpec | Opaque | None:
    if not isinstance(value, list) or not 5 <= len(value) <= 6:
        raise FormatError(f"expected a list of five or six values for a tensor, got {str(value)[:60]}")
    context.values.tensors += 1
    if element == UNDEFINED:
        return None
    dtype = DTYPE_OF_ELEMENT.get(element) or DTYPES.get(element.removeprefix("c10::").lower())
    if dtype is None:
        return Opaque(f"{element[:60]} tensor")
    dimensions = sizes(shape)
    steps = context.strides.of(value, dimensions) if stride is None else sizes(stride)
    if len(steps) != len(dimensions):
        raise FormatError(f"a tensor has {len(dimensions)} dimensions and {len(steps)} strides")
    device = device_name(value[5]) if len(value) == 6 and value[5] else DEFAULT_DEVICE
    context.values.storages.append(whole(value[1]))
    context.values.identities.append(whole(value[0]))
    context.values.indices.append(context.values.tensors - 1)
    return TensorSpec(dimensions, steps, dtype, device, offset=whole(value[2]))


def whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < LIMIT:
        raise FormatError(f"expected the number of a tensor, got {str(value)[:60]}")
    return value


def with_sharing(values: PortValues, numbers_of_values: Sequence[int | None]) -> list[Any]:
    counts = Counter(storage for storage in values.storages if storage)
    numbers = {storage: number for number, storage in enumerate(key for key in counts if counts[key] > 1)}
    remaining = zip(values.storages, numbers_of_values, strict=True)

    def shared(leaf: Any) -> Any:
        if not isinstance(leaf, TensorSpec):
            return leaf
        storage, number = next(remaining)
        return replace(leaf, storage=numbers.get(storage), values=number)

    return [map_leaves(shared, item) for item in values.items]


Range = tuple[int | float, int | float]


@dataclass(slots=True)
class NodeNumbers:
    """Assigns ascending numbers to nodes, tensors and storages; a node gets a larger number than its inputs."""

    last: int = ROOT
    _storages: dict[int, int] = field(default_factory=dict)
    _tensors: dict[tuple[Any, ...], int] = field(default_factory=dict)

    def new(self) -> int:
        self.last += 1
        return self.last

    def of(self, spec: TensorSpec, storage: int) -> tuple[int, int]:
        if storage == NO_STORAGE:
            return self.new(), self.new() if spec.stride is not None else 0
        key = (storage, spec.offset, spec.shape, spec.stride, spec.dtype)
        if storage not in self._storages:
            self._tensors[key] = self.new()
            self._storages[storage] = self.new()
        elif key not in self._tensors:
            self._tensors[key] = self.new()
        return self._tensors[key], self._storages[storage]


# dtypes of the tensors that torch creates from numbers
NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


class PortItem(NamedTuple):
    value: Any
    shape: Any
    type: str
    stride: Any


@dataclass(slots=True)
class Encoder:
    """Converts the arguments and results of one call to the inputs and outputs of a node."""

    numbers: NodeNumbers
    storages: Iterator[int]
    range_of: Callable[[TensorSpec], Range | None]
    lose: Callable[[str], None]
    ranges: dict[int, Range] = field(default_factory=dict)
    _shared: dict[int, int] = field(default_factory=dict)
    _tensors: int = 0

    def port(self, values: Sequence[Any], kinds: Sequence[str], are_results: bool = False) -> Port:
        columns = zip(values, kinds, strict=True)
        items = [
            PortItem([self.numbers.new(), 0, 0, 0, 0, ""], [], f"Tensor({UNDEFINED})", [])
            if are_results and value is None
            else self._item(value, kind)
            for value, kind in columns
        ]
        return Port(*_columns(items))

    def _item(self, value: Any, kind: str) -> PortItem:
        match value:
            case TensorSpec():
                return self._tensor(value)
            case list() | tuple():
                return self._list(value, kind)
            case None:
                return PortItem(NONE, [], "None", [])
            case bool() | int() | float() | complex() if kind.startswith("Tensor"):
                return self._number(value)
            case bool():
                return PortItem(value, [], "Bool", [])
            case int() if kind.rstrip("?") != "float":
                return PortItem(value, [], "Int", [])
            case int() | float():
                # infinities and nan as strings
                return PortItem(float(value) if math.isfinite(value) else str(float(value)), [], "Double", [])
            case str():
                return PortItem(value, [], "String", [])
        return self._code(value)

    def _code(self, value: Any) -> PortItem:
        match value:
            case torch.dtype() | torch.layout() | torch.memory_format() if value in CODE_OF_VALUE:
                return PortItem(CODE_OF_VALUE[value], [], "Int", [])
            case torch.device():
                return PortItem(str(value), [], "Device", [])
            case complex():
                name = "ComplexDouble"
            case GeneratorSpec():
                name = "Generator"
            case _:
                name = "Object"
        self.lose(f"its argument of type {name if name != 'Object' else type(value).__name__}")
        return PortItem(f"<{name}>", [], name, [])

    def _list(self, value: Sequence[Any], kind: str) -> PortItem:
        inner = kind.rstrip("?").removesuffix("[]")
        items = [self._item(item, inner) for item in value]
        values, shapes, types, strides = _columns(items)
        return PortItem(values, shapes, f"GenericList[{','.join(types)}]", strides)

    def _tensor(self, spec: TensorSpec) -> PortItem:
        if spec.stride is None:
            self.lose(f"that a tensor is {plain_name(spec.layout)}")
        if spec.conj or spec.neg:
            self.lose("that a tensor is conjugated or negated")
        span = self.range_of(spec)
        if span is not None:
            self.ranges[self._tensors] = span
        tensor, storage = self.numbers.of(spec, next(self.storages, NO_STORAGE))
        if spec.storage is not None:
            # the trace lacks the storages of its calls
            storage = self._shared.setdefault(spec.storage, storage)
        return self._described(spec, tensor, storage)

    def _described(self, spec: TensorSpec, tensor: int, storage: int) -> PortItem:
        self._tensors += 1
        value = [tensor, storage, spec.offset, prod(spec.shape), spec.dtype.itemsize, spec.device]
        name = ELEMENT_NAMES.get(spec.dtype, f"c10::{plain_name(spec.dtype)}")
        return PortItem(value, list(spec.shape), f"Tensor({name})", list(spec.stride or ()))

    def _number(self, value: bool | int | float | complex) -> PortItem:
        if isinstance(value, complex) or not math.isfinite(value):
            self.lose("the value of a number in place of a tensor")
        else:
            self.ranges[self._tensors] = (value, value)
        spec = TensorSpec((), (), NUMBERS[type(value)], "cpu")
        return self._described(spec, self.numbers.new(), self.numbers.new())


def _columns(items: Sequence[PortItem]) -> list[list[Any]]:
    return [list(column) for column in zip(*items, strict=True)] or [[], [], [], []]
