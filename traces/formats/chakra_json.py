"""Chakra execution traces as JSON: the output of Chakra's `jsonizer`, and workload graphs for its simulators.

The first is the protocol buffers of a trace as one JSON object after the other. A workload graph has the names and
durations of nodes and no arguments, so none of its operators becomes a call.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from opgrip.errors import FormatError
from opgrip.traces.formats.building import NO_GRADIENTS, NO_VALUES, RecordBuilder
from opgrip.traces.formats.chakra import PART, facts_of, message_classes, node_from_message, with_parts_inside
from opgrip.traces.formats.node_calls import NodesRead, calls_of
from opgrip.traces.formats.nodes import Node
from opgrip.traces.formats.operator_schemas import OPERATOR_NAME
from opgrip.traces.formats.protobuf_files import message_from_json
from opgrip.traces.io.foreign_files import ForeignFile, Format, Head, formats
from opgrip.traces.io.json_stream import TooLong, members, values
from opgrip.traces.schema.records import Record

NAME = "chakra_json"
GRAPH = "workload_graph"
START = re.compile(rb'\s*\{\s*(?:\}|"(?:attr|version|workload_graph)"\s*:)')
VALUE = re.compile(rb'"(?:string|u?int64|u?int32|bool|double)_?[vV]al"\s*:')
"""name of an attribute's value"""


def recognizes(head: Head) -> bool:
    is_graph = f'"{GRAPH}"'.encode() in head.start
    return START.match(head.start) is not None and (is_graph or VALUE.search(head.start) is not None)


def read(file: ForeignFile) -> Iterator[Record]:
    """Yield the calls that a capture would have recorded."""
    try:
        first = next(values(file.chunks(), file.unbounded), None)
    except (FormatError, TooLong):
        first = None
    if isinstance(first, dict) and GRAPH in first:
        return _records_of_graph(file)
    facts: dict[str, Any] = {}
    return calls_of(NAME, facts, _nodes_of(file, facts), file.losses)


def _nodes_of(file: ForeignFile, facts: dict[str, Any]) -> Callable[[], Iterable[Node]]:
    classes, counted = message_classes(), NodesRead(file)

    def node_of(form: Any) -> Node:
        return node_from_message(message_from_json(classes["Node"], form))

    def nodes() -> Iterator[Node]:
        first_parts: dict[tuple[int, str], int] = {}
        counted.begin()
        try:
            for place, form in enumerate(values(file.chunks(), file.unbounded)):
                if not place:
                    facts.update(facts_of(message_from_json(classes["GlobalMetadata"], form)))
                elif (node := counted.read(node_of, form)) is not None:
                    yield with_parts_inside(node, first_parts)
        except TooLong:
            raise file.refusal("a node is longer than 16 MB") from None
        except FormatError as error:
            raise file.damage(str(error) or "it is cut") from error
        counted.check()

    return nodes


def _records_of_graph(file: ForeignFile) -> Iterator[Record]:
    """Yield a trace without calls, and count the operators of the graph."""
    try:
        for name, form in members(file.chunks(), GRAPH, file.unbounded):
            if name == GRAPH and isinstance(form, dict) and form.get("is_cpu_op"):
                op = str(form.get("Name"))[:200]
                part = PART.fullmatch(op)
                op = part[1] if part else op
                # an operator is split around its kernels
                if OPERATOR_NAME.fullmatch(op) and (part is None or part[0].endswith("(0)")):
                    file.losses.skip(op.replace("::", "."), "the file does not have its arguments")
    except TooLong:
        raise file.refusal("a node is longer than 16 MB") from None
    except FormatError as error:
        raise file.damage(str(error) or "it is cut") from error
    yield from RecordBuilder(NAME, file.losses).end()


formats.register(NAME)(
    Format(
        "Chakra execution traces as JSON, and workload graphs of Chakra's simulators",
        recognizes,
        read,
        defaults=(NO_VALUES, NO_GRADIENTS),
    )
)
