"""Long-tail functions of traces, how often they were called, and what one kernel in their place could save at most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from opgrip.traces.analysis.longtail.commands import grip_command, pattern_of
from opgrip.traces.analysis.longtail.function_times import CaptureCost, FunctionTimes, measure_times
from opgrip.traces.analysis.longtail.operators import operation_of
from opgrip.traces.analysis.longtail.thread_calls import (
    BACKWARD,
    Function,
    MadeCall,
    MadeCalls,
    Spans,
    constructors,
    function_of,
    models_forward,
    reason_to_omit,
)
from opgrip.traces.analysis.longtail.traffic import Borders, Traffic
from opgrip.traces.analysis.timeline import in_runs
from opgrip.traces.table.trace import Trace


@dataclass(slots=True)
class _Open:
    """A call of a function that goes on.

    Attributes
    ----------
    line, op : of its first operator
    moved : whether its last operator was on another line
    last : place of its last operator among those of the thread
    """

    line: int
    op: str
    moved: bool
    last: int


class Invocations:
    """By function, how often one thread called it.

    A trace holds operators, not calls of Python functions. A new call of a function is taken to begin where its first
    operator comes again: the same operator on the same line, after one on another line or after other functions' calls.
    So does one where a line before the first comes, after other functions' calls. A loop around the whole body thus
    counts its rounds. Backward passes begin no call; a function that has nothing else counts as called once.
    """

    def __init__(self) -> None:
        self.counts: dict[Function, int] = {}
        self._opened: dict[tuple[Function, str], _Open] = {}
        self._index = -1

    def note(self, call: MadeCall) -> None:
        """Take note of the thread's next call."""
        self._index += 1
        if call.place is None:
            return
        function = function_of(call)
        self.counts.setdefault(function, 0)
        if call.place.phase == BACKWARD:
            return
        open_call = self._opened.get((function, call.module))
        if open_call is None or _begins(open_call, call, self._index):
            self.counts[function] += 1
            self._opened[function, call.module] = _Open(call.line, call.operation.op, False, self._index)
        else:
            open_call.moved = call.line != open_call.line
            open_call.last = self._index


def _begins(open_call: _Open, call: MadeCall, index: int) -> bool:
    came_back = index != open_call.last + 1
    if call.line == open_call.line and call.operation.op == open_call.op:
        return open_call.moved or came_back
    return came_back and call.line < open_call.line


FEWEST_LAUNCHES = 3
"""Operators a call, backward pass included, from which on a function counts as long tail."""
NOTHING = CaptureCost()
DENSE_SHARE = 0.5
"""Of a function's time in operators, in those with dense kernels, above which it does not."""


@dataclass(frozen=True, slots=True)
class LongTailFunction:
    """A function that breaks into many small operators, over all traces.

    Attributes
    ----------
    pattern : what `--grip` calls it
    calls : how often it was called, as told by the lines of its operators: see `Invocations`
    launches, backward_launches : operators that it and its backward pass called, in all
    operator_ns : time in these, of the device for those that worked on one
    between_ns : time between two of them that follow each other on the host, backward pass included
    host_ns : the host's time in all of them, launches included, and between them
    backward_ns : of both, what was in backward passes
    bytes : in and out of the function: see `Traffic`
    fused_ns : time in which these bytes can be read and written
    traces : how many traces have calls of it
    command : runs the program again and grips it
    """

    name: str
    file: str
    pattern: str
    calls: int
    launches: int
    backward_launches: int
    operator_ns: float
    between_ns: float
    host_ns: float
    backward_ns: float
    bytes: int
    fused_ns: float
    traces: int
    command: str

    @property
    def wall_ns(self) -> float:
        """All the time from its first operators to its last, without that of functions that it calls."""
        return self.operator_ns + self.between_ns

    @property
    def saving_ns(self) -> float:
        """What one kernel in its place saves at most."""
        return max(0.0, self.wall_ns - self.fused_ns)


@dataclass(frozen=True, slots=True)
class LongTail:
    """What traces tell of long-tail functions.

    Attributes
    ----------
    functions : those that are, by falling saving
    traces, launches : how many
    wall_ns : time of all functions that made calls, long tail or not
    bandwidths : bytes a second that `fused_ns` was worked out from, those of all traces
    device_launches : of the launches, those with a time on a device
    omitted : functions that are not worth gripping, by their patterns, and why; they are not among the others
    """

    functions: list[LongTailFunction]
    traces: int
    launches: int
    wall_ns: float
    bandwidths: tuple[float, ...]
    device_launches: int
    omitted: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Sum:
    """What adds up of one function."""

    calls: int = 0
    launches: int = 0
    backward_launches: int = 0
    operator_ns: float = 0.0
    dense_ns: float = 0.0
    between_ns: float = 0.0
    host_ns: float = 0.0
    backward_ns: float = 0.0
    bytes: int = 0
    fused_ns: float = 0.0
    wall_by_command: dict[tuple[str, str], float] = field(default_factory=dict)
    traces: int = 0
    omitted: str | None = None

    @property
    def is_long_tail(self) -> bool:
        launches = self.launches + self.backward_launches
        return launches >= FEWEST_LAUNCHES * self.calls and self.dense_ns <= DENSE_SHARE * self.operator_ns


