"""Chakra execution traces: protocol buffers, one message of the file's facts and then one a node.

Chakra's converter makes them of execution traces that it linked to a profile, for simulators. Inputs and outputs are
there as text, in Python's notation. See its `et_def.proto`, whose fields have the numbers that stand here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import IO, Any

from opgrip.errors import FormatError
from opgrip.traces.analysis.graph import make_graph
from opgrip.traces.formats.building import NO_GRADIENTS, NO_VALUES
from opgrip.traces.formats.nodes.messages import is_metadata, metadata, metadata_facts, node_from_message, node_message
from opgrip.traces.formats.nodes.node import FUNCTION_SCOPE, Node
from opgrip.traces.formats.nodes.node_calls import calls_of
from opgrip.traces.formats.nodes.program import ROOT, Step, steps_of
from opgrip.traces.formats.nodes.wire import framed, messages, read_varint
from opgrip.traces.io.foreign_files import ForeignFile, Format, Head, Losses, formats
from opgrip.traces.schema.records import Record
from opgrip.traces.table.trace import Trace

NAME = "chakra"
PART = re.compile(r"(\w+::\w+)\(\d{1,9}\)")
"""The name of a part of an operator, `aten::copy_(1)`."""


def recognizes(head: Head) -> bool:
    """Whether a file begins with a message that holds a version or attributes, and then one that may be a node."""
    try:
        length, start = read_varint(head.start, 0)
        return 0 < length <= len(head.start) - start and is_metadata(head.start[start : start + length])
    except FormatError:
        return False


def read(file: ForeignFile) -> Iterator[Record]:
    """The calls that a capture would have recorded; kernels are the time on a device of those around them."""
    facts: dict[str, Any] = {}
    return calls_of(NAME, facts, _nodes_of(file, facts), file.losses)


def _nodes_of(file: ForeignFile, facts: dict[str, Any]) -> Callable[[], Iterable[Node]]:
    def nodes() -> Iterator[Node]:
        first_parts: dict[tuple[int, str], int] = {}
        try:
            for place, message in enumerate(messages(file.chunks())):
                if place:
                    yield _whole(node_from_message(message), first_parts)
                else:
                    facts.update(metadata_facts(message))
        except FormatError as error:
            raise file.damage(str(error)) from error

    return nodes


def _whole(node: Node, first_parts: dict[tuple[int, str], int]) -> Node:
    """A node; of an operator that the converter split around its kernels, the other parts stand inside the first."""
    match = PART.fullmatch(node.name)
    if match is None or not node.record:
        return node
    first = first_parts.setdefault((node.record, match[1]), node.number)
    if first == node.number:
        return replace(node, name=match[1])
    return replace(node, name=match[1], parent=first, schema="", scope=FUNCTION_SCOPE)


def write(trace: Trace, file: IO[bytes], losses: Losses) -> None:
    """The nodes of an execution trace, each after those that made what it takes and the one before it in its thread."""
    header = trace.header
    pid = header.get("pid")
    file.write(framed(metadata(pid if isinstance(pid, int) else 0, str(header.get("time") or ""))))
    graph = make_graph(trace)
    node_of_call: dict[int, int] = {}
    last_of_thread: dict[int, int] = {}
    for step in steps_of(trace, losses):
        node = step.node
        before = last_of_thread.get(node.thread)
        after = {node_of_call[call] for call in _calls_before(step, graph) if call in node_of_call}
        if node.stream is not None:
            after = {node.parent}
        elif before is not None:
            after.add(before)
        file.write(framed(node_message(node, sorted(after))))
        if node.stream is None and node.number != ROOT:
            last_of_thread[node.thread] = node.number
        if step.call is not None:
            node_of_call[step.call] = node.number


def _calls_before(step: Step, graph: Any) -> list[int]:
    """The calls that made, or last wrote, what a call takes."""
    found = graph.steps.get(step.call)
    return [] if found is None else list(found.after)


formats.register(NAME)(
    Format(
        "Chakra execution traces: protocol buffers of nodes and their dependencies",
        recognizes,
        read,
        write,
        suffixes=(".et", ".chakra"),
        defaults=(NO_VALUES, NO_GRADIENTS),
    )
)
