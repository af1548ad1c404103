"""Reader and writer of PyTorch execution traces: JSON of torch's `ExecutionTraceObserver`, schemas 1.0.1 to 1.1.1."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import IO, Any

from opgrip.cli.output_files import Damage
from opgrip.errors import FormatError
from opgrip.traces.formats.building import NO_GRADIENTS, NO_VALUES
from opgrip.traces.formats.execution_trace.calls import NodesRead, calls_of
from opgrip.traces.formats.execution_trace.nodes import (
    LATEST_NUMBER,
    NO_PORT,
    SCHEMA_VERSION,
    Node,
    Port,
    node_number,
    time_us,
)
from opgrip.traces.formats.execution_trace.writing import steps_of
from opgrip.traces.io.foreign_files import ForeignFile, Format, Head, Losses, formats
from opgrip.traces.io.json_stream import Repair, TooLong, members
from opgrip.traces.schema.records import Record
from opgrip.traces.table.trace import Trace

NAME = "execution_trace"
START = re.compile(rb'\s*\{(?=[^{\[]{0,400}"schema"\s*:\s*"\d+\.\d+\.\d+)(?=[^{\[]{0,400}"(?:pid|nodes|time)"\s*:)')


def recognizes(head: Head) -> bool:
    return START.match(head.start) is not None


def read(file: ForeignFile) -> Iterator[Record]:
    facts: dict[str, Any] = {}
    cuts: list[str] = []
    yield from calls_of(NAME, facts, _nodes_of(file, facts, cuts), file.losses)
    if cuts:
        raise Damage(cuts[0])


def _nodes_of(file: ForeignFile, facts: dict[str, Any], cuts: list[str]) -> Callable[[], Iterable[Node]]:
    counted = NodesRead(file)

    def nodes() -> Iterator[Node]:
        counted.begin()
        repair = Repair("id", lambda reason, count: counted.skip(f"a node is not JSON: {reason}", count))
        try:
            for name, value in members(file.chunks(cuts), "nodes", file.unbounded, repair=repair):
                if name != "nodes":
                    facts.update(_facts(name, value))
                elif (node := counted.read(node_from_json, value)) is not None:
                    yield node
        except TooLong:
            raise file.refusal("a node is longer than 16 MB") from None
        except FormatError as error:
            counted.check(error)
            cuts.append(f"it is cut after node {counted.nodes}")
        counted.check()

    return nodes


def _facts(name: str, value: Any) -> dict[str, Any]:
    match name, value:
        case "schema", str():
            return {"schema": value[:100]}
        case "pid", int() if 0 <= value < 1 << 53:
            return {"pid": value}
        case "time", str() if re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", value):
            return {"time": value.replace(" ", "T")}
    return {}


def write(trace: Trace, file: IO[bytes], losses: Losses) -> None:
    pid, time = trace.header.get("pid"), trace.header.get("time")
    head = {
        "schema": SCHEMA_VERSION,
        "pid": pid if isinstance(pid, int) else 0,
        "time": str(time or "")[:19].replace("T", " "),
        "start_ts": 0,
    }
    file.write(f'{json.dumps(head)[:-1]}, "nodes": [\n'.encode())
    separator = b""
    for step in steps_of(trace, losses):
        file.write(separator + json.dumps(node_to_json(step.node)).encode())
        separator = b",\n"
    ends = trace.calls["start_ns"] + trace.calls["duration_ns"]
    # in ms, as torch counts
    finish = (int(ends.max()) - int(trace.calls["start_ns"].min())) // 1_000_000 if len(ends) else 0
    file.write(f'\n], "finish_ts": {finish}}}\n'.encode())


def node_from_json(form: Any) -> Node:
    if not isinstance(form, dict):
        raise FormatError(f"a node is not a JSON object: {str(form)[:60]}")
    attributes = _attributes(form)
    number, parent = node_number(form.get("id")), node_number(form.get("ctrl_deps", form.get("parent")))
    name, schema = _text(form.get("name")), _text(attributes.get("op_schema", ""))
    try:
        return Node(number, name, parent, schema=schema, **_contents(form, attributes))
    except FormatError as error:
        return Node(number, name, parent, NO_PORT, NO_PORT, schema, fault=str(error))


def _contents(form: Mapping[str, Any], attributes: Mapping[str, Any]) -> dict[str, Any]:
    stream = form.get("stream")
    is_kernel = isinstance(form.get("cat"), str)
    return {
        "inputs": _port(form, "input"),
        "outputs": _port(form, "output"),
        "scope": node_number(attributes.get("scope", 0)),
        "thread": node_number(attributes.get("tid", 0)),
        "backend": _text(attributes.get("kernel_backend", "")),
        "start_us": time_us(form.get("ts")),
        "own_us": time_us(form.get("exclusive_dur")),
        "ranges": _text(attributes.get("tensor_range", "")),
        "stream": (stream if type(stream) is int and 0 <= stream < LATEST_NUMBER else 0) if is_kernel else None,
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
    if not all(isinstance(column, list) for column in columns) or not isinstance(strides, list | None):
        raise FormatError(f"the values, shapes, types or strides of a node's {name}s are not lists")
    values, shapes, types = columns
    if not len(values) == len(shapes) == len(types) or (strides is not None and len(strides) != len(values)):
        raise FormatError(f"a node's {name}s have {len(values)} values, {len(shapes)} shapes and {len(types)} types")
    return Port(values, shapes, types, strides)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise FormatError(f"expected a string, got {str(value)[:60]}")
    return value


def node_to_json(node: Node) -> dict[str, Any]:
    attributes = [
        ("rf_id", "uint64", node.number),
        ("fw_parent", "uint64", 0),
        ("seq_id", "int64", -1),
        ("scope", "uint64", node.scope),
        ("tid", "uint64", node.thread),
        ("fw_tid", "uint64", 0),
        ("op_schema", "string", node.schema),
        ("kernel_backend", "string", node.backend),
        ("kernel_file", "string", ""),
        ("tensor_range", "string", node.ranges),
    ]
    form: dict[str, Any] = {
        "id": node.number,
        "name": node.name,
        "ctrl_deps": node.parent,
        "inputs": _port_to_json(node.inputs),
        "outputs": _port_to_json(node.outputs),
        "attrs": [{"name": name, "type": kind, "value": value} for name, kind, value in attributes],
    }
    if node.start_us is not None and node.own_us is not None:
        form |= {"ts": node.start_us, "inclusive_dur": node.own_us, "exclusive_dur": node.own_us}
    if node.stream is not None:
        form |= {"cat": "kernel", "stream": node.stream}
    return form


def _port_to_json(port: Port) -> dict[str, Any]:
    strides = port.strides if port.strides is not None else []
    return {"values": port.values, "shapes": port.shapes, "types": port.types, "strides": strides}


formats.register(NAME)(
    Format(
        "PyTorch execution traces: JSON of torch's ExecutionTraceObserver",
        recognizes,
        read,
        write,
        suffixes=(".et.json", "_et.json"),
        defaults=(NO_VALUES, NO_GRADIENTS),
    )
)
