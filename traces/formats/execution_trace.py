"""PyTorch execution traces: JSON that torch's `ExecutionTraceObserver` writes, schemas 1.0.1 to 1.1.1.

Each node is an operator, a label around others, or a thread, with all that went in and came out. Chakra's `trace_link`
adds times and kernels of a profile to the same file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any

from opgrip.cli.output_files import Damage
from opgrip.errors import FormatError
from opgrip.traces.formats.building import NO_GRADIENTS, NO_VALUES
from opgrip.traces.formats.json_members import CutText, TooLong, members
from opgrip.traces.formats.nodes.node import SCHEMA_VERSION, Node, node_from_json, node_to_json
from opgrip.traces.formats.nodes.node_calls import calls_of
from opgrip.traces.formats.nodes.program import steps_of
from opgrip.traces.io.foreign_files import ForeignFile, Format, Head, Losses, formats
from opgrip.traces.schema.records import Record
from opgrip.traces.table.trace import Trace

NAME = "execution_trace"
START = re.compile(rb'\s*\{(?=[^{\[]{0,400}"schema"\s*:\s*"\d+\.\d+\.\d+)(?=[^{\[]{0,400}"(?:pid|nodes|time)"\s*:)')


def recognizes(head: Head) -> bool:
    """Whether a file begins with the schema of one, and the process."""
    return START.match(head.start) is not None


def read(file: ForeignFile) -> Iterator[Record]:
    """The calls that a capture would have recorded: operators below autograd, and labels.

    Raises
    ------
    Damage : after the last call of a file that is cut, as the observer leaves it where a program ends badly
    """
    facts: dict[str, Any] = {}
    cuts: list[str] = []
    yield from calls_of(NAME, facts, _nodes_of(file, facts, cuts), file.losses)
    if cuts:
        raise Damage(cuts[0])


def _nodes_of(file: ForeignFile, facts: dict[str, Any], cuts: list[str]) -> Callable[[], Iterable[Node]]:
    def nodes() -> Iterator[Node]:
        count = 0
        try:
            for name, value in members(file.chunks(), "nodes", file.unbounded):
                if name == "nodes":
                    count += 1
                    yield node_from_json(value)
                else:
                    facts.update(_facts(name, value))
        except TooLong:
            raise file.refusal("a node is longer than 16 MB") from None
        except CutText:
            cuts.append(f"it is cut after node {count}")
        except FormatError as error:
            raise file.damage(str(error)) from error

    return nodes


def _facts(name: str, value: Any) -> dict[str, Any]:
    """What a trace's header has of a member."""
    match name, value:
        case "schema", str():
            return {"schema": value[:100]}
        case "pid", int() if 0 <= value < 1 << 53:
            return {"pid": value}
        case "time", str() if re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", value):
            return {"time": value.replace(" ", "T")}
    return {}


def write(trace: Trace, file: IO[bytes], losses: Losses) -> None:
    """The calls of a trace as nodes in the order in which they started, one a line."""
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
