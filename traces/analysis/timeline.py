"""Conversion of a trace to events of the Chrome trace format."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import pandas as pd

from opgrip.errors import shortened
from opgrip.traces.schema.arguments import TensorSpec, leaves
from opgrip.traces.schema.records import FUNCTION, Scope
from opgrip.traces.schema.tensor_specs import tensor_outline
from opgrip.traces.table.trace import Trace

OUTSIDE = "(outside)"  # shown for calls outside all modules and functions of the program

_CALLER = re.compile(r"(.*):\d+ (.*)")


@dataclass(frozen=True, slots=True)
class TimelinePlace:
    """Module or function that makes calls.

    name : path of a module, or qualified name of a function
    """

    name: str
    phase: str
    file: str = ""
    around: tuple[str, ...] = ()

    def goes_on(self, other: TimelinePlace) -> bool:
        if (self.name, self.phase, self.file) != (other.name, other.phase, other.file):
            return False
        return all(mine == its for mine, its in zip(self.around, other.around, strict=False))


P = TypeVar("P", bound=Any)  # a call, whose attribute `place` is the `TimelinePlace` that made it, or None


def origins(trace: Trace) -> dict[int, Scope]:
    by_number = {scope.number: scope for scope in trace.scopes}
    return {
        scope.number: scope if scope.forward is None else by_number.get(scope.forward, scope) for scope in trace.scopes
    }


def frames_of(scope: Scope) -> list[tuple[str, str]]:
    frames = [(scope.file, scope.function)]
    return frames + [(match[1], match[2]) for match in map(_CALLER.fullmatch, scope.callers) if match is not None]


def runs_of(calls: Iterable[P]) -> Iterator[tuple[TimelinePlace, list[P]]]:
    run: list[P] = []
    around: TimelinePlace | None = None
    for place, call, begins in in_runs(calls):
        if begins and around is not None:
            yield around, run
            run = []
        around = place
        run.append(call)
    if around is not None:
        yield around, run


def in_runs(calls: Iterable[P]) -> Iterator[tuple[TimelinePlace, P, bool]]:
    place: TimelinePlace | None = None
    for call in calls:
        if place is not None and call.place is not None and place.goes_on(call.place):
            place = max(place, call.place, key=lambda item: len(item.around))
            yield place, call, False
            continue
        place = call.place
        if place is not None:
            yield place, call, True


MODULE, PHASE, CALL, ON_DEVICE = "module", "phase", "operator", "device"  # categories of events
PROCESS = 1  # process number in a trace with one process

DEEPEST, LONGEST = 64, 400  # maximum number of nested modules and of characters in a name, for untrusted files
BATCH = 1 << 15  # number of calls converted at a time

# columns that events show
ROW = [
    *("op", "signature", "module", "phase", "function", "file", "line", "inside"),
    *("start_ns", "duration_ns", "device_ns"),
]

Event = dict[str, Any]


def timeline(trace: Trace) -> Iterator[Event]:
    """Yield the events of a trace; times are in microseconds since the capture began."""
    shapes = {signature.number: _shapes([signature.args, signature.kwargs]) for signature in trace.signatures}
    model = trace.header.get("model")
    program = str(model.get("name", "capture")) if isinstance(model, Mapping) else "capture"
    processes: dict[str, int] = {}
    for key, has_device in _threads(trace.distinct_calls).items():
        name, thread = key
        pid = processes.setdefault(name, PROCESS + len(processes))
        nesting = _Nesting(pid, 0)
        for calls in _calls_of(trace, key):
            if not nesting.tid:
                nesting.tid = int(calls.index[0]) + 1
                yield _name_event("process_name", pid, nesting.tid, name or program)
                yield _name_event("thread_name", pid, nesting.tid, thread)
            yield from _host_track(calls, nesting, shapes)
        yield from nesting.move_to((), 0, 0)
        if has_device:
            parts = _calls_of(trace, key)
            yield from _device_track(parts, pid, trace.call_count + nesting.tid, thread, shapes)


def _threads(calls: pd.DataFrame) -> dict[tuple[str, str], bool]:
    names = _names_of_threads(calls)
    has_device = calls["device_ns"].notna().groupby([names["process"], names["thread"]], sort=False).any()
    keys = [(str(process), str(thread)) for process, thread in has_device.index.tolist()]
    return dict(zip(keys, has_device.tolist(), strict=True))


def _names_of_threads(calls: pd.DataFrame) -> pd.DataFrame:
    names = calls[["process", "thread"]].astype({"process": "object", "thread": "object"})
    return names.fillna({"process": "", "thread": ""}).astype(str)


def _calls_of(trace: Trace, key: tuple[str, str]) -> Iterator[pd.DataFrame]:
    for part, _ in trace.call_parts():
        for first in range(0, len(part), BATCH):
            calls = part.iloc[first : first + BATCH]
            names = _names_of_threads(calls)
            own = calls[(names["process"] == key[0]) & (names["thread"] == key[1])]
            if len(own):
                yield own


def _host_track(calls: pd.DataFrame, nesting: _Nesting, shapes: dict[int, str]) -> Iterator[Event]:
    pid, tid = nesting.pid, nesting.tid
    for row in calls[ROW].to_dict("records"):
        if pd.isna(row["inside"]):
            module = "" if pd.isna(row["module"]) else str(row["module"])
            path = (str(row["phase"]), *(module.split(".", DEEPEST) if module else ()))
            yield from nesting.move_to(path, row["start_ns"], row["start_ns"] + row["duration_ns"])
        yield _slice(str(row["op"]), CALL, row["start_ns"], row["duration_ns"], pid, tid, _facts(row, shapes))


def timeline_lines(trace: Trace) -> Iterator[str]:
    comma = ""
    yield '{"displayTimeUnit": "ns", "traceEvents": [\n'
    for event in timeline(trace):
        yield f"{comma}{json.dumps(event)}"
        comma = ",\n"
    yield "\n]}\n"


def _device_track(
    parts: Iterable[pd.DataFrame], pid: int, tid: int, thread: str, shapes: dict[int, str]
) -> Iterator[Event]:
    # The start of the work on the device is unknown: it is assumed at the start of the call, or at the end of earlier
    # work if that is later. Calls inside an extension function are part of it; a function recorded with `--grip`
    # consists of its calls.
    end_ns: float | None = None
    for calls in parts:
        on_device = calls[calls["device_ns"].notna() & (calls["kind"] != FUNCTION)]
        on_device = on_device[on_device["inside"].isna() | on_device["gripped"]]
        for row in on_device[ROW].to_dict("records"):
            if end_ns is None:
                end_ns = 0.0
                yield _name_event("thread_name", pid, tid, f"device, by {thread} (earliest possible starts)")
            start_ns = max(end_ns, row["start_ns"])
            end_ns = start_ns + row["device_ns"]
            yield _slice(str(row["op"]), ON_DEVICE, start_ns, row["device_ns"], pid, tid, _facts(row, shapes))


class _Nesting:
    def __init__(self, pid: int, tid: int) -> None:
        self.pid, self.tid = pid, tid
        self._stack: list[tuple[str, int]] = []
        self._end_ns = 0

    def move_to(self, path: tuple[str, ...], start_ns: int, end_ns: int) -> Iterator[Event]:
        shared = 0
        while shared < min(len(path), len(self._stack)) and self._stack[shared][0] == path[shared]:
            shared += 1
        while len(self._stack) > shared:
            last, begin_ns = self._stack.pop()
            name = shortened(".".join([*(outer for outer, _ in self._stack[1:]), last]), LONGEST)
            kind = MODULE if self._stack else PHASE
            yield _slice(name, kind, begin_ns, self._end_ns - begin_ns, self.pid, self.tid, {})
        self._stack += [(name, start_ns) for name in path[shared:]]
        self._end_ns = max(self._end_ns, end_ns)


def _facts(row: dict[Any, Any], shapes: dict[int, str]) -> dict[str, Any]:
    facts = {"shapes": shapes.get(row["signature"], ""), "signature": int(row["signature"])}
    if not pd.isna(row["function"]):
        facts["at"] = f"{row['function']}, {row['file']}:{row['line']}"
    if not pd.isna(row["device_ns"]):
        facts |= {"device_us": row["device_ns"] / 1e3, "host_us": row["duration_ns"] / 1e3}
    return facts


def _shapes(arguments: Any) -> str:
    return " ".join(
        tensor_outline(leaf.dtype, leaf.shape) for leaf in leaves(arguments) if isinstance(leaf, TensorSpec)
    )


def _slice(name: str, category: str, start_ns: float, duration_ns: float, pid: int, tid: int, facts: Event) -> Event:
    times = {"ts": int(start_ns) / 1e3, "dur": int(duration_ns) / 1e3}
    return {"name": name, "cat": category, "ph": "X", **times, "pid": pid, "tid": tid, "args": facts}


def _name_event(kind: str, pid: int, tid: int, name: str) -> Event:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
