"""Nodes as Chakra's messages, with the field numbers of its schema `et_def.proto`, and lists in Python's notation."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable, Mapping
from typing import Any

from opgrip.errors import FormatError
from opgrip.traces.formats.nodes.node import LATEST_NUMBER, LATEST_US, NO_PORT, ROOTS, Node, Port
from opgrip.traces.formats.nodes.wire import (
    BYTES,
    bytes_field,
    double,
    double_field,
    fields,
    number_field,
    read_varint,
    signed,
    single,
    unzigzag,
)

MOST_TEXT = 1 << 20
"""Characters of a list, of which each may cost half a KB of memory to parse."""


def parse_list(text: str) -> list[Any]:
    """The list that a text stands for; empty for an empty text.

    Raises
    ------
    FormatError : for a text that is no list of numbers, texts, booleans and such lists
    """
    if not text:
        return []
    if len(text) > MOST_TEXT:
        raise FormatError("values that are too long")
    try:
        value = _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise FormatError("values that cannot be read") from error
    if not isinstance(value, list):
        raise FormatError("values that are no list")
    return value


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str() as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return list(map(_value, items))
        case ast.Name(id="inf" | "nan" as name):
            return float(name)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Name(id="inf")):
            return float("-inf")
    raise FormatError("values that cannot be read")


SCHEMA = "1.1.1-chakra.0.0.4"
METADATA, COMPUTE = 1, 4
"""Types of nodes."""
ID, NODE_NAME, TYPE, CONTROL, DATA, START, DURATION, INPUTS, OUTPUTS, ATTRIBUTE = range(1, 11)
"""Fields of a node."""
DOUBLE, FLOAT, INT32, INT64, UINT32, UINT64, SINT32, SINT64 = 3, 5, 7, 9, 11, 13, 15, 17
BOOLEAN, TEXT = 27, 29
"""Fields of an attribute, each of which holds a value of its kind."""
INTEGERS = frozenset({INT32, INT64, UINT32, UINT64, 19, 21, 23, 25})


def is_metadata(message: bytes) -> bool:
    """Whether a message is a file's first: a version, and attributes whose names are words."""
    try:
        parts = list(fields(message))
        names = [_text_of(value) for number, _, value in parts if number == 1]
        attributes = [_attribute(value) for number, _, value in parts if number == 2]
    except FormatError:
        return False
    plain = all(name.isprintable() for name in names) and all(name.isidentifier() for name, _ in attributes)
    return plain and bool(parts) and all(number in (1, 2) and kind == BYTES for number, kind, _ in parts)


def metadata_facts(message: bytes) -> dict[str, Any]:
    """What a file's first message says, as a trace's header has it."""
    values = dict(_attribute(value) for number, _, value in fields(message) if number == 2)
    versions = [_text_of(value) for number, _, value in fields(message) if number == 1]
    facts: dict[str, Any] = {"schema": versions[0][:100]} if versions else {}
    if isinstance(values.get("schema"), str):
        facts["schema"] = values["schema"][:100]
    pid = values.get("pid")
    return {**facts, "pid": pid} if type(pid) is int and 0 <= pid < LATEST_NUMBER else facts


def metadata(pid: int, time: str) -> bytes:
    """A file's first message."""
    attributes = {"schema": SCHEMA, "time": time}
    texts = [bytes_field(2, _named(name, bytes_field(TEXT, value))) for name, value in attributes.items()]
    numbers = [
        bytes_field(2, _named(name, number_field(UINT64, value)))
        for name, value in {"pid": pid, "start_ts": 0, "finish_ts": 0}.items()
    ]
    return b"".join([*texts, *numbers])


def node_from_message(message: bytes) -> Node:
    """The node of a message.

    Raises
    ------
    FormatError : for one that is none
    """
    numbers: dict[int, int] = {}
    texts: dict[int, bytes] = {}
    attributes: dict[str, Any] = {}
    parents: list[int] = []
    for field, kind, value in fields(message):
        if field == CONTROL:
            parents += _numbers(value)
        elif field == ATTRIBUTE:
            name, item = _attribute(value)
            attributes[name] = item
        elif isinstance(value, int):
            numbers[field] = value
        elif kind == BYTES:
            texts[field] = value
    number = _bounded(numbers.get(ID, 0))
    is_host = attributes.get("is_cpu_op", True)
    start, own = numbers.get(START, 0), numbers.get(DURATION, 0)
    exact = attributes.get("exclusive_us")
    return Node(
        number=number,
        name=_text_of(texts.get(NODE_NAME, b"")),
        parent=_bounded(parents[0]) if parents else 0,
        inputs=_port(texts.get(INPUTS, b""), attributes.get("input_strides")),
        outputs=_port(texts.get(OUTPUTS, b""), attributes.get("output_strides")),
        schema=_text_attribute(attributes, "op_schema"),
        scope=_number_attribute(attributes, "scope"),
        thread=_number_attribute(attributes, "tid"),
        record=_number_attribute(attributes, "rf_id"),
        start_us=_time(attributes.get("start_us", start or None)),
        own_us=_time(exact if isinstance(exact, float) else own or None),
        ranges=_text_attribute(attributes, "tensor_range"),
        stream=None if is_host else _number_attribute(attributes, "stream"),
    )


