"""Chakra execution traces: length-prefixed protobuf messages, the first with facts about the file, then one per node.

Source: Chakra's `et_def.proto`; `SCHEMA` holds the part that is read and written here.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache
from typing import IO, Any

from opgrip.errors import FormatError
from opgrip.traces.analysis.dataflow import make_graph
from opgrip.traces.formats.building import NO_GRADIENTS, NO_VALUES, RecordBuilder
from opgrip.traces.formats.execution_trace.calls import NodesRead, calls_of
from opgrip.traces.formats.execution_trace.nodes import (
    FUNCTION_SCOPE,
    LATEST_NUMBER,
    NO_PORT,
    ROOT,
    ROOTS,
    SCHEMA_VERSION,
    Node,
    Port,
    node_number,
    time_us,
)
from opgrip.traces.formats.execution_trace.writing import steps_of
from opgrip.traces.formats.operator_schemas import OPERATOR_NAME
from opgrip.traces.formats.protobuf_files import (
    make_message_classes,
    message_from_json,
    parse_message,
    read_varint,
    split_messages,
    with_length,
)
from opgrip.traces.io.foreign_files import ForeignFile, Format, Head, Losses, formats
from opgrip.traces.io.json_stream import TooLong, members, values
from opgrip.traces.schema.records import Record
from opgrip.traces.table.trace import Trace

NAME, JSON_NAME = "chakra", "chakra_json"
GRAPH = "workload_graph"
JSON_START = re.compile(rb'\s*\{\s*(?:\}|"(?:attr|version|workload_graph)"\s*:)')
# pattern of the JSON name of an attribute's value
JSON_VALUE = re.compile(rb'"(?:string|u?int64|u?int32|bool|double)_?[vV]al"\s*:')
SCHEMA: dict[str, dict[str, tuple[int, str]]] = {
    "AttributeProto": {
        "name": (1, "string"),
        "double_val": (3, "double?"),
        "float_val": (5, "float?"),
        "int32_val": (7, "int32?"),
        "int64_val": (9, "int64?"),
        "uint32_val": (11, "uint32?"),
        "uint64_val": (13, "uint64?"),
        "sint32_val": (15, "sint32?"),
        "sint64_val": (17, "sint64?"),
        "fixed32_val": (19, "fixed32?"),
        "fixed64_val": (21, "fixed64?"),
        "sfixed32_val": (23, "sfixed32?"),
        "sfixed64_val": (25, "sfixed64?"),
        "bool_val": (27, "bool?"),
        "string_val": (29, "string?"),
    },
    "GlobalMetadata": {"version": (1, "string"), "attr": (2, "AttributeProto[]")},
    "IOInfo": {"values": (1, "string"), "shapes": (2, "string"), "types": (3, "string")},
    "Node": {
        "id": (1, "uint64"),
        "name": (2, "string"),
        "type": (3, "int64"),
        "ctrl_deps": (4, "uint64[]"),
        "data_deps": (5, "uint64[]"),
        "start_time_micros": (6, "uint64"),
        "duration_micros": (7, "uint64"),
        "inputs": (8, "IOInfo"),
        "outputs": (9, "IOInfo"),
        "attr": (10, "AttributeProto[]"),
    },
}
METADATA, COMPUTE = 1, 4  # Chakra's codes for types of nodes
MOST_TEXT = 1 << 20  # maximum number of characters in the text of a list; parsing may take half a KB of memory for each
PART = re.compile(r"(\w+::\w+)\(\d{1,9}\)")  # pattern of the name of one part of an operator, such as `aten::copy_(1)`


@cache
def message_classes() -> dict[str, Any]:
    return make_message_classes("ChakraProtoMsg", "chakra", SCHEMA)


def recognizes(head: Head) -> bool:
    try:
        length, start = read_varint(head.start, 0)
        end, is_metadata = start + length, 0 < length <= len(head.start) - start
        while is_metadata and start < end:
            tag, start = read_varint(head.start, start)
            length, start = read_varint(head.start, start)
            text, start = head.start[start : start + length], start + length
            if tag == 2 << 3 | 2:
                field, begin = read_varint(text, 0)
                length, begin = read_varint(text, begin)
                name = text[begin : begin + length].decode()
                is_metadata = field == 1 << 3 | 2 and name.isidentifier()
            else:
                is_metadata = tag == 1 << 3 | 2 and text.decode().isprintable()
        return is_metadata and start == end
    except (FormatError, UnicodeDecodeError):
        return False


def read(file: ForeignFile) -> Iterator[Record]:
    return _read_messages(NAME, file, lambda: split_messages(file.chunks()), parse_message)


def _read_messages(
    name: str, file: ForeignFile, messages: Callable[[], Iterable[Any]], parse: Callable[[type, Any], Any]
) -> Iterator[Record]:
    facts: dict[str, Any] = {}
    classes, counted = message_classes(), NodesRead(file)

    def node_of(message: Any) -> Node:
        return node_from_message(parse(classes["Node"], message))

    def nodes() -> Iterator[Node]:
        first_parts: dict[tuple[int, str], int] = {}
        counted.begin()
        try:
            for index, message in enumerate(messages()):
                if not index:
                    facts.update(_facts_of(parse(classes["GlobalMetadata"], message)))
                elif (node := counted.read(node_of, message)) is not None:
                    yield _with_parts_inside(node, first_parts)
        except TooLong:
            raise file.refusal("a node is longer than 16 MB") from None
        except FormatError as error:
            raise file.damage(str(error) or "it is cut") from error
        counted.check()

    return calls_of(name, facts, nodes, file.losses)


def _recognizes_json(head: Head) -> bool:
    is_graph = f'"{GRAPH}"'.encode() in head.start
    return JSON_START.match(head.start) is not None and (is_graph or JSON_VALUE.search(head.start) is not None)


def _read_json(file: ForeignFile) -> Iterator[Record]:
    try:
        first = next(values(file.chunks(), file.unbounded), None)
    except (FormatError, TooLong):
        first = None
    if isinstance(first, dict) and GRAPH in first:
        return _records_of_graph(file)
    return _read_messages(JSON_NAME, file, lambda: values(file.chunks(), file.unbounded), message_from_json)


def _records_of_graph(file: ForeignFile) -> Iterator[Record]:
    try:
        for name, form in members(file.chunks(), GRAPH, file.unbounded):
            if name == GRAPH and isinstance(form, dict) and form.get("is_cpu_op"):
                op = str(form.get("Name"))[:200]
                part = PART.fullmatch(op)
                op = part[1] if part else op
                # an operator is split around its kernels
                if OPERATOR_NAME.fullmatch(op) and (part is None or part[0].endswith("(0)")):
                    file.losses.skip(op.replace("::", "."), "the file does not have the arguments of the call")
    except TooLong:
        raise file.refusal("a node is longer than 16 MB") from None
    except FormatError as error:
        raise file.damage(str(error) or "it is cut") from error
    yield from RecordBuilder(JSON_NAME, file.losses).end()


def _facts_of(metadata: Any) -> dict[str, Any]:
    values = {item.name: _value_of(item) for item in metadata.attr}
    schema, pid = values.get("schema") or metadata.version, values.get("pid")
    facts: dict[str, Any] = {"schema": schema[:100]} if isinstance(schema, str) and schema else {}
    return {**facts, "pid": pid} if type(pid) is int and 0 <= pid < LATEST_NUMBER else facts


def _value_of(attribute: Any) -> Any:
    field = attribute.WhichOneof("value")
    return None if field is None else getattr(attribute, field)


def _with_parts_inside(node: Node, first_parts: dict[tuple[int, str], int]) -> Node:
    match = PART.fullmatch(node.name)
    if match is None or not node.record:
        return node
    first = first_parts.setdefault((node.record, match[1]), node.number)
    if first == node.number:
        return replace(node, name=match[1])
    return replace(node, name=match[1], parent=first, schema="", scope=FUNCTION_SCOPE)


def node_from_message(message: Any) -> Node:
    attributes = {item.name: _value_of(item) for item in message.attr}
    number, parent = node_number(message.id), node_number(message.ctrl_deps[0]) if message.ctrl_deps else 0
    schema = _text_attribute(attributes, "op_schema")
    try:
        inputs = _port(message.inputs, attributes.get("input_strides"))
        outputs = _port(message.outputs, attributes.get("output_strides"))
    except FormatError as error:
        return Node(number, message.name, parent, NO_PORT, NO_PORT, schema, fault=str(error))
    start, own = message.start_time_micros or None, message.duration_micros or None
    exact = attributes.get("exclusive_us")
    return Node(
        number,
        message.name,
        parent,
        inputs,
        outputs,
        schema,
        scope=_number_attribute(attributes, "scope"),
        thread=_number_attribute(attributes, "tid"),
        record=_number_attribute(attributes, "rf_id"),
        start_us=time_us(attributes.get("start_us", start)),
        own_us=time_us(exact if isinstance(exact, float) else own),
        ranges=_text_attribute(attributes, "tensor_range"),
        stream=None if attributes.get("is_cpu_op", True) else _number_attribute(attributes, "stream"),
    )


def _port(message: Any, strides: Any) -> Port:
    values, shapes, types = map(parse_list, (message.values, message.shapes, message.types))
    if not len(values) == len(shapes) == len(types):
        raise FormatError(f"a node has {len(values)} values, {len(shapes)} shapes and {len(types)} types")
    steps = parse_list(strides) if isinstance(strides, str) else None
    if steps is not None and len(steps) != len(values):
        raise FormatError(f"a node has {len(values)} values and {len(steps)} strides")
    return Port(values, shapes, types, steps) if values else NO_PORT


def parse_list(text: str) -> list[Any]:
    if not text:
        return []
    if len(text) > MOST_TEXT:
        raise FormatError(f"the text of a list has more than {MOST_TEXT:,} characters")
    try:
        value = _literal(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise FormatError(f"expected a list as Python writes it, got {text[:60]!r}") from error
    if not isinstance(value, list):
        raise FormatError(f"expected a list as Python writes it, got {text[:60]!r}")
    return value


def _literal(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str() as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return list(map(_literal, items))
        case ast.Name(id="inf" | "nan" as name):
            return float(name)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Name(id="inf")):
            return float("-inf")
    raise FormatError(f"expected a number, string, boolean or list, got {ast.unparse(node)[:60]!r}")


def _text_attribute(attributes: dict[str, Any], name: str) -> str:
    value = attributes.get(name)
    return value if isinstance(value, str) else ""


def _number_attribute(attributes: dict[str, Any], name: str) -> int:
    value = attributes.get(name)
    return value if type(value) is int and 0 <= value < LATEST_NUMBER else 0


def write(trace: Trace, file: IO[bytes], losses: Losses) -> None:
    classes = message_classes()
    header = trace.header
    pid = header.get("pid")
    facts = {"schema": SCHEMA_VERSION, "time": str(header.get("time") or "")}
    numbers = {"pid": pid if isinstance(pid, int) else 0, "start_ts": 0, "finish_ts": 0}
    metadata = classes["GlobalMetadata"]()
    _add_attributes(metadata, "string_val", facts)
    _add_attributes(metadata, "uint64_val", {name: number % (1 << 64) for name, number in numbers.items()})
    file.write(with_length(metadata.SerializeToString()))
    graph = make_graph(trace)
    node_of_call: dict[int, int] = {}
    last_of_thread: dict[int, int] = {}
    for step in steps_of(trace, losses):
        node = step.node
        before = last_of_thread.get(node.thread)
        entry = None if step.call is None else graph.steps.get(step.call)
        # the calls that created or last wrote the memory of the call's arguments
        after = {node_of_call[call] for call in (entry.after if entry else ()) if call in node_of_call}
        if node.stream is not None:
            after = {node.parent}
        elif before is not None:
            after.add(before)
        file.write(with_length(_message_of(node, sorted(after), classes["Node"]).SerializeToString()))
        if node.stream is None and node.number != ROOT:
            last_of_thread[node.thread] = node.number
        if step.call is not None:
            node_of_call[step.call] = node.number


def _message_of(node: Node, after: Iterable[int], message_class: Any) -> Any:
    is_timed = node.start_us is not None and node.own_us is not None
    message = message_class(
        id=node.number,
        name=node.name.encode(errors="replace").decode(),
        type=METADATA if node.name in ROOTS else COMPUTE,
        ctrl_deps=[node.parent] if node.parent != node.number else [],
        data_deps=after,
        # integers in microseconds; the exact times are attributes
        start_time_micros=round(node.start_us or 0) if is_timed else 0,
        duration_micros=round(node.own_us or 0) if is_timed else 0,
    )
    for target, port in ((message.inputs, node.inputs), (message.outputs, node.outputs)):
        # text in a trace may contain surrogates, which UTF-8 cannot encode
        target.values, target.shapes, target.types = (
            str(column).encode(errors="replace").decode() for column in (port.values, port.shapes, port.types)
        )
    numbers = {"rf_id": node.number, "fw_parent": 0, "seq_id": -1, "scope": node.scope, "tid": node.thread, "fw_tid": 0}
    _add_attributes(message, "int64_val", numbers)
    _add_attributes(message, "string_val", {"op_schema": node.schema})
    _add_attributes(message, "bool_val", {"is_cpu_op": node.stream is None})
    if node.stream is not None:
        _add_attributes(message, "int64_val", {"stream": node.stream})
    ports = {"input_strides": node.inputs, "output_strides": node.outputs}
    strides = {name: str(port.strides) for name, port in ports.items() if port.strides}
    _add_attributes(message, "string_val", {"tensor_range": node.ranges, **strides} if node.ranges else strides)
    if is_timed:
        _add_attributes(message, "double_val", {"start_us": node.start_us, "exclusive_us": node.own_us})
    return message


def _add_attributes(message: Any, field: str, values: dict[str, Any]) -> None:
    for name, value in values.items():
        message.attr.add(name=name, **{field: value})


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
formats.register(JSON_NAME)(
    Format(
        "Chakra execution traces as JSON, and workload graphs of Chakra's simulators",
        _recognizes_json,
        _read_json,
        defaults=(NO_VALUES, NO_GRADIENTS),
    )
)
