"""Makes the nodes of an execution trace: calls, inside nodes for threads, phases, modules and labels."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from opgrip.traces.formats.execution_trace.nodes import (
    BACKWARD,
    BACKWARD_LABEL,
    BACKWARD_SCOPE,
    FUNCTION_SCOPE,
    MODULE_LABEL,
    OPTIMIZER,
    OPTIMIZER_LABEL,
    OPTIMIZER_STEP,
    PROCESS,
    ROOT,
    THREAD,
    USER_SCOPE,
    Node,
    Port,
)
from opgrip.traces.formats.execution_trace.ports import Encoder, NodeNumbers, Range
from opgrip.traces.formats.operator_schemas import SchemaText, parse_schema
from opgrip.traces.io.foreign_files import Losses
from opgrip.traces.schema.arguments import Opaque, TensorSpec, tensors
from opgrip.traces.schema.operator_arguments import schema_named
from opgrip.traces.schema.records import OPERATOR, Signature
from opgrip.traces.table.profiler_labels import ENTER, EXIT, close_label, is_mark, label_of
from opgrip.traces.table.trace import Trace
from opgrip.traces.values import ValueModel
from opgrip.traces.values.exact import Constant, Exact
from opgrip.traces.values.integers import Integers
from opgrip.traces.values.order import Permutation
from opgrip.traces.values.progression import Offsets, Progression

EMPTY = Port([], [], [], [])


class NotWritten(ValueError):
    pass


@dataclass(frozen=True, slots=True)
class NodeStep:
    node: Node
    call: int | None = None


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


def steps_of(trace: Trace, losses: Losses) -> Iterator[NodeStep]:
    return _Writer(trace, losses).steps()


class _Writer:
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
        yield NodeStep(Node(ROOT, PROCESS, ROOT, EMPTY, EMPTY, scope=USER_SCOPE))
        row: Any
        for row in self._trace.calls.itertuples():
            yield from self._call(row, self._signatures[int(row.signature)])

    def _call(self, row: Any, signature: Signature) -> Iterator[NodeStep]:
        key = (row.process, str(row.thread))
        if key not in self._open_nodes:
            opened = self._open_nodes[key] = _OpenNodes(len(self._open_nodes) + 1, self._numbers.new())
            yield NodeStep(Node(opened.root, THREAD, ROOT, EMPTY, EMPTY, scope=USER_SCOPE, thread=opened.thread))
        opened = self._open_nodes[key]
        if is_mark(signature.op):
            yield from self._mark(opened, row, signature)
            return
        if signature.kind != OPERATOR:
            self._losses.skip(signature.op, "not an operator of torch's dispatcher")
            return
        try:
            node = self._node(row, signature)
        except NotWritten as error:
            self._losses.skip(signature.op, str(error))
            return
        yield from self._labels(opened, row)
        yield from self._operator(opened, row, signature, node)

    def _operator(self, opened: _OpenNodes, row: Any, signature: Signature, node: Node) -> Iterator[NodeStep]:
        start_us = self._start_us(row)
        own_us = int(row.duration_ns) / 1e3 if self._is_timed else None
        node = replace(node, number=self._numbers.new(), parent=opened.around, thread=opened.thread)
        node = replace(node, start_us=start_us, own_us=own_us)
        yield NodeStep(node, row.Index)
        if self._is_timed and row.device_ns == row.device_ns:
            kernel = self._kernels.get(signature.number, f"kernels of {signature.op}")
            stream = int(row.stream) if isinstance(row.stream, int) else 0
            number = self._numbers.new()
            on_device = Node(number, kernel, node.number, EMPTY, EMPTY, thread=opened.thread, stream=stream)
            yield NodeStep(replace(on_device, start_us=start_us, own_us=float(row.device_ns) / 1e3))

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
        node = Node(self._numbers.new(), name, opened.innermost, EMPTY, EMPTY, scope=USER_SCOPE, thread=opened.thread)
        opened.labels.append((node.number, name))
        return NodeStep(replace(node, start_us=self._start_us(row), own_us=0.0 if self._is_timed else None))

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
            yield NodeStep(Node(number, name, opened.around, EMPTY, EMPTY, scope=scope, thread=opened.thread))
            opened.around = number

    def _node(self, row: Any, signature: Signature) -> Node:
        if signature.raised is not None:
            raise NotWritten("the call raised an error")
        text, schema, values = arguments_in_order(signature)
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


def arguments_in_order(signature: Signature) -> tuple[str, SchemaText, list[Any]]:
    text, schema, defaults = _schema(signature.op)
    names = [parameter.name for parameter in schema.parameters]
    if len(signature.args) > len(names) or not set(signature.kwargs) <= set(names):
        raise NotWritten(f"its arguments do not match its schema, {text[:100]}")
    arguments = {**dict(zip(names, signature.args, strict=False)), **signature.kwargs}
    missing = [name for name in names if name not in arguments and name not in defaults]
    if missing:
        raise NotWritten(f"its argument {missing[0]} is missing")
    return text, schema, [arguments[name] if name in arguments else defaults[name] for name in names]


@lru_cache(maxsize=4096)
def _schema(op: str) -> tuple[str, SchemaText, dict[str, Any]]:
    schema = schema_named(op)
    text = "" if schema is None else str(schema)
    parsed = parse_schema(text)
    if parsed is None:
        raise NotWritten("not registered in this torch, so its schema is unknown")
    defaults = {item.name: item.default_value for item in schema.arguments if item.has_default_value()}
    return text, parsed, defaults


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