def node_message(node: Node, after: Iterable[int]) -> bytes:
    """The message of a node.

    Parameters
    ----------
    after : numbers of the nodes that come before it
    """
    kind = METADATA if node.name in ROOTS else COMPUTE
    parts = [number_field(ID, node.number), bytes_field(NODE_NAME, node.name), number_field(TYPE, kind)]
    if node.parent != node.number:
        parts.append(number_field(CONTROL, node.parent))
    parts += [number_field(DATA, number) for number in after]
    if node.start_us is not None and node.own_us is not None:
        # whole microseconds, and what they leave
        parts += [number_field(START, round(node.start_us)), number_field(DURATION, round(node.own_us))]
    parts += [bytes_field(INPUTS, _port_message(node.inputs)), bytes_field(OUTPUTS, _port_message(node.outputs))]
    return b"".join([*parts, *(bytes_field(ATTRIBUTE, item) for item in _attribute_messages(node))])


def _attribute_messages(node: Node) -> Iterable[bytes]:
    numbers = {"rf_id": node.number, "fw_parent": 0, "seq_id": -1, "scope": node.scope, "tid": node.thread, "fw_tid": 0}
    for name, value in numbers.items():
        yield _named(name, number_field(INT64, value))
    yield _named("op_schema", bytes_field(TEXT, node.schema))
    yield _named("is_cpu_op", number_field(BOOLEAN, node.stream is None))
    if node.stream is not None:
        yield _named("stream", number_field(INT64, node.stream))
    texts = {"tensor_range": node.ranges}
    for name, port in (("input_strides", node.inputs), ("output_strides", node.outputs)):
        if port.strides:
            texts[name] = str(port.strides)
    for name, text in texts.items():
        if text:
            yield _named(name, bytes_field(TEXT, text))
    if node.start_us is not None and node.own_us is not None:
        yield _named("start_us", double_field(DOUBLE, node.start_us))
        yield _named("exclusive_us", double_field(DOUBLE, node.own_us))


def _named(name: str, value: bytes) -> bytes:
    return bytes_field(1, name) + value


def _port_message(port: Port) -> bytes:
    columns = enumerate((port.values, port.shapes, port.types), 1)
    return b"".join(bytes_field(number, str(column)) for number, column in columns)


def _port(message: bytes, strides: Any) -> Port:
    columns = {1: "", 2: "", 3: ""}
    for number, _, value in fields(message):
        if number in columns:
            columns[number] = _text_of(value)
    values, shapes, types = (parse_list(text) for text in columns.values())
    if not len(values) == len(shapes) == len(types):
        raise FormatError("values, shapes and types that differ in number")
    steps = parse_list(strides) if isinstance(strides, str) else None
    if steps is not None and len(steps) != len(values):
        raise FormatError("strides that are not those of the values")
    return Port(values, shapes, types, steps) if values else NO_PORT


def _attribute(message: int | bytes) -> tuple[str, Any]:
    """Name and value of an attribute; None for a kind that nodes have none of."""
    if not isinstance(message, bytes):
        raise FormatError("an attribute that is no message")
    name, found = "", None
    for number, _, value in fields(message):
        if number == 1:
            name = _text_of(value)
        elif number == TEXT:
            found = _text_of(value)
        elif isinstance(value, int):
            found = _scalar(number, value)
    return name, found


def _scalar(number: int, value: int) -> Any:
    if number == BOOLEAN:
        return bool(value)
    if number == DOUBLE:
        return double(value)
    if number == FLOAT:
        return single(value % (1 << 32))
    if number in (SINT32, SINT64):
        return unzigzag(value)
    if number in (UINT64, UINT32):
        return value
    return signed(value) if number in INTEGERS else None


def _numbers(value: int | bytes) -> list[int]:
    """Whole numbers of a field that repeats: one, or several packed."""
    if isinstance(value, int):
        return [value]
    numbers, place = [], 0
    while place < len(value):
        number, place = read_varint(value, place)
        numbers.append(number)
    return numbers


def _text_of(value: int | bytes) -> str:
    if not isinstance(value, bytes):
        raise FormatError("a text that is a number")
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise FormatError("a text that is no UTF-8") from error


def _text_attribute(attributes: Mapping[str, Any], name: str) -> str:
    value = attributes.get(name)
    return value if isinstance(value, str) else ""


def _number_attribute(attributes: Mapping[str, Any], name: str) -> int:
    value = attributes.get(name)
    return value if type(value) is int and 0 <= value < LATEST_NUMBER else 0


def _bounded(number: int) -> int:
    if number >= LATEST_NUMBER:
        raise FormatError(f"{number} is no number of a node")
    return number


def _time(value: Any) -> float | None:
    if value is None:
        return None
    if not isinstance(value, int | float) or not math.isfinite(value) or not 0 <= value < LATEST_US:
        raise FormatError(f"{str(value)[:60]} is no time")
    return float(value)
