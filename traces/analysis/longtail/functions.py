"""Find the long-tail functions of traces, estimate the time that one kernel per function could save, and print them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import IO

from opgrip.cli.command import DEVICE_TIME, counted
from opgrip.cli.output_files import csv_text, write_json, write_text
from opgrip.cli.terminal import print_line
from opgrip.display.tables import TableColumn, print_table
from opgrip.traces.analysis.longtail.function_costs import Borders, CaptureCost, FunctionTimes, Traffic, measure_times
from opgrip.traces.analysis.longtail.omissions import (
    Spans,
    constructors,
    grip_command,
    models_forward,
    pattern_of,
    reason_to_omit,
)
from opgrip.traces.analysis.longtail.thread_calls import (
    BACKWARD,
    Function,
    Invocations,
    MadeCall,
    MadeCalls,
    function_of,
    operation_of,
)
from opgrip.traces.analysis.timeline import in_runs
from opgrip.traces.table.trace import Trace

FEWEST_LAUNCHES = 3  # minimum number of operators per call of a long-tail function, including its backward pass
NOTHING = CaptureCost()
DENSE_SHARE = 0.5  # maximum share of a long-tail function's operator time in dense kernels


@dataclass(frozen=True, slots=True)
class LongTailFunction:
    """A Python function that consists of many small operators, with sums over all its calls in all traces.

    pattern : value of `opcapture --grip` that selects the function
    calls : number of calls, estimated from the source lines of its operators (see `Invocations`)
    launches, backward_launches : number of calls of operators by the function, and by its backward pass
    operator_ns : total time of these operators, on the device if they ran on one
    between_ns : total host time between consecutive operators, including the backward pass
    host_ns : total host time in operators, including kernel launches, and between operators
    backward_ns : part of `operator_ns` and `between_ns` that is spent in backward passes
    bytes : bytes that the function reads and writes (see `Traffic`)
    fused_ns : time to read and write these bytes at the memory bandwidth
    command : `opcapture` command that runs the program again and records the calls of the function
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
        """Time in and between the operators of the function, without the functions that it calls."""
        return self.operator_ns + self.between_ns

    @property
    def saving_ns(self) -> float:
        """Upper bound of the time that is saved if one kernel replaces the function."""
        return max(0.0, self.wall_ns - self.fused_ns)


