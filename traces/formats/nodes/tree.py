"""Which nodes of an execution trace are calls of the program, and where each was made."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from opgrip.traces.formats.nodes.node import (
    BACKWARD_LABEL,
    BACKWARD_SCOPE,
    MODULE_LABEL,
    OPTIMIZER_LABEL,
    OPTIMIZER_STEP,
    ROOTS,
    THREADS,
    USER_SCOPE,
    Node,
)
from opgrip.traces.formats.schema_text import parse_schema
from opgrip.traces.table.profiler_labels import AUTOGRAD

FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"
MODULE = re.compile(re.escape(MODULE_LABEL) + r"(\S*)(?: \((\w+)\))?")


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a node stands in.

    Attributes
    ----------
    is_inside : whether a call of the program is around it
    phase, module, module_type : as a scope has them
    """

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
class Span:
    """When a node ran, in ns.

    Attributes
    ----------
    start_ns : since the first node; where the file has no times, it tells the order alone
    device_ns : how long the kernels inside it took; -1 where there are none
    """

    start_ns: int
    duration_ns: int
    device_ns: int

    @property
    def end_ns(self) -> int:
        """When the node was over."""
        return self.start_ns + self.duration_ns


@dataclass(slots=True)
class Tree:
    """The nodes of a file by what stands around them, in little memory.

    A node is a call where it is an operator that the dispatcher runs below autograd, as a capture records them: one
    that is only made of others is passed over for these, and what a call runs inside itself is part of it.

    Attributes
    ----------
    is_timed : whether the file has times
    has_strides : whether it has strides of tensors
    without_parent : operators that name no node around them
    """

    is_timed: bool = False
    has_strides: bool = False
    without_parent: int = 0

    _entries: dict[int, _Entry] = field(default_factory=dict)
    _surroundings: dict[int, Surroundings] = field(default_factory=dict)
    _last_inside: dict[int, int] = field(default_factory=dict)
    _host_us: dict[int, float] = field(default_factory=dict)
    _device_us: dict[int, float] = field(default_factory=dict)
    _before_us: dict[int, float] = field(default_factory=dict)
    _first_us: float = 0.0
    _parents: set[int] = field(default_factory=set)
    _roots: set[int] = field(default_factory=set)
    _backward_threads: set[int] = field(default_factory=set)

    def add(self, node: Node) -> None:
        """Take note of a node."""
        phase = _phase_of(node)
        module = MODULE.fullmatch(node.name) if not node.schema else None
        names = (module[1], module[2] or "") if module else None
        is_kernel = node.stream is not None
        times = (node.start_us, node.own_us or 0.0, is_kernel)
        self._entries[node.number] = _Entry(node.parent, is_call(node), phase, names, node.thread, *times)
        self.is_timed |= node.own_us is not None
        self.has_strides |= bool(node.inputs.strides)
        if node.parent != node.number:
            self._parents.add(node.parent)
        self.without_parent += bool(node.schema) and not node.parent
        if is_thread(node):
            self._roots.add(node.number)

    def close(self) -> None:
        """All nodes were added."""
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
                self._surroundings[root] = Surroundings(phase=BACKWARD)

    def _close_node(self, number: int, entry: _Entry) -> None:
        """Count a node to what is around it; those inside it were."""
        times = self._device_us if entry.is_kernel else self._host_us
        times[number] = times.get(number, 0.0) + entry.own_us
        if entry.parent >= number:
            return
        for table in (self._host_us, self._device_us):
            if number in table:
                table[entry.parent] = table.get(entry.parent, 0.0) + table[number]
        last = self.last_inside(number)
        self._last_inside[entry.parent] = max(last, self.last_inside(entry.parent))

    def span(self, number: int) -> Span:
        """When a node ran."""
        start_us, own = self._entries[number].start_us, self._host_us.get(number, 0.0)
        if start_us is None:
            # twice the number, so that a label can end between two nodes
            start_ns = 2 * number + round(1000 * self._before_us[number])
        else:
            start_ns = round(1000 * (start_us - self._first_us))
        device_us = self._device_us.get(number)
        return Span(start_ns, round(1000 * own), -1 if device_us is None else round(1000 * device_us))

    def end_ns(self, number: int) -> int:
        """When a label with that node's number ends: after the last node inside it."""
        last = self.last_inside(number)
        return max(self.span(number).end_ns, self.span(last).end_ns + 1)

    def has_nodes_inside(self, number: int) -> bool:
        """Whether a node has others inside."""
        return number in self._parents

    def last_inside(self, number: int) -> int:
        """The number of the last node inside a node; its own where there is none."""
        return self._last_inside.get(number, number)

    def surroundings(self, number: int) -> Surroundings:
        """What a node stands in."""
        entry = self._entries.get(number)
        return Surroundings() if entry is None else self._within(entry.parent, number)

    def _within(self, parent: int, child: int) -> Surroundings:
        """What stands in a node."""
        path = []
        seen = {child}
        while parent in self._entries and parent not in self._surroundings and parent not in seen:
            path.append(parent)
            seen.add(parent)
            parent = self._entries[parent].parent
        around = self._surroundings.get(parent, Surroundings())
        for number in reversed(path):
            entry = self._entries[number]
            module = entry.module or (around.module, around.module_type)
            around = Surroundings(around.is_inside or entry.is_call, entry.phase or around.phase, *module)
            self._surroundings[number] = around
        return around

    def thread_name(self, number: int) -> str:
        """A thread's name: the first is the program's, and one that only runs backward passes is autograd's."""
        if number <= 1:
            return "main"
        name = AUTOGRAD if number in self._backward_threads else "thread"
        return f"{name} {number}"


def is_call(node: Node) -> bool:
    """Whether a node is a call that a capture would record, by its operator."""
    return bool(node.schema) and not node.backend and not is_composite(node.schema)


def is_label(node: Node) -> bool:
    """Whether a node is a label that the program opened."""
    return node.scope == USER_SCOPE and not node.schema and node.name not in (*ROOTS, OPTIMIZER_STEP)


def is_thread(node: Node) -> bool:
    """Whether a node stands for a thread."""
    return node.name in THREADS


def is_composite(schema: str) -> bool:
    """Whether an operator is only made of others, which the dispatcher runs in its place."""
    text = parse_schema(schema)
    return text is not None and _is_composite(text.op)


@lru_cache(maxsize=8192)
def _is_composite(op: str) -> bool:
    namespace, packet, overload = op.split(".")
    name = f"{namespace}::{packet}" if overload == "default" else f"{namespace}::{packet}.{overload}"
    try:
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"))
    except RuntimeError:
        return False


def _phase_of(node: Node) -> str | None:
    """The phase that a node begins; None where it begins none."""
    if node.schema:
        return None
    if node.scope == BACKWARD_SCOPE or node.name.startswith(BACKWARD_LABEL):
        return BACKWARD
    return OPTIMIZER if node.name.startswith(OPTIMIZER_LABEL) else None


def make_tree(nodes: Iterable[Node]) -> Tree:
    """The tree of a file's nodes."""
    tree = Tree()
    for node in nodes:
        tree.add(node)
    tree.close()
    return tree
