"""Conversion of the nodes of an execution trace to calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from opgrip.cli.command import counted
from opgrip.errors import FormatError
from opgrip.traces.formats.building import NO_TIMES, RecordBuilder
from opgrip.traces.formats.execution_trace.nodes import Node, NodeScope, Port, Tree, is_composite, is_label, make_tree
from opgrip.traces.formats.execution_trace.ports import (
    NO_STRIDES,
    NUMBERS,
    KnownStrides,
    PortValues,
    Range,
    decode_port,
    with_sharing,
)
from opgrip.traces.formats.operator_schemas import VALUE_OF_CODE, Parameter, SchemaText, parse_schema, registered
from opgrip.traces.io.foreign_files import ForeignFile, Losses
from opgrip.traces.io.json_stream import CutText
from opgrip.traces.schema.arguments import Opaque, TensorSpec, tensors
from opgrip.traces.schema.json_values import LIMIT, check_nesting
from opgrip.traces.schema.operator_arguments import schema_named
from opgrip.traces.schema.records import NO_STORAGE, Record, Scope
from opgrip.traces.table.profiler_labels import MARK_ENTER, MARK_EXIT
from opgrip.traces.values import ValueModel
from opgrip.traces.values.exact import Constant
from opgrip.traces.values.integers import Integers

NO_NUMBERS = "numbers in place of tensors: the file has them as tensors without dimensions, without their values"
NO_GENERATORS = "generators: the file does not have them, so calls use the default one"
NO_PARENTS = "nesting: {} without a parent node in the file, so calls inside other calls may be counted, too"
DEFAULTS = (NO_NUMBERS, NO_GENERATORS)
MOST_LABEL = 1 << 16  # maximum number of characters of a label


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


class NodesRead:
    def __init__(self, file: ForeignFile) -> None:
        self._file = file
        self._losses: Losses | None = None
        self._reasons: list[str] = []
        self.nodes = 0

    def begin(self) -> None:
        self._losses = self._file.losses if self._losses is None else Losses()
        self._reasons.clear()
        self.nodes = 0

    def read(self, parse: Callable[[Any], Node], form: Any) -> Node | None:
        try:
            node = parse(form)
        except FormatError as error:
            self.skip(str(error))
            return None
        self.nodes += 1
        if node.fault:
            self._reasons.append(node.fault)
        return node

    def skip(self, reason: str, count: int = 1) -> None:
        assert self._losses is not None, "reading has begun"
        self.nodes += count
        self._reasons += [reason] * count
        self._losses.skip("?", reason, count)

    def check(self, error: FormatError | None = None) -> None:
        if len(self._reasons) == self.nodes and (self.nodes or (error is not None and not isinstance(error, CutText))):
            raise self._file.damage([*self._reasons, str(error)][0])


def calls_of(
    name: str, facts: Mapping[str, Any], nodes: Callable[[], Iterable[Node]], losses: Losses
) -> Iterator[Record]:
    tree = make_tree(nodes())
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
        defaults = [*DEFAULTS, *([] if tree.is_timed else [NO_TIMES]), *([] if tree.has_strides else [NO_STRIDES])]
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
            elif is_label(node):
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
        inputs = decode_port(node.inputs, kinds, self._strides)
        if len(inputs.items) > len(kinds):
            raise FormatError(f"{schema.op} takes {len(kinds)} arguments, not {len(inputs.items)}")
        if schema.op.startswith("aten.as_strided."):
            # the one inside a view has the strides of the view
            self._strides.note(inputs, *_first(node.outputs))
        elif not any(schema.are_aliases):
            self._strides.forget(*_first(node.outputs))
        if surroundings.is_inside:
            return
        results = decode_port(node.outputs, (), self._strides)
        if is_composite(node.schema) and (
            self._tree.has_nodes_inside(node.number) or set(results.storages) <= set(inputs.storages)
        ):
            return
        self._add_call(node, schema, surroundings, inputs, results)

    def _add_call(
        self, node: Node, schema: SchemaText, surroundings: NodeScope, inputs: PortValues, results: PortValues
    ) -> None:
        items = with_sharing(inputs, self._value_numbers(node, inputs))
        args, kwargs = as_called(schema, items)
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
            _returned(schema, results.items),
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


def as_called(schema: SchemaText, items: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    defaults = _defaults(schema.op)
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for parameter, item in zip(schema.parameters, items, strict=False):
        if parameter.is_named:
            if not _is_default(parameter, item, defaults):
                named[parameter.name] = item
        else:
            positional.append(item)
    while positional and _is_default(schema.parameters[len(positional) - 1], positional[-1], defaults):
        positional.pop()
    return tuple(positional), named


def _is_default(parameter: Parameter, item: Any, defaults: Mapping[str, Any]) -> bool:
    if parameter.name not in defaults:
        return False
    default = defaults[parameter.name]
    return type(item) is type(default) and bool(item == default)


@lru_cache(maxsize=4096)
def _defaults(op: str) -> dict[str, Any]:
    schema = schema_named(op)
    if schema is None:
        return {}
    text = parse_schema(str(schema))
    kinds = {parameter.name: parameter.type for parameter in text.parameters} if text else {}
    defaults = {item.name: item.default_value for item in schema.arguments if item.has_default_value()}
    for name, value in defaults.items():
        if type(value) is int:
            # dtypes, layouts and memory formats are integers in schemas
            defaults[name] = VALUE_OF_CODE.get(kinds.get(name, "").rstrip("?"), {}).get(value, value)
    return defaults


def _returned(schema: SchemaText, items: list[Any]) -> Any:
    if len(schema.are_aliases) == 1 and len(items) == 1:
        return items[0]
    return tuple(items) if items else None


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
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(
            "tensor_range is not a JSON object with the lowest and highest value of each tensor"
        ) from error
    for low, high in ranges.values():
        if not all(type(bound) in (int, float) and -LIMIT <= bound < LIMIT for bound in (low, high)) or low > high:
            raise FormatError("tensor_range is not a JSON object with the lowest and highest value of each tensor")
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