def find_longtail(
    traces: Iterable[Trace], bandwidth: Callable[[Trace], float], cost: CaptureCost = NOTHING
) -> LongTail:
    """The functions whose operators are at least three a call, and spend no more than half of their time in dense ones.

    Parameters
    ----------
    traces : looked at one after the other; the numbers of a function add up over all
    bandwidth : of the memory that a trace was made on, in bytes a second read and written
    cost : of the capture, which is taken off
    """
    sums: dict[Function, _Sum] = {}
    launches: list[int] = []
    bandwidths: set[float] = set()
    device_launches = 0
    for trace in traces:
        speed = bandwidth(trace)
        bandwidths.add(speed)
        counts = _add(trace, sums, speed, cost)
        launches.append(counts.calls)
        device_launches += counts.device_calls
    wall = sum(item.operator_ns + item.between_ns for item in sums.values())
    ranked = [(_function(*of, item), item.omitted) for of, item in sums.items() if of[1] and item.is_long_tail]
    ranked.sort(key=lambda pair: pair[0].saving_ns, reverse=True)
    functions = [function for function, reason in ranked if reason is None]
    omitted = {function.pattern: reason for function, reason in ranked if reason is not None}
    return LongTail(functions, len(launches), sum(launches), wall, tuple(sorted(bandwidths)), device_launches, omitted)


@dataclass(slots=True)
class _Counts:
    """How many calls a trace has, and how many of them have a time on a device."""

    calls: int = 0
    device_calls: int = 0


@dataclass(slots=True)
class _Run:
    """What adds up of one run of calls."""

    function: Function
    is_backward: bool
    launches: int = 0
    operator_ns: float = 0
    dense_ns: float = 0
    between_ns: float = 0
    gaps_ns: float = 0
    host_ns: float = 0
    borders: Borders = field(default_factory=Borders)

    def add(self, call: MadeCall, before: MadeCall | None, times: FunctionTimes) -> None:
        """Add a call, which follows another one."""
        self.launches += 1
        operator_ns = times.operator_ns(call)
        self.operator_ns += operator_ns
        self.dense_ns += operator_ns if call.operation.dense else 0
        self.host_ns += times.host_ns(call)
        if before is not None:
            self.between_ns += times.between_ns(before, call)
            self.gaps_ns += times.gap_ns(before, call)


def _add(trace: Trace, sums: dict[Function, _Sum], bandwidth: float, cost: CaptureCost) -> _Counts:
    """Add a trace's calls to what is known of each function."""
    operations = {signature.number: operation_of(signature) for signature in trace.signatures}
    calls = MadeCalls(trace, operations)
    traffic = Traffic()
    traffic.note(calls)
    times = measure_times(calls, trace.observed, cost)
    counts = _Counts()
    wall_by_function: dict[Function, float] = {}
    calls_by_function: Counter[Function] = Counter()
    containing = models_forward(trace)
    for thread in calls.threads:
        invocations, spans = Invocations(), Spans()
        for run in _runs(_counted(calls.of(thread), counts, invocations, spans), traffic, times):
            _add_run(sums.setdefault(run.function, _Sum()), run, bandwidth)
            wall = run.operator_ns + run.between_ns
            wall_by_function[run.function] = wall_by_function.get(run.function, 0.0) + wall
        calls_by_function.update(invocations.counts)
        containing |= spans.containing(invocations.counts)
    building = constructors(trace, calls_by_function)
    for function, wall in wall_by_function.items():
        own = sums[function]
        own.calls += calls_by_function[function]
        own.traces += 1
        own.omitted = own.omitted or reason_to_omit(trace.header, function, building, containing)
        pattern = pattern_of(trace.header, *function)
        command = (pattern, grip_command(trace.header, pattern))
        own.wall_by_command[command] = own.wall_by_command.get(command, 0.0) + wall
    return counts


def _counted(calls: Iterable[MadeCall], counts: _Counts, invocations: Invocations, spans: Spans) -> Iterator[MadeCall]:
    """The calls of a thread, while they are counted."""
    for call in calls:
        counts.calls += 1
        counts.device_calls += call.device_ns is not None
        invocations.note(call)
        spans.note(call)
        yield call


def _runs(calls: Iterable[MadeCall], traffic: Traffic, times: FunctionTimes) -> Iterator[_Run]:
    """The runs of a thread's calls, each without its calls, of which it can have millions."""
    run: _Run | None = None
    before: MadeCall | None = None
    for place, call, begins in in_runs(calls):
        if begins:
            if run is not None:
                yield run
            run, before = _Run(function_of(call), place.phase == BACKWARD), None
        assert run is not None
        run.add(call, before, times)
        traffic.cross(call, run.borders)
        before = call
    if run is not None:
        yield run


def _add_run(own: _Sum, run: _Run, bandwidth: float) -> None:
    size = run.borders.bytes
    own.bytes += size
    own.fused_ns += size / bandwidth * 1e9
    own.operator_ns += run.operator_ns
    own.dense_ns += run.dense_ns
    own.between_ns += run.between_ns
    own.host_ns += run.host_ns + run.gaps_ns
    if run.is_backward:
        own.backward_launches += run.launches
        own.backward_ns += run.operator_ns + run.between_ns
    else:
        own.launches += run.launches


def _function(file: str, name: str, own: _Sum) -> LongTailFunction:
    pattern, command = max(own.wall_by_command, key=lambda item: own.wall_by_command[item])
    return LongTailFunction(
        name=name,
        file=file,
        pattern=pattern,
        calls=own.calls,
        launches=own.launches,
        backward_launches=own.backward_launches,
        operator_ns=own.operator_ns,
        between_ns=own.between_ns,
        host_ns=own.host_ns,
        backward_ns=own.backward_ns,
        bytes=own.bytes,
        fused_ns=own.fused_ns,
        traces=own.traces,
        command=command,
    )
