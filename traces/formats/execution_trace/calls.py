"""Conversion of the nodes of an execution trace to calls."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Any

import torch

from opgrip.cli.command import counted
from opgrip.errors import FormatError
from opgrip.traces.formats.building import NO_TIMES, RecordBuilder, split
from opgrip.traces.formats.execution_trace.nodes import (
    NONE,
    NUMBERS,
    OPTIMIZER_STEP,
    ROOTS,
    UNDEFINED,
    USER_SCOPE,
    Node,
    NodeScope,
    Port,
    Range,
    Tree,
    is_composite,
)
from opgrip.traces.formats.operator_schemas import (
    DTYPE_OF_ELEMENT,
    VALUE_OF_CODE,
    Bound,
    SchemaText,
    parse_schema,
    pieces,
    registered,
    without_defaults,
)
from opgrip.traces.io.foreign_files import Losses
from opgrip.traces.schema.arguments import Opaque, TensorSpec, tensors, with_numbers
from opgrip.traces.schema.json_values import LIMIT, check_nesting, device_name, sizes
from opgrip.traces.schema.records import NO_STORAGE, Record, Scope
from opgrip.traces.schema.tensor_specs import DTYPES, contiguous
from opgrip.traces.table.profiler_labels import MARK_ENTER, MARK_EXIT
from opgrip.traces.values import ValueModel
from opgrip.traces.values.exact import Constant
from opgrip.traces.values.integers import Integers

NO_STRIDES = "strides: files before schema 1.1.1 have only the strides of views, so other tensors are contiguous"
PLACEHOLDER = re.compile(r"<(\w+)>")
LIST = re.compile(r"(GenericList|Tuple)\[(.*)\]", re.DOTALL)
TENSOR = re.compile(r"Tensor\((.*)\)", re.DOTALL)
NO_NUMBERS = "numbers in place of tensors: the file has them as tensors without dimensions, without their values"
NO_GENERATORS = "generators: the file does not have them, so calls use the default one"
NO_PARENTS = "nesting: {} without a parent node in the file, so calls inside other calls may be counted, too"
MOST_LABEL = 1 << 16  # maximum number of characters of a label


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


class PortValues:
    """The arguments or results of a node, decoded from its inputs or outputs.

    kinds : types of the arguments in the operator's schema, as far as it has them
    storages, identities, indices : of each tensor that is not opaque: numbers in the file, and index among all tensors
    """

    def __init__(self, port: Port, kinds: Sequence[str], strides: KnownStrides) -> None:
        self._known_strides = strides
        self._tensors = 0
        self.storages: list[int] = []
        self.identities: list[int] = []
        self.indices: list[int] = []
        own_strides = port.strides if port.strides is not None else [None] * len(port.values)
        columns = zip(port.values, port.shapes, port.types, own_strides, strict=True)
        schema_kinds = chain(kinds, repeat(""))
        self.items = [self._decode(*item, kind) for item, kind in zip(columns, schema_kinds, strict=False)]

    def _decode(self, value: Any, shape: Any, kind: Any, stride: Any, schema_kind: str) -> Any:
        if not isinstance(kind, str):
            raise FormatError(f"the type of an argument is not a string: {str(kind)[:60]}")
        if match := TENSOR.fullmatch(kind):
            return self._tensor(value, shape, match[1], stride)
        if match := LIST.fullmatch(kind):
            return self._list(value, shape, match, stride, schema_kind)
        return _scalar(value, kind, schema_kind.rstrip("?"))

    def _list(self, value: Any, shape: Any, match: re.Match[str], stride: Any, schema_kind: str) -> Any:
        kinds = list(pieces(match[2]))
        if not isinstance(value, list) or len(value) != len(kinds):
            raise FormatError(
                f"a list of the type {match[0][:60]} does not have {len(kinds)} values: {str(value)[:60]}"
            )
        empty = [None] * len(value)
        shapes = shape if isinstance(shape, list) and len(shape) == len(value) else empty
        strides = stride if isinstance(stride, list) and len(stride) == len(value) else empty
        inner = schema_kind.rstrip("?").removesuffix("[]")
        items = [self._decode(*item, inner) for item in zip(value, shapes, kinds, strides, strict=True)]
        return items if match[1] == "GenericList" else tuple(items)

    def _tensor(self, value: Any, shape: Any, element: str, stride: Any) -> TensorSpec | Opaque | None:
        if not isinstance(value, list) or not 5 <= len(value) <= 6:
            raise FormatError(f"expected a list of five or six values for a tensor, got {str(value)[:60]}")
        self._tensors += 1
        if element == UNDEFINED:
            return None
        dtype = DTYPE_OF_ELEMENT.get(element) or DTYPES.get(element.removeprefix("c10::").lower())
        if dtype is None:
            return Opaque(f"{element[:60]} tensor")
        dimensions = sizes(shape)
        steps = self._known_strides.of(value, dimensions) if stride is None else sizes(stride)
        if len(steps) != len(dimensions):
            raise FormatError(f"a tensor has {len(dimensions)} dimensions and {len(steps)} strides")
        device = device_name(value[5]) if len(value) == 6 and value[5] else "cpu"
        storage = whole(value[1])
        self.storages.append(storage)
        self.identities.append(whole(value[0]))
        self.indices.append(self._tensors - 1)
        return TensorSpec(dimensions, steps, dtype, device, offset=whole(value[2]), storage=storage or None)


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


def whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < LIMIT:
        raise FormatError(f"expected the number of a tensor, got {str(value)[:60]}")
    return value


@dataclass(slots=True)
class NodeStorages:
    """Assigns a unique number to each storage, because execution traces reuse the numbers of freed storages."""

    _numbers: dict[int, int] = field(default_factory=dict)
    _tensors: dict[int, set[int]] = field(default_factory=dict)
    _next: int = 0

    def taken(self, storage: int, tensor: int, is_number: bool) -> int:
        if storage and is_number and tensor not in self._tensors.get(storage, ()):
            return self.fresh(storage, tensor)
        return self.given(storage, tensor)

    def given(self, storage: int, tensor: int) -> int:
        if not storage:
            return NO_STORAGE
        if storage not in self._numbers:
            return self.fresh(storage, tensor)
        self._tensors[storage].add(tensor)
        return self._numbers[storage]

    def fresh(self, storage: int, tensor: int) -> int:
        if not storage:
            return NO_STORAGE
        self._numbers[storage] = number = self._next
        self._tensors[storage] = {tensor}
        self._next += 1
        return number


def calls_of(
    name: str, facts: Mapping[str, Any], nodes: Callable[[], Iterable[Node]], losses: Losses
) -> Iterator[Record]:
    tree = Tree()
    for node in nodes():
        tree.add(node)
    tree.close()
    reader = _Reader(name, facts, tree, losses)
    for node in nodes():
        reader.take(node)
        yield from reader.builder.ready()
    yield from reader.builder.end()


class _Reader:
    def __init__(self, name: str, facts: Mapping[str, Any], tree: Tree, losses: Losses) -> None:
        self._tree = tree
        self._losses = losses
        self._memory = NodeStorages()
        self._strides = KnownStrides()
        defaults = [NO_NUMBERS, NO_GENERATORS]
        defaults += ([] if tree.is_timed else [NO_TIMES]) + ([] if tree.has_strides else [NO_STRIDES])
        if tree.without_parent:
            defaults.append(NO_PARENTS.format(counted(tree.without_parent, "operator")))
        losses.defaults += [text for text in defaults if text not in losses.defaults]
        self.builder = RecordBuilder(name, losses, dict(facts), tree.is_timed)

    def take(self, node: Node) -> None:
        surroundings = self._tree.surroundings(node.number)
        if node.schema:
            self._take_operator(node, surroundings)
        elif not surroundings.is_inside:
            if node.backend:
                self._losses.skip(node.name[:200], "a kernel made by torch.compile")
            elif node.scope == USER_SCOPE and node.name not in (*ROOTS, OPTIMIZER_STEP):
                self._add_label(node, surroundings)

    def _take_operator(self, node: Node, surroundings: NodeScope) -> None:
        schema = parse_schema(node.schema)
        try:
            if schema is None or node.fault:
                raise FormatError(node.fault or "its schema is not that of an operator")
            self._take_call(node, schema, surroundings)
        except (ValueError, TypeError, IndexError, RuntimeError, OverflowError) as error:
            if not surroundings.is_inside and not is_composite(node.schema):
                self._losses.skip((schema.op if schema else node.name)[:200], f"{error}"[:200])

    def _take_call(self, node: Node, schema: SchemaText, surroundings: NodeScope) -> None:
        kinds = [parameter.type for parameter in schema.parameters]
        if surroundings.is_inside and not schema.op.startswith("aten.as_strided."):
            return
        inputs = PortValues(node.inputs, kinds, self._strides)
        if len(inputs.items) > len(kinds):
            raise FormatError(f"{schema.op} takes {len(kinds)} arguments, not {len(inputs.items)}")
        if schema.op.startswith("aten.as_strided."):
            # the one inside a view has the strides of the view
            self._strides.note(inputs, *_first(node.outputs))
        elif not any(schema.are_aliases):
            self._strides.forget(*_first(node.outputs))
        if surroundings.is_inside:
            return
        results = PortValues(node.outputs, (), self._strides)
        if is_composite(node.schema) and (
            node.number in self._tree.parents or set(results.storages) <= set(inputs.storages)
        ):
            return
        self._add_call(node, schema, surroundings, inputs, results)

    def _add_call(
        self, node: Node, schema: SchemaText, surroundings: NodeScope, inputs: PortValues, results: PortValues
    ) -> None:
        items = with_numbers(inputs.items, self._value_numbers(node, inputs)) if node.ranges else inputs.items
        pairs = list(zip(schema.parameters, items, strict=False))
        args = tuple(item for parameter, item in pairs if not parameter.is_named)
        kwargs = {parameter.name: item for parameter, item in pairs if parameter.is_named}
        call = without_defaults(Bound(schema.op, args, kwargs))
        is_single = len(schema.are_aliases) == len(results.items) == 1
        returned = results.items[0] if is_single else tuple(results.items) or None
        args, kwargs, outputs, _ = split(call.args, call.kwargs, returned)
        call = registered(schema.op, args, kwargs, self._losses)
        argument_storages = [
            # a tensor without dimensions may represent a number of Python
            self._memory.taken(
                storage, tensor, not spec.shape and spec.device == "cpu" and spec.dtype in NUMBERS.values()
            )
            for storage, tensor, spec in zip(inputs.storages, inputs.identities, tensors(inputs.items), strict=True)
        ]
        span = self._tree.span(node.number)
        self.builder.add_call(
            call.op,
            call.args,
            call.kwargs,
            outputs,
            scope=_scope(surroundings),
            thread=self._tree.thread_name(node.thread),
            start_ns=span.start_ns,
            duration_ns=span.duration_ns,
            device_ns=span.device_ns,
            storages=[*argument_storages, *self._result_storages(schema, inputs, results)],
        )

    def _value_numbers(self, node: Node, inputs: PortValues) -> list[int | None]:
        ranges = parse_ranges(node.ranges)
        numbers: list[int | None] = []
        for index, spec in zip(inputs.indices, tensors(inputs.items), strict=True):
            model = model_of(ranges[index], spec) if index in ranges else None
            numbers.append(None if model is None else self.builder.add_values(model))
        return numbers

    def _result_storages(self, schema: SchemaText, inputs: PortValues, results: PortValues) -> Iterator[int]:
        fresh: dict[int, int] = {}
        for storage, tensor in zip(results.storages, results.identities, strict=True):
            if storage in inputs.storages or any(schema.are_aliases):
                yield self._memory.given(storage, tensor)
            else:
                if storage not in fresh:
                    fresh[storage] = self._memory.fresh(storage, tensor)
                yield fresh[storage]

    def _add_label(self, node: Node, surroundings: NodeScope) -> None:
        scope, thread = _scope(surroundings), self._tree.thread_name(node.thread)
        start_ns = self._tree.span(node.number).start_ns
        self.builder.add_call(MARK_ENTER, (node.name[:MOST_LABEL],), scope=scope, thread=thread, start_ns=start_ns)
        end_ns = self._tree.end_ns(node.number)
        opened = (Opaque("profiler._RecordFunction"),)
        self.builder.add_call(MARK_EXIT, opened, None, None, scope=scope, thread=thread, start_ns=end_ns)


def _first(port: Port) -> tuple[Any, Any]:
    return (port.values[0], port.shapes[0]) if port.values else (None, None)


def _scope(surroundings: NodeScope) -> Scope:
    return Scope(0, surroundings.module, surroundings.module_type, surroundings.phase)


def parse_ranges(text: str) -> dict[int, Range]:
    if not text:
        return {}
    try:
        form = json.loads(text)
        check_nesting(text.encode(), form)
        ranges = {int(index): (low, high) for index, (low, high) in form.items()}
        for low, high in ranges.values():
            if not all(type(bound) in (int, float) and -LIMIT <= bound < LIMIT for bound in (low, high)) or low > high:
                raise ValueError(f"{low} and {high} are not a range")
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        reason = "tensor_range is not a JSON object with the lowest and highest value of each tensor"
        raise FormatError(reason) from error
    return ranges


def model_of(span: Range, spec: TensorSpec) -> ValueModel | None:
    low, high = span
    whole = type(low) is int and type(high) is int
    model: ValueModel
    if low == high and (whole or spec.dtype.is_floating_point):
        model = Constant(bool(low) if spec.dtype == torch.bool else low)
    elif whole and not (spec.dtype.is_floating_point or spec.dtype.is_complex) and 0 not in spec.shape:
        model = Integers([], int(low), int(high), torch.Size(spec.shape).numel(), ascending=False)
    else:
        return None
    model.check()
    return model
