"""What of a profiler's events tells of operators, in a few bytes an event: a step's file may hold millions."""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from opgrip.traces.formats.profiler_arguments import Inputs

OPERATOR, MODULE, FRAME, RANGE = "operator", "module", "frame", "range"
"""Kinds of slices: a call of the dispatcher or what is around it, a module's call, a Python function, a named range."""
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
INPUTS = ("Input type", "Input Dims", "Input Strides", "Concrete Inputs")
MODULE_PREFIX = "nn.Module: "
MOST_TIME_NS = 1 << 62


@dataclass(frozen=True, slots=True, eq=False)
class Slice:
    """What events that differ in their times alone tell; there is one for all of them.

    Attributes
    ----------
    inputs : None where the event has no shapes
    """

    kind: str
    name: str
    inputs: Inputs | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """A slice with its time.

    Attributes
    ----------
    start_ns, end_ns : since the first event
    external : the number that kernels refer to it by, -1 for none
    sequence : the number that a backward pass refers to a forward call by, -1 for none
    """

    slice: Slice
    start_ns: int
    end_ns: int
    external: int
    sequence: int


@dataclass(slots=True)
class DeviceWork:
    """What an operator ran on an accelerator: how often each kernel, and how long."""

    launches: Counter[str]
    device_ns: Counter[str]

    def add(self, other: DeviceWork) -> None:
        """Add what another operator ran."""
        self.launches.update(other.launches)
        self.device_ns.update(other.device_ns)


class EventTable:
    """Takes events one after the other, and gives those of each thread in the order in which they began."""

    def __init__(self) -> None:
        self.work: dict[int, DeviceWork] = {}
        self.devices: Counter[int] = Counter()
        self.operators = self.shapes = 0
        """Events of operators, and how many of them have shapes."""
        self._slices: dict[str, int] = {}
        self._described: list[Slice] = []
        self._threads: dict[tuple[str, str], int] = {}
        self._thread_names: dict[tuple[str, str], str] = {}
        self._columns = {name: array("q") for name in ("thread", "slice", "start", "duration", "external", "sequence")}

    def __len__(self) -> int:
        return len(self._columns["thread"])

    def add(self, event: Any) -> None:
        """Take an event; those that tell nothing of operators are passed over.

        Raises
        ------
        ValueError : where it cannot be read
        """
        if not isinstance(event, dict):
            raise ValueError("an event that cannot be read")
        kind, facts = event.get("cat"), event.get("args")
        facts = facts if isinstance(facts, dict) else {}
        if event.get("ph") == "M" and event.get("name") == "thread_name":
            self._thread_names[_thread(event)] = str(facts.get("name", ""))[:200]
        if event.get("ph") != "X":
            return
        name = event.get("name")
        if not isinstance(name, str) or not isinstance(kind, str):
            return
        if kind.lower() in ON_DEVICE:
            self._add_work(event, name, facts)
        elif kind == "cpu_op" or kind == "Operator":
            self.operators += "::" in name
            self._add(event, OPERATOR, name, facts)
        elif kind == "user_annotation":
            self._add(event, RANGE, name, facts)
        elif kind == "python_function":
            is_module = name.startswith(MODULE_PREFIX)
            self._add(event, MODULE if is_module else FRAME, name.removeprefix(MODULE_PREFIX), facts)

    def threads(self) -> Iterator[tuple[str, Iterator[Event]]]:
        """Each thread's name, and its events, those around others first; the thread that began first is the first."""
        columns = {name: np.frombuffer(column, dtype=np.int64) for name, column in self._columns.items()}
        order = np.lexsort((columns["external"], -columns["duration"], columns["start"], columns["thread"]))
        first_ns = int(columns["start"].min()) if len(order) else 0
        bounds = np.flatnonzero(np.diff(columns["thread"][order], prepend=-1, append=-1))
        pieces = [order[begin:end] for begin, end in pairwise(bounds)]
        names = {number: self._name_of(key) for key, number in self._threads.items()}
        for piece in sorted(pieces, key=lambda piece: int(columns["start"][piece[0]])):
            yield names[int(columns["thread"][piece[0]])], self._events(columns, piece, first_ns)

    def _events(self, columns: dict[str, Any], places: Any, first_ns: int) -> Iterator[Event]:
        for place in places.tolist():
            start_ns = int(columns["start"][place]) - first_ns
            yield Event(
                self._described[columns["slice"][place]],
                start_ns,
                start_ns + int(columns["duration"][place]),
                int(columns["external"][place]),
                int(columns["sequence"][place]),
            )

    def _name_of(self, thread: tuple[str, str]) -> str:
        name = self._thread_names.get(thread, "")
        processes = {process for process, _ in self._threads}
        plain = name or f"thread {thread[1]}"
        return plain if len(processes) == 1 else f"{plain} of {thread[0]}"

    def _add(self, event: dict[str, Any], kind: str, name: str, facts: dict[str, Any]) -> None:
        fields = [facts.get(field) for field in INPUTS] if kind == OPERATOR and "Input type" in facts else None
        key = json.dumps([kind, name, fields])
        number = self._slices.get(key)
        if number is None:
            inputs = None if fields is None else _inputs(fields, facts.get("Input dims"))
            self._described.append(Slice(kind, name[:1000], inputs))
            number = self._slices[key] = len(self._slices)
        self.shapes += fields is not None
        columns = self._columns
        # first what may be refused: all columns are of one length
        start, duration = _ns(event.get("ts")), _ns(event.get("dur"))
        columns["start"].append(start)
        columns["duration"].append(duration)
        columns["slice"].append(number)
        columns["thread"].append(self._threads.setdefault(_thread(event), len(self._threads)))
        columns["external"].append(_number(facts.get("External id")))
        columns["sequence"].append(_number(facts.get("Sequence number")))

    def _add_work(self, event: dict[str, Any], name: str, facts: dict[str, Any]) -> None:
        external = _number(facts.get("External id", facts.get("external id")))
        self.devices[max(_number(facts.get("device")), 0)] += 1
        work = self.work.setdefault(external, DeviceWork(Counter(), Counter()))
        work.launches[name[:1000]] += 1
        work.device_ns[name[:1000]] += _ns(event.get("dur"))


def _inputs(fields: list[Any], old_shapes: Any) -> Inputs:
    """What an event says of a call's arguments; older profilers have fewer fields, and one by another name."""
    types, shapes, strides, texts = fields
    shapes = old_shapes if shapes is None else shapes
    count = len(types) if isinstance(types, list) else 0
    lists = (types, shapes, [None] * count if strides is None else strides, [""] * count if texts is None else texts)
    if not all(isinstance(item, list) and len(item) == count for item in lists):
        raise ValueError("an event whose inputs cannot be read")
    return Inputs(*lists)


def _thread(event: dict[str, Any]) -> tuple[str, str]:
    return str(event.get("pid"))[:100], str(event.get("tid"))[:100]


def _ns(microseconds: Any) -> int:
    if not isinstance(microseconds, int | float) or not 0 <= microseconds * 1000 < MOST_TIME_NS:
        raise ValueError("an event whose time cannot be read")
    return round(microseconds * 1000)


def _number(value: Any) -> int:
    """A number that refers to something, -1 for none."""
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 19:
        value = int(value)
    return value if type(value) is int and 0 <= value < MOST_TIME_NS else -1
