"""Compact table of a profile's events, and selection of the events that a capture would record as calls."""

from __future__ import annotations

import json
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from opgrip.traces.formats.operator_schemas import OPERATOR_NAME, has_composite_kernel, schemas_of
from opgrip.traces.schema.records import Scope

# Kinds of slices: operator call, call of a module, Python function, named range.
OPERATOR, MODULE, FRAME, RANGE = "operator", "module", "frame", "range"
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
OF_RUNTIME = ("cuda_runtime", "cuda_driver", "runtime")
# patterns of runtime functions that launch a graph, begin its capture, end its capture, and launch a kernel or copy
GRAPH_LAUNCH, CAPTURE_BEGIN, CAPTURE_END, LAUNCH = (
    re.compile(rf"(?:cuda|cu|hip){name}")
    for name in (
        r"GraphLaunch\w*",
        r"StreamBeginCapture\w*",
        r"StreamEndCapture\w*",
        r"(?:\w*Launch\w*Kernel|Mem(?:cpy|set))\w*",
    )
)
INPUTS = ("Input type", "Input Dims", "Input Strides", "Concrete Inputs")
MODULE_PREFIX = "nn.Module: "
MOST_TIME_NS = 1 << 62


@dataclass(frozen=True, slots=True)
class EventInputs:
    """Arguments of an operator in a profiler event: lists with one item per parameter."""

    types: Sequence[Any]
    shapes: Sequence[Any]
    strides: Sequence[Any]
    texts: Sequence[Any]
    has_texts: bool = True

    def __len__(self) -> int:
        return len(self.types)


@dataclass(frozen=True, slots=True, eq=False)
class Slice:
    """Contents of a profiler event without its times; events with the same contents share one slice."""

    kind: str
    name: str
    inputs: EventInputs | None = None


@dataclass(frozen=True, slots=True)
class ProfilerEvent:
    """An event of torch's profiler that lasts for a time, such as a call of an operator.

    start_ns, end_ns : since the start of the first event
    external : number by which kernels refer to the event, -1 for none
    sequence : number by which a backward pass refers to a forward call, -1 for none
    """

    slice: Slice
    start_ns: int
    end_ns: int
    external: int
    sequence: int


@dataclass(slots=True)
class OperatorKernels:
    launches: Counter[str]
    device_ns: Counter[str]

    def add(self, other: OperatorKernels) -> None:
        self.launches.update(other.launches)
        self.device_ns.update(other.device_ns)


class EventColumns:
    """A growing table of 64-bit integers, with one array per column."""

    def __init__(self, *names: str) -> None:
        self._arrays = {name: array("q") for name in names}

    def __len__(self) -> int:
        return len(next(iter(self._arrays.values())))

    def __getitem__(self, name: str) -> Any:
        return np.frombuffer(self._arrays[name], dtype=np.int64)

    def add(self, *row: int) -> None:
        for column, number in zip(self._arrays.values(), row, strict=True):
            column.append(number)


