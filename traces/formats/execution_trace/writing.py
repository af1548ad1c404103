"""Makes the nodes of an execution trace: calls, inside nodes for threads, phases, modules and labels."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple

import torch

from opgrip.traces.formats.execution_trace.nodes import (
    BACKWARD,
    BACKWARD_LABEL,
    BACKWARD_SCOPE,
    FUNCTION_SCOPE,
    MODULE_LABEL,
    NONE,
    NUMBERS,
    OPTIMIZER,
    OPTIMIZER_LABEL,
    OPTIMIZER_STEP,
    PROCESS,
    ROOT,
    THREAD,
    UNDEFINED,
    USER_SCOPE,
    Node,
    Port,
    Range,
)
from opgrip.traces.formats.operator_schemas import CODE_OF_VALUE, ELEMENT_NAMES, NotConverted, arguments_in_order
from opgrip.traces.io.foreign_files import Losses
from opgrip.traces.schema.arguments import GeneratorSpec, Opaque, TensorSpec, tensors
from opgrip.traces.schema.records import NO_STORAGE, Signature
from opgrip.traces.schema.tensor_specs import plain_name
from opgrip.traces.table.profiler_labels import ENTER, EXIT, close_label, is_mark, label_of
from opgrip.traces.table.trace import Trace
from opgrip.traces.values import ValueModel
from opgrip.traces.values.exact import Constant, Exact
from opgrip.traces.values.integers import Integers
from opgrip.traces.values.order import Permutation
from opgrip.traces.values.progression import Offsets, Progression

# a node of the written file, and the index of its call in the trace's table; None for a node that is no call
NodeStep = tuple[Node, int | None]


@dataclass(slots=True)
class _OpenNodes:
    thread: int
    root: int
    labels: list[tuple[int, str]] = field(default_factory=list)
    inside: tuple[str, str, str] = ("forward", "", "")
    around: int = 0

    @property
    def innermost(self) -> int:
        return self.labels[-1][0] if self.labels else self.root


class NodeWriter:
    def __init__(self, trace: Trace, losses: Losses) -> None:
        self._trace = trace
        self._losses = losses
        self._numbers = NodeNumbers()
        self._signatures = {item.number: item for item in trace.signatures}
        self._open_nodes: dict[tuple[Any, str], _OpenNodes] = {}
        self._is_timed = bool(trace.header.get("timed", True))
        scopes = {scope.number: scope for scope in trace.scopes}
        # for a backward call, the module of the forward call that caused it
        origins = {
            number: scopes.get(-1 if scope.forward is None else scope.forward, scope)
            for number, scope in scopes.items()
        }
        self._module_types = {number: scope.module_type for number, scope in origins.items()}
        self._kernels = {item.signature: item.names[0] for item in trace.kernels if item.names}
        self._first_ns = int(trace.calls["start_ns"].min()) if len(trace.calls) else 0

    def steps(self) -> Iterator[NodeStep]:
        yield Node(ROOT, PROCESS, ROOT, scope=USER_SCOPE), None
        row: Any
        for row in self._trace.calls.itertuples():
            yield from self._call(row, self._signatures[int(row.signature)])

    def _call(self, row: Any, signature: Signature) -> Iterator[NodeStep]:
        key = (row.process, str(row.thread))
        if key not in self._open_nodes:
            opened = self._open_nodes[key] = _OpenNodes(len(self._open_nodes) + 1, self._numbers.new())
            yield Node(opened.root, THREAD, ROOT, scope=USER_SCOPE, thread=opened.thread), None
        opened = self._open_nodes[key]
        if is_mark(signature.op):
            yield from self._mark(opened, row, signature)
            return
        try:
            node = self._node(row, signature)
        except NotConverted as error:
            self._losses.skip(signature.op, str(error))
            return
        yield from self._labels(opened, row)
        yield from self._operator(opened, row, signature, node)

    def _operator(self, opened: _OpenNodes, row: Any, signature: Signature, node: Node) -> Iterator[NodeStep]:
        start_us = self._start_us(row)
        own_us = int(row.duration_ns) / 1e3 if self._is_timed else None
        node = replace(node, number=self._numbers.new(), parent=opened.around, thread=opened.thread)
        node = replace(node, start_us=start_us, own_us=own_us)
        yield node, row.Index
        if self._is_timed and row.device_ns == row.device_ns:
            kernel = self._kernels.get(signature.number, f"kernels of {signature.op}")
            stream = int(row.stream) if isinstance(row.stream, int) else 0
            number = self._numbers.new()
            on_device = Node(number, kernel, node.number, thread=opened.thread, stream=stream)
            yield replace(on_device, start_us=start_us, own_us=float(row.device_ns) / 1e3), None

    def _mark(self, opened: _OpenNodes, row: Any, signature: Signature) -> Iterator[NodeStep]:
        if signature.op.startswith(ENTER):
            yield self._open_label(opened, row, label_of(signature) or "label")
        elif signature.op.startswith(EXIT):
            label = label_of(signature, EXIT)
            if label not in [name for _, name in opened.labels]:
                # a label may be closed in another thread
                threads = [nodes for nodes in self._open_nodes.values() if label in [name for _, name in nodes.labels]]
                opened = next(iter(threads), opened)
            closed = close_label(label, opened.labels, [])
            # a node ends before the nodes around it: labels that were opened later go on in new nodes
            inner = [name for number, name in opened.labels if closed is not None and number > closed[0]]
            del opened.labels[len(opened.labels) - len(inner) :]
            for name in inner:
                yield self._open_label(opened, row, name)
        opened.inside, opened.around = ("forward", "", ""), opened.innermost

    def _open_label(self, opened: _OpenNodes, row: Any, name: str) -> NodeStep:
        node = Node(self._numbers.new(), name, opened.innermost, scope=USER_SCOPE, thread=opened.thread)
        opened.labels.append((node.number, name))
        return replace(node, start_us=self._start_us(row), own_us=0.0 if self._is_timed else None), None

    def _start_us(self, row: Any) -> float | None:
        return (int(row.start_ns) - self._first_ns) / 1e3 if self._is_timed else None

    def _labels(self, opened: _OpenNodes, row: Any) -> Iterator[NodeStep]:
        inside = (str(row.phase), str(row.module), self._module_types.get(int(row.scope), ""))
        if inside == opened.inside and opened.around:
            return
        opened.inside, opened.around = inside, opened.innermost
        phase, module, module_type = inside
        names = {BACKWARD: (f"{BACKWARD_LABEL}Backward", BACKWARD_SCOPE), OPTIMIZER: (OPTIMIZER_STEP, USER_SCOPE)}
        labels = [names[phase]] if phase in names else []
        if phase == OPTIMIZER and any(name.startswith(OPTIMIZER_LABEL) for _, name in opened.labels):
            labels = []
        if module or module_type:
            labels.append((f"{MODULE_LABEL}{module} ({module_type})", FUNCTION_SCOPE))
        for name, scope in labels:
            number = self._numbers.new()
            yield Node(number, name, opened.around, scope=scope, thread=opened.thread), None
            opened.around = number

    def _node(self, row: Any, signature: Signature) -> Node:
        text, schema, values = arguments_in_order(signature)
        if signature.raised is not None:
            raise NotConverted("the call raised an error")
        storages = [int(item) for item in self._trace.storages[row.first_storage : row.first_storage + row.tensors]]
        outputs = signature.outputs
        results = list(outputs) if isinstance(outputs, tuple) else [] if outputs is None else [outputs]
        if any(isinstance(item, Opaque) for item in results):
            self._losses.lose(row.Index, signature.op, "its results")
            results = []
        specs = list(tensors([signature.args, signature.kwargs]))
        if any(spec.values is not None for spec in specs):
            self._losses.lose(row.Index, signature.op, "values of its tensors")
        if any(spec.requires_grad for spec in specs):
            self._losses.lose(row.Index, signature.op, "requires_grad of its tensors")
        encoder = Encoder(
            self._numbers,
            iter(storages),
            lambda spec: range_of(self._trace.values.get(-1 if spec.values is None else spec.values), spec),
            lambda what: self._losses.lose(row.Index, signature.op, what),
        )
        inputs = encoder.port(values, [parameter.type for parameter in schema.parameters])
        ranges = json.dumps({str(index): span for index, span in encoder.ranges.items()}) if encoder.ranges else ""
        results_port = encoder.port(results, [""] * len(results), are_results=True)
        name = text.partition("(")[0].partition(".")[0]
        return Node(0, name, 0, inputs, results_port, text, ranges=ranges)


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


def range_of(model: ValueModel | None, spec: TensorSpec) -> Range | None:
    if model is None or spec.dtype.is_floating_point or spec.dtype.is_complex:
        return None
    bounds: list[Any] = []
    match model:
        case Exact(data=data):
            bounds = data
        case Constant(value=value):
            bounds = [value]
        case Integers(frequent=frequent, low=low, high=high):
            bounds = [value for value, _ in frequent] + [bound for bound in (low, high) if bound is not None]
        case Permutation(low=low, high=high):
            bounds = [low, high]
        case Offsets(first=first, last=last):
            bounds = [first, last]
        case Progression(start=start, step=step, period=period):
            bounds = [start, start + step * (period - 1)]
    numbers = [int(item) for item in bounds if isinstance(item, int)]
    return (min(numbers), max(numbers)) if numbers and len(numbers) == len(bounds) else None
