"""Long-tail functions of traces, ranked by what one kernel in their place could at most save."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from opgrip.traces.longtail.calls import BACKWARD, Function, MadeCall, function_of, threads_of
from opgrip.traces.longtail.commands import grip_command, pattern_of
from opgrip.traces.longtail.invocations import count_invocations
from opgrip.traces.longtail.operators import operation_of
from opgrip.traces.longtail.times import CaptureCost, Times, measure_times
from opgrip.traces.longtail.traffic import Traffic
from opgrip.traces.runs import runs_of
from opgrip.traces.trace import Trace

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
    calls : how often it was called, as told by the lines of its operators: see `count_invocations`
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
    """

    functions: list[LongTailFunction]
    traces: int
    launches: int
    wall_ns: float
    bandwidths: tuple[float, ...]
    device_launches: int


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
        threads = _add(trace, sums, speed, cost)
        launches.append(sum(map(len, threads)))
        device_launches += sum(call.device_ns is not None for thread in threads for call in thread)
    wall = sum(item.operator_ns + item.between_ns for item in sums.values())
    functions = [_function(file, name, item) for (file, name), item in sums.items() if name and item.is_long_tail]
    functions.sort(key=attrgetter("saving_ns"), reverse=True)
    return LongTail(functions, len(launches), sum(launches), wall, tuple(sorted(bandwidths)), device_launches)


def _add(trace: Trace, sums: dict[Function, _Sum], bandwidth: float, cost: CaptureCost) -> list[list[MadeCall]]:
    """Add a trace's calls to what is known of each function; gives these by thread."""
    operations = {signature.number: operation_of(signature) for signature in trace.signatures}
    threads = threads_of(trace, operations)
    traffic = Traffic()
    traffic.note(sorted((call for thread in threads for call in thread), key=attrgetter("number")))
    runs = [run for thread in threads for _, run in runs_of(thread)]
    times = measure_times(runs, trace.observed, cost)
    here: dict[Function, float] = {}
    for run in runs:
        function = function_of(run[0])
        own = sums.setdefault(function, _Sum())
        size = traffic.bytes_of(run)
        own.bytes += size
        own.fused_ns += size / bandwidth * 1e9
        wall = _add_run(own, run, times)
        here[function] = here.get(function, 0.0) + wall
    for thread in threads:
        for function, calls in count_invocations(thread).items():
            sums[function].calls += calls
    for function, wall in here.items():
        own = sums[function]
        own.traces += 1
        pattern = pattern_of(trace.header, *function)
        command = (pattern, grip_command(trace.header, pattern))
        own.wall_by_command[command] = own.wall_by_command.get(command, 0.0) + wall
    return threads


def _add_run(own: _Sum, run: Sequence[MadeCall], times: Times) -> float:
    """Add one run; gives its time."""
    operator_ns, between_ns = times.operators_ns(run), times.between_ns(run)
    own.operator_ns += operator_ns
    own.dense_ns += times.operators_ns(call for call in run if call.operation.dense)
    own.between_ns += between_ns
    own.host_ns += times.host_ns(run)
    if run[0].place is not None and run[0].place.phase == BACKWARD:
        own.backward_launches += len(run)
        own.backward_ns += operator_ns + between_ns
    else:
        own.launches += len(run)
    return operator_ns + between_ns


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
