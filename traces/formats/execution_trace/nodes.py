"""Nodes of execution traces: which of them are calls of the program, and which phase and module surround each call."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from opgrip.traces.formats.operator_schemas import has_composite_kernel, parse_schema
from opgrip.traces.schema.operator_arguments import schema_named
from opgrip.traces.table.profiler_labels import AUTOGRAD

NONE = "<None>"  # text that represents None
# torch's codes for the source of a node: an operator, a backward node, a label of the program
FUNCTION_SCOPE, BACKWARD_SCOPE, USER_SCOPE = 0, 1, 7
ROOT = 1  # number of the process node with which a written file begins
PROCESS = "[pytorch|profiler|execution_trace|process]"
THREAD = "[pytorch|profiler|execution_trace|thread]"
THREADS = (THREAD, "[pytorch|profiler|execution_graph|thread]")
ROOTS = (*THREADS, PROCESS, "[pytorch|profiler|execution_graph|process]")
BACKWARD_LABEL = "autograd::engine::evaluate_function: "
OPTIMIZER_LABEL = "Optimizer.step#"
OPTIMIZER_STEP = f"{OPTIMIZER_LABEL}step"  # label of an optimizer's step if the program sets none
MODULE_LABEL = "nn.Module: "
UNDEFINED = "nullptr (uninitialized)"  # type of the elements of a tensor that is not there
# dtypes of the tensors that torch creates from numbers
NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
Range = tuple[int | float, int | float]


@dataclass(frozen=True, slots=True)
class Port:
    """Inputs or outputs of a node: four lists of equal length, whose contents are not checked.

    values : a tensor is `[tensor, storage, offset, elements, item size, device]`
    types : such as `Tensor(float)`, `Int`, `GenericList[Int,Int]`
    """

    values: list[Any]
    shapes: list[Any]
    types: list[Any]
    strides: list[Any] | None = None


NO_PORT = Port([], [], [], [])


@dataclass(frozen=True, slots=True)
class Node:
    """A node of an execution trace, whose inputs and outputs are not checked.

    parent : number of the enclosing node; a process is its own parent
    schema : operator schema as torch writes it; empty for other nodes
    record : number of the call, shared by all parts that Chakra splits an operator into; 0 if unknown
    own_us : duration without the nodes inside it
    fault : reason why the rest of the node cannot be read; empty if it can
    """

    number: int
    name: str
    parent: int
    inputs: Port = NO_PORT
    outputs: Port = NO_PORT
    schema: str = ""
    scope: int = FUNCTION_SCOPE
    thread: int = 0
    backend: str = ""
    record: int = 0
    start_us: float | None = None
    own_us: float | None = None
    stream: int | None = None
    ranges: str = ""
    fault: str = ""


FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"
MODULE = re.compile(re.escape(MODULE_LABEL) + r"(\S*)(?: \((\w+)\))?")


@dataclass(frozen=True, slots=True)
class NodeScope:
    is_inside: bool = False
    phase: str = FORWARD
    module: str = ""
    module_type: str = ""


@dataclass(frozen=True, slots=True)
class _Entry:
    parent: int
    is_call: bool
    phase: str | None
    module: tuple[str, str] | None
    thread: int
    start_us: float | None
    own_us: float
    is_kernel: bool


@dataclass(frozen=True, slots=True)
class NodeSpan:
    """Time of a node.

    start_ns : time since the first node; if the file has no times, only the order is meaningful
    device_ns : duration of the kernels inside the node, -1 without kernels
    """

    start_ns: int
    duration_ns: int
    device_ns: int

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.duration_ns


@dataclass(slots=True)
class Tree:
    """The nodes of a file as a tree, and the selection of nodes that a capture would record as calls."""

    is_timed: bool = False
    has_strides: bool = False
    without_parent: int = 0

    _entries: dict[int, _Entry] = field(default_factory=dict)
    _surroundings: dict[int, NodeScope] = field(default_factory=dict)
    _last_inside: dict[int, int] = field(default_factory=dict)
    _host_us: dict[int, float] = field(default_factory=dict)
    _device_us: dict[int, float] = field(default_factory=dict)
    _before_us: dict[int, float] = field(default_factory=dict)
    _first_us: float = 0.0
    parents: set[int] = field(default_factory=set)
    _roots: set[int] = field(default_factory=set)
    _backward_threads: set[int] = field(default_factory=set)

    def add(self, node: Node) -> None:
        phase = _phase_of(node)
        module = MODULE.fullmatch(node.name) if not node.schema else None
        names = (module[1], module[2] or "") if module else None
        is_kernel = node.stream is not None
        times = (node.start_us, node.own_us or 0.0, is_kernel)
        is_call = bool(node.schema) and not node.backend and not is_composite(node.schema)
        self._entries[node.number] = _Entry(node.parent, is_call, phase, names, node.thread, *times)
        self.is_timed |= node.own_us is not None
        self.has_strides |= bool(node.inputs.strides)
        if node.parent != node.number:
            self.parents.add(node.parent)
        self.without_parent += bool(node.schema) and not node.parent
        if node.name in THREADS:
            self._roots.add(node.number)

    def close(self) -> None:
        """Compute the times, phases and modules of all nodes, after the last node was added."""
        before: dict[int, float] = {}
        for number in sorted(self._entries):
            entry = self._entries[number]
            self._before_us[number] = before.get(entry.thread, 0.0)
            before[entry.thread] = self._before_us[number] + (0.0 if entry.is_kernel else entry.own_us)
        for number in sorted(self._entries, reverse=True):
            self._close_node(number, self._entries[number])
        starts = [entry.start_us for entry in self._entries.values() if entry.start_us is not None]
        self._first_us = min(starts, default=0.0)
        first: dict[int, str | None] = {}
        for number in sorted(self._entries):
            entry = self._entries[number]
            if entry.parent in self._roots:
                first.setdefault(entry.thread, entry.phase)
        # hooks of backward passes run there too
        self._backward_threads = {thread for thread, phase in first.items() if phase == BACKWARD}
        for root in self._roots:
            if self._entries[root].thread in self._backward_threads:
                self._surroundings[root] = NodeScope(phase=BACKWARD)

    def _close_node(self, number: int, entry: _Entry) -> None:
        times = self._device_us if entry.is_kernel else self._host_us
        times[number] = times.get(number, 0.0) + entry.own_us
        if entry.parent >= number:
            return
        for table in (self._host_us, self._device_us):
            if number in table:
                table[entry.parent] = table.get(entry.parent, 0.0) + table[number]
        last = self.last_inside(number)
        self._last_inside[entry.parent] = max(last, self.last_inside(entry.parent))

    def span(self, number: int) -> NodeSpan:
        start_us, own = self._entries[number].start_us, self._host_us.get(number, 0.0)
        if start_us is None:
            # times 2, so that a label can end between two nodes
            start_ns = 2 * number + round(1000 * self._before_us[number])
        else:
            start_ns = round(1000 * (start_us - self._first_us))
        device_us = self._device_us.get(number)
        return NodeSpan(start_ns, round(1000 * own), -1 if device_us is None else round(1000 * device_us))

    def end_ns(self, number: int) -> int:
        last = self.last_inside(number)
        return max(self.span(number).end_ns, self.span(last).end_ns + 1)

    def last_inside(self, number: int) -> int:
        return self._last_inside.get(number, number)

    def surroundings(self, number: int) -> NodeScope:
        entry = self._entries.get(number)
        return NodeScope() if entry is None else self._within(entry.parent, number)

    def _within(self, parent: int, child: int) -> NodeScope:
        path = []
        ancestors = {child}
        while parent in self._entries and parent not in self._surroundings and parent not in ancestors:
            path.append(parent)
            ancestors.add(parent)
            parent = self._entries[parent].parent
        around = self._surroundings.get(parent, NodeScope())
        for number in reversed(path):
            entry = self._entries[number]
            module = entry.module or (around.module, around.module_type)
            around = NodeScope(around.is_inside or entry.is_call, entry.phase or around.phase, *module)
            self._surroundings[number] = around
        return around

    def thread_name(self, number: int) -> str:
        if number <= 1:
            return "main"
        name = AUTOGRAD if number in self._backward_threads else "thread"
        return f"{name} {number}"


def is_composite(schema: str) -> bool:
    """Return True if the dispatcher runs other operators in place of the operator with this schema."""
    text = parse_schema(schema)
    return text is not None and _is_composite(text.op)


# by name, because the text of an untrusted schema may be long
@lru_cache(maxsize=8192)
def _is_composite(op: str) -> bool:
    schema = schema_named(op)
    return schema is not None and bool(has_composite_kernel(schema))


def _phase_of(node: Node) -> str | None:
    if node.schema:
        return None
    if node.scope == BACKWARD_SCOPE or node.name.startswith(BACKWARD_LABEL):
        return BACKWARD
    return OPTIMIZER if node.name.startswith(OPTIMIZER_LABEL) else None