class EventTable:
    """Table of all events in a profile that concern operators and their kernels.

    work : kernels, by the number `external` of the event that launched them
    """

    def __init__(self) -> None:
        self.kernels = EventColumns("correlation", "name", "start", "duration")
        self.launches = EventColumns("start", "external", "name")
        self.graph_launches: dict[int, tuple[int, tuple[str, str]]] = {}
        self.capture_begins: list[int] = []
        self.capture_ends: list[int] = []
        self._kernel_names: dict[str, int] = {}
        self.work: dict[int, OperatorKernels] = {}
        self.devices: Counter[int] = Counter()
        self.read = self.operators = self.shapes = 0
        self._slices: dict[str, int] = {}
        self._described: list[Slice] = []
        self._threads: dict[tuple[str, str], int] = {}
        self._thread_names: dict[tuple[str, str], str] = {}
        self._columns = EventColumns("thread", "slice", "start", "duration", "external", "sequence")

    def __len__(self) -> int:
        return len(self._columns) + len(self.kernels) + len(self.launches)

    @property
    def first_ns(self) -> int:
        return int(self._columns["start"].min()) if len(self._columns) else 0

    @property
    def kernel_names(self) -> list[str]:
        return list(self._kernel_names)

    def add(self, event: Any) -> None:
        self.read += 1
        if not isinstance(event, dict):
            raise ValueError(f"an event is not a JSON object: {str(event)[:60]}")
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
        elif kind.lower() in OF_RUNTIME:
            self._add_runtime(event, name, facts)
        elif kind == "cpu_op" or kind == "Operator":
            self.operators += "::" in name
            self._add(event, OPERATOR, name, facts)
        elif kind == "user_annotation":
            self._add(event, RANGE, name, facts)
        elif kind == "python_function":
            is_module = name.startswith(MODULE_PREFIX)
            self._add(event, MODULE if is_module else FRAME, name.removeprefix(MODULE_PREFIX), facts)

    def threads(self) -> Iterator[tuple[str, Iterator[ProfilerEvent]]]:
        columns, first_ns = self._columns, self.first_ns
        order = np.lexsort((columns["external"], -columns["duration"], columns["start"], columns["thread"]))
        bounds = np.flatnonzero(np.diff(columns["thread"][order], prepend=-1, append=-1))
        pieces = [order[begin:end] for begin, end in pairwise(bounds)]
        names = {number: self.thread_name(key) for key, number in self._threads.items()}
        for piece in sorted(pieces, key=lambda piece: int(columns["start"][piece[0]])):
            yield names[int(columns["thread"][piece[0]])], self._events(piece, first_ns)

    def _events(self, indices: Any, first_ns: int) -> Iterator[ProfilerEvent]:
        columns = {name: self._columns[name] for name in ("start", "duration", "slice", "external", "sequence")}
        for index in indices.tolist():
            start_ns = int(columns["start"][index]) - first_ns
            yield ProfilerEvent(
                self._described[columns["slice"][index]],
                start_ns,
                start_ns + int(columns["duration"][index]),
                int(columns["external"][index]),
                int(columns["sequence"][index]),
            )

    def thread_name(self, thread: tuple[str, str]) -> str:
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
        start, duration = _ns(event.get("ts")), _ns(event.get("dur"))
        thread = self._threads.setdefault(_thread(event), len(self._threads))
        external, sequence = _number(facts.get("External id")), _number(facts.get("Sequence number"))
        self._columns.add(thread, number, start, duration, external, sequence)

    def _add_work(self, event: dict[str, Any], name: str, facts: dict[str, Any]) -> None:
        external = _number(facts.get("External id", facts.get("external id")))
        start, duration = _ns(event.get("ts")), _ns(event.get("dur"))
        self.devices[max(_number(facts.get("device")), 0)] += 1
        self.kernels.add(_number(facts.get("correlation")), self._kernel_name(name), start, duration)
        if external >= 0:
            work = self.work.setdefault(external, OperatorKernels(Counter(), Counter()))
            work.launches[name[:1000]] += 1
            work.device_ns[name[:1000]] += duration

    def _add_runtime(self, event: dict[str, Any], name: str, facts: dict[str, Any]) -> None:
        if GRAPH_LAUNCH.fullmatch(name):
            if (correlation := _number(facts.get("correlation"))) >= 0:
                self.graph_launches[correlation] = _ns(event.get("ts")), _thread(event)
        elif CAPTURE_BEGIN.fullmatch(name):
            self.capture_begins.append(_ns(event.get("ts")))
        elif CAPTURE_END.fullmatch(name):
            self.capture_ends.append(_ns(event.get("ts")))
        elif LAUNCH.fullmatch(name):
            kernel = facts.get("kernel")
            number = self._kernel_name(kernel) if isinstance(kernel, str) else -1
            self.launches.add(_ns(event.get("ts")), _number(facts.get("External id")), number)

    def _kernel_name(self, name: str) -> int:
        return self._kernel_names.setdefault(name[:1000], len(self._kernel_names))


def _inputs(fields: list[Any], old_shapes: Any) -> EventInputs:
    types, shapes, strides, texts = fields
    shapes = old_shapes if shapes is None else shapes
    count = len(types) if isinstance(types, list) else 0
    lists = (types, shapes, [None] * count if strides is None else strides, [""] * count if texts is None else texts)
    if not all(isinstance(item, list) and len(item) == count for item in lists):
        raise ValueError("the types, shapes, strides and texts of an event are not lists of equal length")
    return EventInputs(*lists, has_texts=texts is not None)


def _thread(event: dict[str, Any]) -> tuple[str, str]:
    return str(event.get("pid"))[:100], str(event.get("tid"))[:100]


