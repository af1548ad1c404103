"""Readers and writers of PyTorch execution traces, which are JSON of torch's `ExecutionTraceObserver` in the schemas
1.0.1 to 1.1.1, and of Chakra's: length-prefixed protobuf messages, the first with facts about the file, then one per
node, or the same as JSON.

Source: Chakra's `et_def.proto`; `SCHEMA` holds the part that is read and written here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import IO, Any

from opgrip.cli.output_files import Damage
from opgrip.errors import FormatError
from opgrip.traces.analysis.dataflow import make_graph
from opgrip.traces.formats.building import NO_GRADIENTS, NO_VALUES, RecordBuilder
from opgrip.traces.formats.execution_trace.calls import calls_of
from opgrip.traces.formats.execution_trace.nodes import FUNCTION_SCOPE, ROOT, ROOTS, Node, Port
from opgrip.traces.formats.execution_trace.writing import NodeWriter
from opgrip.traces.formats.operator_inputs import parse_literals
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
from opgrip.traces.io.json_stream import CutText, Repair, TooLong, members, values
from opgrip.traces.schema.records import Record
from opgrip.traces.table.trace import Trace

TORCH, CHAKRA, CHAKRA_JSON = "execution_trace", "chakra", "chakra_json"
# schema version of written files: the newest that et_replay and Chakra's converter read, and the one that torch 2.13
# writes
SCHEMA_VERSION = "1.1.1-chakra.0.0.4"
LATEST_NUMBER = 1 << 53  # maximum number of a node
LATEST_US = 1e15  # maximum time in us, 30 years


class _NodesRead:
    def __init__(self, file: ForeignFile, form_of: Callable[[Any], Any] = lambda form: form) -> None:
        self._file = file
        self._form_of = form_of
        self._losses: Losses | None = None
        self._reasons: list[str] = []
        self._count = 0

    @contextmanager
    def reading(self, cuts: list[str] | None = None) -> Iterator[None]:
        # nodes are read twice, but their losses are reported once
        self._losses = self._file.losses if self._losses is None else Losses()
        self._reasons.clear()
        self._count = 0
        try:
            yield
        except TooLong:
            raise self._file.refusal("a node is longer than 16 MB") from None
        except FormatError as error:
            if cuts is None or not (self._count or isinstance(error, CutText)):
                raise self._file.damage(str(error) or "it is cut") from error
            cuts.append(f"it is cut after node {self._count}")
        if self._count and len(self._reasons) == self._count:
            raise self._file.damage(self._reasons[0])

    def read(self, item: Any) -> Node | None:
        try:
            node = node_of(self._form_of(item))
        except FormatError as error:
            self.skip(str(error))
            return None
        self._count += 1
        if node.fault:
            self._reasons.append(node.fault)
        return node

    def skip(self, reason: str, count: int = 1) -> None:
        assert self._losses is not None, "reading has begun"
        self._count += count
        self._reasons += [reason] * count
        self._losses.skip("?", reason, count)


def node_of(form: Any) -> Node:
    """Return the node for its JSON form; columns of inputs and outputs may be lists, or text as Python writes lists."""
    if not isinstance(form, dict):
        raise FormatError(f"a node is not a JSON object: {str(form)[:60]}")
    attributes = _attributes(form)
    number, parent = _node_number(form.get("id")), _node_number(form.get("ctrl_deps", form.get("parent")))
    name, schema = _text(form.get("name")), _text(attributes.get("op_schema", ""))
    try:
        return Node(number, name, parent, schema=schema, **_contents(form, attributes))
    except FormatError as error:
        return Node(number, name, parent, schema=schema, fault=str(error))


def _contents(form: Mapping[str, Any], attributes: Mapping[str, Any]) -> dict[str, Any]:
    stream, record = form.get("stream"), attributes.get("rf_id")
    is_kernel = isinstance(form.get("cat"), str)
    return {
        "inputs": _port(form, "input"),
        "outputs": _port(form, "output"),
        "scope": _node_number(attributes.get("scope", 0)),
        "thread": _node_number(attributes.get("tid", 0)),
        "backend": _text(attributes.get("kernel_backend", "")),
        "record": record if _is_node_number(record) else 0,
        "start_us": _time_us(form.get("ts")),
        "own_us": _time_us(form.get("exclusive_dur")),
        "ranges": _text(attributes.get("tensor_range", "")),
        "stream": (stream if _is_node_number(stream) else 0) if is_kernel else None,
    }


def _attributes(form: Mapping[str, Any]) -> Mapping[str, Any]:
    attributes = form.get("attrs")
    if attributes is None:
        return form
    if not isinstance(attributes, list):
        raise FormatError(f"the attributes of a node are not a list: {str(attributes)[:60]}")
    named: dict[str, Any] = {}
    for item in attributes:
        if not isinstance(item, dict) or not isinstance(item.get("name"), str):
            raise FormatError(f"an attribute of a node has no name: {str(item)[:60]}")
        named[item["name"]] = item.get("value")
    return named


def _port(form: Mapping[str, Any], name: str) -> Port:
    port = form.get(f"{name}s")
    if isinstance(port, dict):
        columns = [port.get(key, []) for key in ("values", "shapes", "types")]
        strides = port.get("strides")
    else:
        columns = [port if port is not None else [], form.get(f"{name}_shapes", []), form.get(f"{name}_types", [])]
        strides = form.get(f"{name}_strides")
    values, shapes, types, strides = (
        parse_list(item) if isinstance(item, str) else item for item in (*columns, strides)
    )
    if not all(isinstance(column, list) for column in (values, shapes, types)) or not isinstance(strides, list | None):
        raise FormatError(f"the values, shapes, types or strides of a node's {name}s are not lists")
    if not len(values) == len(shapes) == len(types) or (strides is not None and len(strides) != len(values)):
        raise FormatError(f"a node's {name}s have {len(values)} values, {len(shapes)} shapes and {len(types)} types")
    return Port(values, shapes, types, strides)


MOST_TEXT = 1 << 20  # maximum number of characters in the text of a list; parsing may take half a KB of memory for each


def parse_list(text: str) -> list[Any]:
    if len(text) > MOST_TEXT:
        raise FormatError(f"the text of a list has more than {MOST_TEXT:,} characters")
    try:
        value = parse_literals(text.strip() or "[]")
        if not isinstance(value, list | tuple):
            raise ValueError("it is not a list")
    except ValueError as error:
        raise FormatError(f"expected a list as Python writes it, got {text[:60]!r}") from error
    return [_with_lists(item) for item in value]


def _with_lists(value: Any) -> Any:
    return [_with_lists(item) for item in value] if isinstance(value, list | tuple) else value


def _is_node_number(value: Any) -> bool:
    return type(value) is int and 0 <= value < LATEST_NUMBER


def _node_number(value: Any) -> int:
    if not _is_node_number(value):
        raise FormatError(f"expected the number of a node, got {str(value)[:60]}")
    return int(value)


def _time_us(value: Any) -> float | None:
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 <= value < LATEST_US:
        raise FormatError(f"expected a time in us, got {str(value)[:60]}")
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise FormatError(f"expected a string, got {str(value)[:60]}")
    return value


def _facts(name: str, value: Any) -> dict[str, Any]:
    match name, value:
        case "schema", str():
            return {"schema": value[:100]}
        case "pid", int() if 0 <= value < LATEST_NUMBER:
            return {"pid": value}
        case "time", str() if re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", value):
            return {"time": value.replace(" ", "T")}
    return {}


def _written_attributes(node: Node) -> dict[str, int | str]:
    numbers = {"rf_id": node.number, "fw_parent": 0, "seq_id": -1, "scope": node.scope, "tid": node.thread, "fw_tid": 0}
    return {**numbers, "op_schema": node.schema}


START = re.compile(rb'\s*\{(?=[^{\[]{0,400}"schema"\s*:\s*"\d+\.\d+\.\d+)(?=[^{\[]{0,400}"(?:pid|nodes|time)"\s*:)')


def read_torch(file: ForeignFile) -> Iterator[Record]:
    facts: dict[str, Any] = {}
    cuts: list[str] = []
    counted = _NodesRead(file)
    repair = Repair("id", lambda reason, count: counted.skip(f"a node is not JSON: {reason}", count))

    def nodes() -> Iterator[Node]:
        with counted.reading(cuts):
            for name, value in members(file.chunks(cuts), "nodes", file.unbounded, repair=repair):
                if name != "nodes":
                    facts.update(_facts(name, value))
                elif (node := counted.read(value)) is not None:
                    yield node

    yield from calls_of(TORCH, facts, nodes, file.losses)
    if cuts:
        raise Damage(cuts[0])


def write_torch(trace: Trace, file: IO[bytes], losses: Losses) -> None:
    pid, time = trace.header.get("pid"), trace.header.get("time")
    head = {
        "schema": SCHEMA_VERSION,
        "pid": pid if isinstance(pid, int) else 0,
        "time": str(time or "")[:19].replace("T", " "),
        "start_ts": 0,
    }
    file.write(f'{json.dumps(head)[:-1]}, "nodes": [\n'.encode())
    separator = b""
    for node, _ in NodeWriter(trace, losses).steps():
        file.write(separator + json.dumps(_node_to_json(node)).encode())
        separator = b",\n"
    ends = trace.calls["start_ns"] + trace.calls["duration_ns"]
    # in ms, as torch counts
    finish = (int(ends.max()) - int(trace.calls["start_ns"].min())) // 1_000_000 if len(ends) else 0
    file.write(f'\n], "finish_ts": {finish}}}\n'.encode())


def _node_to_json(node: Node) -> dict[str, Any]:
    attributes = {**_written_attributes(node), "kernel_backend": node.backend, "kernel_file": ""}
    attributes["tensor_range"] = node.ranges
    kinds = {name: "uint64" if isinstance(value, int) else "string" for name, value in attributes.items()}
    kinds["seq_id"] = "int64"
    form: dict[str, Any] = {
        "id": node.number,
        "name": node.name,
        "ctrl_deps": node.parent,
        "inputs": _port_to_json(node.inputs),
        "outputs": _port_to_json(node.outputs),
        "attrs": [{"name": name, "type": kinds[name], "value": value} for name, value in attributes.items()],
    }
    if node.start_us is not None and node.own_us is not None:
        form |= {"ts": node.start_us, "inclusive_dur": node.own_us, "exclusive_dur": node.own_us}
    if node.stream is not None:
        form |= {"cat": "kernel", "stream": node.stream}
    return form


def _port_to_json(port: Port) -> dict[str, Any]:
    return {"values": port.values, "shapes": port.shapes, "types": port.types, "strides": port.strides or []}


GRAPH = "workload_graph"
JSON_START = re.compile(rb'\s*\{\s*(?:\}|"(?:attr|version|workload_graph)"\s*:)')
# pattern of the JSON name of an attribute's value
JSON_VALUE = re.compile(rb'"(?:string|u?int64|u?int32|bool|double)_?[vV]al"\s*:')
VALUE_KINDS = (
    *("double", "float", "int32", "int64", "uint32", "uint64", "sint32", "sint64"),
    *("fixed32", "fixed64", "sfixed32", "sfixed64", "bool", "string"),
)
SCHEMA: dict[str, dict[str, tuple[int, str]]] = {
    # a value has one of these fields; the even numbers are those of lists
    "AttributeProto": {
        "name": (1, "string"),
        **{f"{kind}_val": (3 + 2 * index, f"{kind}?") for index, kind in enumerate(VALUE_KINDS)},
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
# attributes of a node that are read, by their types; those of other types are treated as missing
ATTRIBUTES = {
    **dict.fromkeys(("op_schema", "tensor_range", "input_strides", "output_strides"), str),
    **dict.fromkeys(("scope", "tid", "rf_id", "stream"), int),
}
METADATA, COMPUTE = 1, 4  # Chakra's codes for types of nodes
PART = re.compile(r"(\w+::\w+)\(\d{1,9}\)")  # pattern of the name of one part of an operator, such as `aten::copy_(1)`


@cache
def message_classes() -> dict[str, Any]:
    return make_message_classes("ChakraProtoMsg", "chakra", SCHEMA)


def _recognizes_messages(head: Head) -> bool:
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


def _read_messages(
    name: str, file: ForeignFile, messages: Callable[[], Iterable[Any]], parse: Callable[[type, Any], Any]
) -> Iterator[Record]:
    facts: dict[str, Any] = {}
    classes = message_classes()
    counted = _NodesRead(file, lambda message: _form_of(parse(classes["Node"], message)))

    def nodes() -> Iterator[Node]:
        first_parts: dict[tuple[int, str], int] = {}
        with counted.reading():
            for index, message in enumerate(messages()):
                if not index:
                    facts.update(_facts_of(parse(classes["GlobalMetadata"], message)))
                elif (node := counted.read(message)) is not None:
                    yield _with_parts_inside(node, first_parts)

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
    return _read_messages(CHAKRA_JSON, file, lambda: values(file.chunks(), file.unbounded), message_from_json)


def _records_of_graph(file: ForeignFile) -> Iterator[Record]:
    with _NodesRead(file).reading():
        for name, form in members(file.chunks(), GRAPH, file.unbounded):
            if name == GRAPH and isinstance(form, dict) and form.get("is_cpu_op"):
                op = str(form.get("Name"))[:200]
                part = PART.fullmatch(op)
                op = part[1] if part else op
                # an operator is split around its kernels
                if OPERATOR_NAME.fullmatch(op) and (part is None or part[0].endswith("(0)")):
                    file.losses.skip(op.replace("::", "."), "the file does not have the arguments of the call")
    yield from RecordBuilder(CHAKRA_JSON, file.losses).end()


def _facts_of(metadata: Any) -> dict[str, Any]:
    values = _values_of(metadata)
    schema = values.get("schema") or metadata.version
    return (_facts("schema", schema) if schema else {}) | _facts("pid", values.get("pid"))


def _values_of(message: Any) -> dict[str, Any]:
    fields = ((item, item.WhichOneof("value")) for item in message.attr)
    return {item.name: getattr(item, field) for item, field in fields if field is not None}


def _with_parts_inside(node: Node, first_parts: dict[tuple[int, str], int]) -> Node:
    match = PART.fullmatch(node.name)
    if match is None or not node.record:
        return node
    first = first_parts.setdefault((node.record, match[1]), node.number)
    if first == node.number:
        return replace(node, name=match[1])
    return replace(node, name=match[1], parent=first, schema="", scope=FUNCTION_SCOPE)


def _form_of(message: Any) -> dict[str, Any]:
    every = _values_of(message)
    attributes = {name: every[name] for name, kind in ATTRIBUTES.items() if _is_read(every.get(name), kind)}
    exact = every.get("exclusive_us")
    ports = {"input": message.inputs, "output": message.outputs}
    return {
        **attributes,
        **{f"{name}s": port.values for name, port in ports.items()},
        **{f"{name}_shapes": port.shapes for name, port in ports.items()},
        **{f"{name}_types": port.types for name, port in ports.items()},
        "id": message.id,
        "name": message.name,
        "ctrl_deps": message.ctrl_deps[0] if message.ctrl_deps else 0,
        "ts": every.get("start_us", message.start_time_micros or None),
        "exclusive_dur": exact if isinstance(exact, float) else message.duration_micros or None,
        "cat": None if every.get("is_cpu_op", True) else "kernel",
    }


def _is_read(value: Any, kind: type) -> bool:
    return type(value) is kind and (kind is str or _is_node_number(value))


def write_chakra(trace: Trace, file: IO[bytes], losses: Losses) -> None:
    classes = message_classes()
    header = trace.header
    pid = header.get("pid")
    metadata = classes["GlobalMetadata"]()
    _add_attributes(metadata, {"schema": SCHEMA_VERSION, "time": str(header.get("time") or "")})
    numbers = {"pid": pid if isinstance(pid, int) else 0, "start_ts": 0, "finish_ts": 0}
    _add_attributes(metadata, {name: number % (1 << 64) for name, number in numbers.items()}, "uint64_val")
    file.write(with_length(metadata.SerializeToString()))
    graph = make_graph(trace)
    node_of_call: dict[int, int] = {}
    last_of_thread: dict[int, int] = {}
    for node, call in NodeWriter(trace, losses).steps():
        before = last_of_thread.get(node.thread)
        entry = None if call is None else graph.steps.get(call)
        # the calls that created or last wrote the memory of the call's arguments
        after = {node_of_call[number] for number in (entry.after if entry else ()) if number in node_of_call}
        if node.stream is not None:
            after = {node.parent}
        elif before is not None:
            after.add(before)
        file.write(with_length(_message_of(node, sorted(after), classes["Node"]).SerializeToString()))
        if node.stream is None and node.number != ROOT:
            last_of_thread[node.thread] = node.number
        if call is not None:
            node_of_call[call] = node.number


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
    attributes: dict[str, Any] = {**_written_attributes(node), "is_cpu_op": node.stream is None, "stream": node.stream}
    attributes["tensor_range"] = node.ranges or None
    for name, target, port in (("input", message.inputs, node.inputs), ("output", message.outputs, node.outputs)):
        # text in a trace may contain surrogates, which UTF-8 cannot encode
        target.values, target.shapes, target.types = (
            str(column).encode(errors="replace").decode() for column in (port.values, port.shapes, port.types)
        )
        attributes[f"{name}_strides"] = str(port.strides) if port.strides else None
    if is_timed:
        attributes |= {"start_us": node.start_us, "exclusive_us": node.own_us}
    _add_attributes(message, attributes)
    return message


def _add_attributes(message: Any, values: Mapping[str, Any], integers: str = "int64_val") -> None:
    fields = {bool: "bool_val", int: integers, float: "double_val", str: "string_val"}
    for name, value in values.items():
        if value is not None:
            message.attr.add(name=name, **{fields[type(value)]: value})


formats.register(TORCH)(
    Format(
        "PyTorch execution traces: JSON of torch's ExecutionTraceObserver",
        lambda head: START.match(head.start) is not None,
        read_torch,
        write_torch,
        suffixes=(".et.json", "_et.json"),
        defaults=(NO_VALUES, NO_GRADIENTS),
    )
)
formats.register(CHAKRA)(
    Format(
        "Chakra execution traces: protocol buffers of nodes and their dependencies",
        _recognizes_messages,
        lambda file: _read_messages(CHAKRA, file, lambda: split_messages(file.chunks()), parse_message),
        write_chakra,
        suffixes=(".et", ".chakra"),
        defaults=(NO_VALUES, NO_GRADIENTS),
    )
)
formats.register(CHAKRA_JSON)(
    Format(
        "Chakra execution traces as JSON, and workload graphs of Chakra's simulators",
        _recognizes_json,
        _read_json,
        defaults=(NO_VALUES, NO_GRADIENTS),
    )
)