@dataclass(frozen=True, slots=True)
class LongTail:
    """The long-tail functions of traces, largest possible saving first, and totals.

    launches : number of calls of operators in the traces
    wall_ns : time of all functions that call operators, including functions that are not long-tail
    bandwidths : memory bandwidths in bytes per second from which `fused_ns` was computed
    device_launches : number of calls of operators that have a time on a device
    omitted : why a long-tail function is not in `functions`, such as "loads data", by the function's pattern
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
    """Return the long-tail functions of traces, which are read one after another.

    These are functions with at least `FEWEST_LAUNCHES` operators per call, which spend at most `DENSE_SHARE` of their
    operator time in dense operators, such as convolutions and matrix products.

    bandwidth : returns the memory bandwidth, in bytes per second, of the device on which a trace was recorded
    cost : time that recording added, which is subtracted
    """
    sums: dict[Function, _Sum] = {}
    launches: list[int] = []
    bandwidths: set[float] = set()
    device_launches = 0
    for trace in traces:
        speed = bandwidth(trace)
        bandwidths.add(speed)
        counts = _add(trace, sums, speed, cost)
        launches.append(counts["calls"])
        device_launches += counts["device"]
    wall = sum(item.operator_ns + item.between_ns for item in sums.values())
    ranked = [(_function(*of, item), item.omitted) for of, item in sums.items() if of[1] and item.is_long_tail]
    ranked.sort(key=lambda pair: pair[0].saving_ns, reverse=True)
    functions = [function for function, reason in ranked if reason is None]
    omitted = {function.pattern: reason for function, reason in ranked if reason is not None}
    return LongTail(functions, len(launches), sum(launches), wall, tuple(sorted(bandwidths)), device_launches, omitted)


@dataclass(slots=True)
class _Run:
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
        self.launches += 1
        operator_ns = times.operator_ns(call)
        self.operator_ns += operator_ns
        self.dense_ns += operator_ns if call.operation.dense else 0
        self.host_ns += times.host_ns(call)
        if before is not None:
            self.between_ns += times.between_ns(before, call)
            self.gaps_ns += times.gap_ns(before, call)


def _add(trace: Trace, sums: dict[Function, _Sum], bandwidth: float, cost: CaptureCost) -> Counter[str]:
    operations = {signature.number: operation_of(signature) for signature in trace.signatures}
    calls = MadeCalls(trace, operations)
    traffic = Traffic()
    traffic.note(calls)
    times = measure_times(calls, trace.observed, cost)
    counts: Counter[str] = Counter()
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


def _counted(
    calls: Iterable[MadeCall], counts: Counter[str], invocations: Invocations, spans: Spans
) -> Iterator[MadeCall]:
    for call in calls:
        counts["calls"] += 1
        counts["device"] += call.device_ns is not None
        invocations.note(call)
        spans.note(call)
        yield call


def _runs(calls: Iterable[MadeCall], traffic: Traffic, times: FunctionTimes) -> Iterator[_Run]:
    # the calls themselves are not kept, because there can be millions
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
    shared = {item.name: getattr(own, item.name) for item in fields(own) if item.name in LongTailFunction.__slots__}
    return LongTailFunction(name=name, file=file, pattern=pattern, command=command, **shared)


MOST_OMITTED = 5  # maximum number of functions that are printed as left out


def print_longtail(longtail: LongTail, top: int, file: IO[str]) -> None:
    ranked = longtail.functions
    saving = sum(item.saving_ns for item in ranked)
    head = (
        f"{counted(len(ranked), 'long-tail function')} in {counted(longtail.traces, 'trace')} of "
        f"{counted(longtail.launches, 'call')}: one kernel in place of each saves at most {saving / 1e6:,.1f} ms of "
        f"{longtail.wall_ns / 1e6:,.1f}, at {' and '.join(f'{speed / 1e9:,.1f}' for speed in longtail.bandwidths)} GB/s"
    )
    print_line(head, file)
    if longtail.device_launches:
        print_line(
            f"{DEVICE_TIME}, here {longtail.device_launches:,}; the column host ms has the time on the host", file
        )
    shown = ranked[:top]
    rows = [(item, longtail.wall_ns) for item in shown]
    columns = [column for column in COLUMNS if column.heading != "host ms" or longtail.device_launches]
    print_table(columns, rows, file)
    if longtail.omitted:
        names = [f"{pattern} ({reason})" for pattern, reason in longtail.omitted.items()]
        more = f" and {len(names) - MOST_OMITTED} more" if len(names) > MOST_OMITTED else ""
        print_line(f"left out, as not worth gripping: {', '.join(names[:MOST_OMITTED])}{more}", file)


def _launches(item: LongTailFunction) -> str:
    calls = max(item.calls, 1)
    backward = f"+{item.backward_launches / calls:.0f}" if item.backward_launches else ""
    return f"{item.launches / calls:.0f}{backward}"


def _ms(heading: str, name: str, rank: int, form: str = ",.2f") -> TableColumn:
    return TableColumn(heading, lambda row: getattr(row[0], name) / 1e6, form, rank)


# columns of the table; a row is a function and the total time of all traces
COLUMNS = (
    _ms("saves ms", "saving_ns", 0),
    TableColumn("share", lambda row: row[0].saving_ns / max(row[1], 1), ".2%", rank=1),
    TableColumn("calls", lambda row: row[0].calls, ",d", rank=1),
    TableColumn("ops/call", lambda row: _launches(row[0]), ">", rank=1),
    _ms("ops ms", "operator_ns", 2),
    _ms("between ms", "between_ns", 2),
    _ms("host ms", "host_ns", 2),
    TableColumn("backward", lambda row: row[0].backward_ns / max(row[0].wall_ns, 1), ".0%", rank=4),
    _ms("in+out MB", "bytes", 3),
    _ms("fused ms", "fused_ns", 3, ",.3f"),
    TableColumn("function", lambda row: row[0].name, least=24),
    TableColumn("grip it with", lambda row: row[0].command, below=True, is_command=True, most=1000),
)


def write_rows(longtail: LongTail, path: Path, force: bool) -> None:
    rows = [{**asdict(item), "wall_ns": item.wall_ns, "saving_ns": item.saving_ns} for item in longtail.functions]
    if path.suffix == ".json":
        facts = {"traces": longtail.traces, "calls": longtail.launches, "wall_ns": longtail.wall_ns}
        facts["device_calls"] = longtail.device_launches
        write_json({**facts, "bandwidths": longtail.bandwidths, "functions": rows}, path, force)
        return
    names = [*(item.name for item in fields(LongTailFunction)), "wall_ns", "saving_ns"]
    write_text(csv_text(names, (row.values() for row in rows)), path, force)