def _ns(microseconds: Any) -> int:
    if not isinstance(microseconds, int | float) or not 0 <= microseconds * 1000 < MOST_TIME_NS:
        raise ValueError(f"the time of an event is not a number of microseconds: {str(microseconds)[:40]}")
    return round(microseconds * 1000)


def _number(value: Any) -> int:
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 19:
        value = int(value)
    return value if type(value) is int and 0 <= value < MOST_TIME_NS else -1


BACKWARD = "autograd::engine::evaluate_function: "
STEP = "Optimizer.step#"
FRAME_NAME = re.compile(r"(.+)\((\d{1,9})\): (.+)")
# pattern of files whose Python functions are not part of the program
FOREIGN_FRAME = re.compile(r"<|torch/|.*/(?:torch|site-packages)/|.*/lib/python3\.\d+/|(?:threading|contextlib)\.py")
NOT_REGISTERED = "not registered in this torch: counted by the operators that it called"


@dataclass(frozen=True, slots=True)
class ProfiledCall:
    event: ProfilerEvent
    scope: Scope
    forward: int
    work: OperatorKernels


@dataclass(slots=True)
class _Open:
    end_ns: int
    scope: Scope
    forward: int
    call: ProfiledCall | None = None
    is_call: bool = False


def calls_of(
    events: Iterable[ProfilerEvent], work: dict[int, OperatorKernels], skip: Callable[[str, str], None]
) -> Iterator[ProfiledCall]:
    """Yield the calls of one thread that a capture would record.

    events : events in start order, outer events first
    """
    root = _Open(1 << 62, Scope(0, "", "", "forward"), -1)
    stack = [root]
    for event in events:
        while len(stack) > 1 and stack[-1].end_ns <= event.start_ns:
            yield from _ended(stack.pop())
        inner = _entered(stack[-1], event, skip)
        if inner.call is not None and event.external in work:
            inner.call.work.add(work[event.external])
        stack.append(inner)
    while len(stack) > 1:
        yield from _ended(stack.pop())


def _ended(item: _Open) -> Iterator[ProfiledCall]:
    if item.is_call and item.call is not None:
        yield item.call


def _entered(outer: _Open, event: ProfilerEvent, skip: Callable[[str, str], None]) -> _Open:
    inner = _Open(event.end_ns, outer.scope, outer.forward, outer.call)
    kind, name = event.slice.kind, event.slice.name
    if outer.call is not None:
        return inner
    if kind == MODULE:
        # the outermost is the model, whose path is empty
        path = "" if not outer.scope.module_type else f"{outer.scope.module}.{name}".removeprefix(".")
        inner.scope = replace(outer.scope, module=path, module_type=name.rpartition("_")[0] or name)
    elif kind == FRAME:
        inner.scope = _with_frame(outer.scope, name)
    elif kind == RANGE:
        inner.scope = replace(outer.scope, phase="optimizer") if name.startswith(STEP) else outer.scope
    elif name.startswith(BACKWARD):
        inner.scope, inner.forward = replace(outer.scope, phase="backward"), event.sequence
    elif OPERATOR_NAME.fullmatch(name) and "::" in name:
        inputs = event.slice.inputs
        if _is_composite(name, None if inputs is None else len(inputs)):
            return inner
        if not schemas_of(name):
            skip(name, NOT_REGISTERED)
            return inner
        inner.call = ProfiledCall(event, outer.scope, outer.forward, OperatorKernels(Counter(), Counter()))
        inner.is_call = True
    elif name.startswith("triton_"):
        skip(name, "a kernel made by torch.compile")
    return inner


def _with_frame(scope: Scope, name: str) -> Scope:
    match = FRAME_NAME.fullmatch(name)
    if match is None or FOREIGN_FRAME.match(match[1]):
        return scope
    around = (f"{scope.file}:{scope.line} {scope.function}",) if scope.file else ()
    callers = (*around, *scope.callers)[:16]
    return replace(scope, file=match[1], line=int(match[2]), function=match[3], callers=callers)


@lru_cache(maxsize=4096)
def _is_composite(name: str, count: int | None) -> bool:
    kernels = [has_composite_kernel(item) for item in schemas_of(name) if count in (None, len(item.arguments))]
    answers = [is_composite for is_composite in kernels if is_composite is not None]
    return bool(answers) and (all(answers) if count is not None else answers[0])
