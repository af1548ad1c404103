"""Find Python functions that consist of many small operators, and estimate the saving of one kernel per function."""

from __future__ import annotations

import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path, PurePath
from typing import IO, Any

from opgrip.cli.command import DEVICE_TIME, counted
from opgrip.cli.output_files import csv_text, write_json, write_text
from opgrip.cli.terminal import print_line
from opgrip.display.tables import TableColumn, print_table
from opgrip.errors import UserError
from opgrip.platform.peaks import bandwidth
from opgrip.traces.analysis.longtail.function_costs import Borders, CaptureCost, FunctionTimes, Traffic, measure_times
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
from opgrip.traces.schema.arguments import tensors
from opgrip.traces.table.trace import Trace

FEWEST_LAUNCHES = 3  # minimum number of operators per call of a long-tail function, including its backward pass
NOTHING = CaptureCost()
DENSE_SHARE = 0.5  # maximum share of a long-tail function's operator time in dense kernels


@dataclass(frozen=True, slots=True)
class LongTailFunction:
    """A Python function that consists of many small operators, with sums over all its calls in all traces.

    pattern : value of `opcapture --grip` that selects the function
    launches, backward_launches : number of operator calls made by the function, and by its backward pass
    host_ns : total host time in and between operators
    fused_ns : time to read and write `bytes` at the memory bandwidth
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

    @property
    def wall_ns(self) -> float:
        return self.operator_ns + self.between_ns

    @property
    def saving_ns(self) -> float:
        return max(0.0, self.wall_ns - self.fused_ns)


@dataclass(frozen=True, slots=True)
class LongTail:
    """The long-tail functions of traces, and totals.

    omitted : reason why a function is not listed, such as "loads data", by the function's pattern
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
    wall_by_pattern: dict[str, float] = field(default_factory=dict)
    traces: int = 0
    omitted: str | None = None

    @property
    def is_long_tail(self) -> bool:
        launches = self.launches + self.backward_launches
        return launches >= FEWEST_LAUNCHES * self.calls and self.dense_ns <= DENSE_SHARE * self.operator_ns


def find_longtail(
    traces: Iterable[Trace], bandwidth: Callable[[Trace], float], cost: CaptureCost = NOTHING
) -> LongTail:
    """Return the functions that consist of many small operators.

    bandwidth : returns the memory bandwidth, in bytes per second, of the device on which a trace was recorded
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
        own.wall_by_pattern[pattern] = own.wall_by_pattern.get(pattern, 0.0) + wall
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
    pattern = max(own.wall_by_pattern, key=lambda item: own.wall_by_pattern[item])
    shared = {item.name: getattr(own, item.name) for item in fields(own) if item.name in LongTailFunction.__slots__}
    return LongTailFunction(name=name, file=file, pattern=pattern, **shared)


MOST_OMITTED = 5  # maximum number of functions that are printed as left out


def print_longtail(longtail: LongTail, top: int, file: IO[str]) -> None:
    ranked = longtail.functions
    saving = sum(item.saving_ns for item in ranked)
    speeds = " or ".join(f"{speed / 1e9:,.1f}" for speed in longtail.bandwidths)
    most = f"{saving / 1e6:,.1f} of {longtail.wall_ns / 1e6:,.1f} ms, if memory moves {speeds} GB/s"
    head = (
        f"{counted(len(ranked), 'long-tail function')} in {counted(longtail.traces, 'trace')} of "
        f"{counted(longtail.launches, 'call')}: one kernel in place of each saves "
        f"{f'at most {most}' if longtail.wall_ns else 'an unknown time, because there are no recorded times'}"
    )
    print_line(head, file)
    if longtail.device_launches:
        number = counted(longtail.device_launches, "call")
        print_line(f"{DEVICE_TIME} ({number}); the column 'host ms' has their times on the host", file)
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
    # without the program that the trace names, which may be anything
    TableColumn(
        *("grip it with", lambda row: f"opcapture ... --grip {shlex.quote(row[0].pattern)}"),
        below=True,
        is_command=True,
        most=1000,
    ),
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


CONSTRUCTORS = ("__init__", "__new__", "__post_init__")
INITIALIZERS = ("reset_parameters", "init_weights", "_init_weights")
# pattern of the names of functions that load data
LOADING = re.compile(r"(Dataset|Loader)\w*\.|collate", re.IGNORECASE)
# Limits for a function that contains the program: it is called once, lasts at least the share WHOLE of the program's
# time, and makes at most the share OWN of its calls itself.
WHOLE, OWN = 0.8, 0.5


@dataclass(slots=True)
class _Span:
    first_ns: int
    last_ns: int
    calls: int = 0
    last_forward_ns: int = -1


class Spans:
    def __init__(self) -> None:
        self._spans: dict[Function, _Span] = {}
        self._first_backward_ns: int | None = None

    def note(self, call: MadeCall) -> None:
        end = call.start_ns + call.duration_ns
        span = self._spans.setdefault(function_of(call), _Span(call.start_ns, end))
        span.first_ns, span.last_ns = min(span.first_ns, call.start_ns), max(span.last_ns, end)
        span.calls += 1
        if call.place is None or call.place.phase != BACKWARD:
            span.last_forward_ns = call.start_ns
        elif self._first_backward_ns is None:
            self._first_backward_ns = call.start_ns

    def containing(self, counts: Mapping[Function, int]) -> set[Function]:
        spans = self._spans.values()
        calls = sum(span.calls for span in spans)
        whole = max((span.last_ns for span in spans), default=0) - min((span.first_ns for span in spans), default=0)
        return {
            function
            for function, span in self._spans.items()
            if counts.get(function) == 1
            and span.last_ns - span.first_ns >= WHOLE * whole
            and span.calls <= OWN * calls
            # calls in a backward pass belong to functions that have returned
            and span.last_forward_ns >= (self._first_backward_ns or 0)
        }


def models_forward(trace: Trace) -> set[Function]:
    return {
        (scope.file, scope.function)
        for scope in trace.scopes
        if not scope.module and scope.module_type and scope.function.endswith(f"{scope.module_type}.forward")
    }


def constructors(trace: Trace, counts: Mapping[Function, int]) -> set[Function]:
    module_types = {scope.module_type for scope in trace.scopes}
    # a module whose submodules make all its calls has no scope
    module_types |= {name.split(".")[-2] for _, name in counts if name.endswith(".forward")}
    return {
        (file, name)
        for (file, name), count in counts.items()
        if name.rpartition(".")[2] in CONSTRUCTORS and (count == 1 or name.split(".")[-2:][0] in module_types)
    }


def reason_to_omit(
    header: Mapping[str, Any], function: Function, building: Container[Function], containing: Container[Function]
) -> str | None:
    file, name = function
    if function in building or name.rpartition(".")[2] in INITIALIZERS:
        return "builds the model"
    if LOADING.search(name):
        return "loads data"
    if function in containing or (name == "main" and is_script(file, header)):
        return "the program or a step"
    # a script may have the same name as one of Python's modules
    is_library = file.partition("/")[0].removesuffix(".py") in sys.stdlib_module_names
    return "Python's library" if is_library and not is_script(file, header) else None


def pattern_of(header: Mapping[str, Any], file: str, function: str) -> str:
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".").strip(".")
    if is_script(file, header):
        module = "__main__"
    return f"{module}:{function.replace('.<locals>', '')}"


def _parts(header: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    command = header.get("command")
    words = [str(word) for word in command] if isinstance(command, list) else []
    if not words or words[0] != "opcapture":
        return [], words
    place = words.index("--") if "--" in words else len(words)
    return words[1:place], words[place + 1 :]


def is_script(file: str, header: Mapping[str, Any]) -> bool:
    own, program = _parts(header)
    match program:
        case ["-m", module, *_]:
            return PurePath(file).as_posix().endswith(f"{module.replace('.', '/')}.py")
        case [script, *_]:
            # the command of a script that captured itself holds only the script's name
            return PurePath(file) == PurePath(script) or (not own and PurePath(file).name == script)
    return False


def bandwidth_of(trace: Trace) -> float:
    """Return the memory bandwidth of a trace's device, measured on this machine, in bytes per second."""
    devices = {spec.device for item in trace.signatures for spec in tensors([item.args, item.kwargs, item.outputs])}
    device = min(devices - {"cpu", "meta"}, default="cpu")
    try:
        return bandwidth(device)
    except UserError as error:
        problem = f"the trace was made on {device}, whose memory bandwidth cannot be measured here"
        raise UserError(problem, "set it with --bandwidth") from error
