"""Runs the cases under nsys (`--nsys`), and adds the kernels and copies that it recorded to the rows."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from statistics import median
from typing import Any

from opgrip.cli.command import not_negative, positive
from opgrip.cli.options import EFFORT, OUTPUT, option, titled
from opgrip.errors import UserError
from opgrip.replay.analyses import Analysis, AnalysisSession, analyses
from opgrip.replay.analyses.profiler_programs import (
    Flags,
    Key,
    arguments_in,
    find_program,
    key_of,
    last_words,
    merged_arguments,
    profiled_command,
    profiled_rows,
    run_program,
    why_unseen,
)
from opgrip.replay.results.columns import Columns, column
from opgrip.replay.results.results import RAN, Result
from opgrip.replay.run.kernels import counted_names, idle_spans
from opgrip.replay.run.request import RunRequest
from opgrip.replay.timing.ranges import BEFORE, DELAY_KERNEL, DOMAIN, DROPPED, NSYS, PREPARE, READY, check_ranges


@dataclass(frozen=True, slots=True)
class NsysColumns(Columns):
    nsys_us: float | None = column("median of the profiled runs, by the clock of nsys", "us", "nsys us")
    nsys_own_us: float | None = column(
        "median of the profiled runs, by the clock of opgrip; its difference from `median_us` is the cost of profiling",
        "us",
    )
    nsys_runs: int | None = column("number of profiled runs")
    nsys_kernels: str | None = column(
        "names of the kernels of a run, with the number of each; `CUDA graph` if nsys only recorded the graph"
    )
    nsys_launches: float | None = column("number of kernels of a run", heading="launches")
    nsys_gpu_us: float | None = column("time of the kernels of a run on the GPU", "us", "gpu us")
    nsys_gap_us: float | None = column(
        "time in which the GPU was idle between the first and the last work of a run", "us", "gaps us"
    )
    nsys_copies: float | None = column("number of memcpys of a run")
    nsys_copied_bytes: int | None = column("bytes copied in a run", "bytes")
    nsys_memsets: float | None = column("number of memsets of a run")


@dataclass(slots=True)
class NsysRun:
    """A timed run of a row, or a stage such as the warm-up, with the work that it launched on the device."""

    span: NsysRange
    work: list[DeviceWork] = field(default_factory=list)


Runs = dict[Key, list[NsysRun]]  # timed runs by the row's key


def joined(report: NsysReport) -> tuple[Runs, int]:
    runs_by_row: Runs = defaultdict(list)
    all_by_process: dict[int, list[NsysRun]] = defaultdict(list)
    for span in report.spans:
        run, runs = NsysRun(span), runs_by_row[span.case, span.category]
        all_by_process[span.process].append(run)
        if span.message == DROPPED and runs:
            runs.pop()
        elif span.message not in (PREPARE, READY, BEFORE, DROPPED):
            runs.append(run)
    starts = {process: [run.span.start_ns for run in runs] for process, runs in all_by_process.items()}
    outside = 0
    for work in report.work:
        if DELAY_KERNEL in work.name:
            continue
        # bisection works because ranges of one process do not overlap
        index = bisect_right(starts.get(work.process, []), work.launched_ns) - 1
        run_before = all_by_process[work.process][index] if index >= 0 else None
        if run_before is None or run_before.span.end_ns < work.launched_ns:
            outside += 1
        else:
            run_before.work.append(work)
    return {key: runs for key, runs in runs_by_row.items() if runs}, outside


def joined_alone(reports: Iterable[NsysReport]) -> tuple[Runs, int]:
    """Return the timed runs of each row in several reports, and the number of kernels, copies and other device work
    that were launched outside opgrip's ranges.
    """
    runs_by_row: Runs = defaultdict(list)
    all_outside = 0
    for report in reports:
        own_runs, outside = joined(report)
        all_outside += outside
        for key, runs in own_runs.items():
            runs_by_row[key] += runs
    return dict(runs_by_row), all_outside


def with_seen(row: Result, own: Result | None, runs_by_row: Mapping[Key, list[NsysRun]]) -> Result:
    """Return a row with the columns of nsys; unchanged if nsys recorded no runs of the row.

    own : the row as opgrip timed it during the run under nsys
    """
    runs = runs_by_row.get(key_of(row))
    if runs is None:
        return row
    timed = NsysColumns(
        nsys_us=median(run.span.end_ns - run.span.start_ns for run in runs) / 1e3,
        nsys_own_us=None if own is None else own.median_us,
        nsys_runs=len(runs),
    )
    return row.adding(_with_work(timed, runs) if any(run.work for run in runs) else timed)


def _with_work(row: NsysColumns, runs: Sequence[NsysRun]) -> NsysColumns:
    count = len(runs)
    everything = [work for run in runs for work in run.work]
    kernels = [work for work in everything if work.kind in (DeviceWorkKind.KERNEL, DeviceWorkKind.GRAPH)]
    copies = [work for work in everything if work.kind is DeviceWorkKind.COPY]
    return replace(
        row,
        nsys_kernels=counted_names((work.name for work in kernels), count),
        nsys_launches=len(kernels) / count,
        nsys_gpu_us=sum(work.end_ns - work.start_ns for work in kernels) / count / 1e3,
        nsys_gap_us=median(
            sum(end - start for start, end in idle_spans((work.start_ns, work.end_ns) for work in run.work))
            for run in runs
            if run.work
        )
        / 1e3,
        nsys_copies=len(copies) / count,
        nsys_copied_bytes=round(sum(work.copied_bytes for work in copies) / count),
        nsys_memsets=sum(work.kind is DeviceWorkKind.MEMSET for work in everything) / count,
    )


# usual installation paths of nsys, searched after PATH
PLACES = (
    "/usr/local/cuda*/bin/nsys",
    "/opt/nvidia/nsight-systems/*/bin/nsys",
    "/opt/nvidia/nsight-systems-cli/*/bin/nsys",
)
REPORT = ".nsys-rep"
ALWAYS = ("--sample=none", "--cpuctxsw=none", "--force-overwrite=true")
# options of nsys that record only between cudaProfilerStart and cudaProfilerStop
ON_GPU = ("--trace=cuda,nvtx,cublas,cudnn", "--capture-range=cudaProfilerApi", "--capture-range-end=repeat")
# option of nsys that records the kernels of CUDA graphs; without it, a graph is reported as one piece of work
BY_NODE = "--cuda-graph-trace=node"
ON_CPU = ("--trace=nvtx",)
FLAGS = Flags(
    "--output",
    "--trace",
    {"-o": "--output", "-t": "--trace", "-s": "--sample", "-f": "--force-overwrite", "-c": "--capture-range"},
)
PASSES = 2  # number of runs under nsys; the second runs the cases of which the first report contains nothing


@titled("profilers")
@dataclass(frozen=True, slots=True)
class NsysOptions:
    nsys: bool = option(
        False,
        (
            "run the cases once more under Nsight Systems, add kernel names, number of launches, GPU time and "
            "idle GPU time to each row, and write a report next to --output"
        ),
        only=("single cases", "one trace"),
        role=OUTPUT,
        common=True,
    )
    nsys_bin: str | None = option(
        None, "path of nsys (default: on PATH, or where NVIDIA's installers put it)", metavar="FILE", role=OUTPUT
    )
    nsys_args_file: Path | None = option(
        None, "file with further arguments for nsys profile, written as on a command line", parse=Path, role=OUTPUT
    )
    nsys_warmup: int = option(3, "warm-up runs per case under nsys (default: 3)", parse=not_negative, role=EFFORT)
    nsys_iterations: int = option(10, "profiled runs per case under nsys (default: 10)", parse=positive, role=EFFORT)


@dataclass(frozen=True, slots=True)
class Nsys:
    binary: str
    report: Path
    arguments: Sequence[str] = ()
    warmup: int = 3
    iterations: int = 10


@analyses.register("nsys")
class NsysAnalysis(Analysis):
    options = NsysOptions
    columns = NsysColumns
    order = 20

    def __init__(self, options: NsysOptions, session: AnalysisSession) -> None:
        super().__init__(options, session)
        if any(count > 1 for count in session.workload.request.points.streams):
            raise UserError("nsys cannot separate cases that run concurrently", "remove --streams or --nsys")
        session.check_one_device("nsys")
        check_ranges("nsys")
        arguments = () if options.nsys_args_file is None else arguments_in(options.nsys_args_file, FLAGS)
        session.check_one_cache("nsys")
        report = session.beside(REPORT)
        binary = find_program("nsys", "Nsight Systems", PLACES, options.nsys_bin)
        self._nsys = Nsys(binary, report, tuple(arguments), options.nsys_warmup, options.nsys_iterations)

    @classmethod
    def is_requested(cls, options: NsysOptions) -> bool:
        return options.nsys

    def add_to(self, rows: Sequence[Result]) -> list[Result]:
        session = self.session
        with session.running(rows, "nsys"):
            request, say = session.workload.request, session.reporter.say
            return profile_rows(request, rows, self._nsys, session.timeout_s, say, session.device)


def profile_rows(
    request: RunRequest,
    results: Sequence[Result],
    nsys: Nsys,
    timeout_s: float,
    say: Callable[[str], None],
    device: str,
) -> list[Result]:
    effort = replace(request.effort, warmup=nsys.warmup, iterations=nsys.iterations)
    request = replace(request, effort=effort, profiled=NSYS)
    runs_by_row: Runs = {}
    own: dict[Key, Result] = {}
    outside = report_count = 0
    unseen = [row for row in results if row.status in RAN]
    for _ in range(PASSES):
        left_out = {row.case for row in results} - {row.case for row in unseen}
        with tempfile.TemporaryDirectory(prefix="opgrip-nsys-") as name:
            folder = Path(name)
            _run(nsys, folder, profiled_command(folder, request, left_out, timeout_s), device)
            new_runs, lost = joined_alone(_exported(nsys, path) for path in _reports_in(folder))
            own |= {key: row for row in profiled_rows(folder) if (key := key_of(row)) not in runs_by_row}
            report_count += _keep_reports(folder, nsys.report, report_count, say)
        runs_by_row, outside = {**new_runs, **runs_by_row}, outside + lost
        unseen = [row for row in unseen if key_of(row) not in runs_by_row]
        if not unseen or not runs_by_row:
            break
    if not runs_by_row:
        raise UserError(
            "nsys did not record the NVTX ranges that separate the cases",
            "nvtx 0.2.12 and later need a newer nsys: use nvtx 0.2.11",
        )
    if outside:
        say(f"{outside} kernels and copies in the report belong to no timed run")
    for row in unseen:
        say(f"nsys recorded nothing of case {row.case}, {row.op} as {row.mode}: {why_unseen(own.get(key_of(row)))}")
    return [with_seen(row, own.get(key_of(row)), runs_by_row) for row in results]


def _run(nsys: Nsys, folder: Path, command: Sequence[str], device: str) -> None:
    options = _options_on_gpu(nsys) if device.partition(":")[0] == "cuda" else ON_CPU
    arguments = merged_arguments((*options, *ALWAYS), nsys.arguments, FLAGS)
    done = run_program([nsys.binary, "profile", *arguments, "--output", str(folder / "report"), *command])
    if not _reports_in(folder):
        raise UserError(f"nsys wrote no report: {last_words(done)}", "check that nsys works here with: nsys status -e")


def _options_on_gpu(nsys: Nsys) -> tuple[str, ...]:
    done = run_program([nsys.binary, "profile", "--help"])
    return (*ON_GPU, BY_NODE) if BY_NODE.partition("=")[0] in done.stdout + done.stderr else ON_GPU


def _reports_in(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"report*{REPORT}"), key=lambda path: (len(path.name), path.name))


def _exported(nsys: Nsys, report: Path) -> NsysReport:
    database = report.with_suffix(".sqlite")
    export_arguments = ["export", "--type=sqlite", "--force-overwrite=true", f"--output={database}", str(report)]
    done = run_program([nsys.binary, *export_arguments])
    if not database.exists():
        raise UserError(f"nsys cannot export its report: {last_words(done)}", "update nsys")
    return read_report(database)


def _keep_reports(folder: Path, output: Path, earlier_count: int, say: Callable[[str], None]) -> int:
    reports = _reports_in(folder)
    for index, report in enumerate(reports, earlier_count):
        path = output if not index else output.with_suffix(f".{index + 1}{output.suffix}")
        with suppress(FileNotFoundError):
            path.unlink()
        shutil.move(report, path)
        say(f"open nsys's report in Nsight Systems: {path}")
    return len(reports)


# values of `eventType` in the table of NVTX events: category name, start/end range, domain name
CATEGORY, RANGE, NAMED_DOMAIN = 33, 60, 75
EVENTS, STRINGS, CALLS = "NVTX_EVENTS", "StringIds", "CUPTI_ACTIVITY_KIND_RUNTIME"
KERNELS, COPIES = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_MEMCPY"
MEMSETS, GRAPHS = "CUPTI_ACTIVITY_KIND_MEMSET", "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
GRAPH_NAME = "CUDA graph"


class DeviceWorkKind(Enum):
    """The kind of a piece of device work; the value is the name of its table in the report."""

    KERNEL = KERNELS
    COPY = COPIES
    MEMSET = MEMSETS
    GRAPH = GRAPHS


@dataclass(frozen=True, slots=True)
class NsysRange:
    """One NVTX range that opgrip marked: a timed run of a row, or a stage before or after the run.

    case : number of the case; -1 if the range has none
    process : lower 24 bits of the process number
    """

    case: int
    message: str
    category: str
    start_ns: int
    end_ns: int
    process: int


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """A piece of device work: a kernel, a copy, a memset, or a whole CUDA graph.

    launched_ns : time at which the program launched it, since the start of the report; -1 if unknown
    process : lower 24 bits of the process number
    """

    kind: DeviceWorkKind
    name: str
    start_ns: int
    end_ns: int
    launched_ns: int
    process: int
    copied_bytes: int = 0


@dataclass(frozen=True, slots=True)
class NsysReport:
    spans: Sequence[NsysRange]
    work: Sequence[DeviceWork]


def read_report(path: Path) -> NsysReport:
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
            database.row_factory = sqlite3.Row
            tables = {row["name"] for row in database.execute("SELECT name FROM sqlite_master")}
            if EVENTS not in tables:
                raise UserError(
                    f"{path} has no table {EVENTS}", "check that this nsys can record NVTX, with --trace=nvtx"
                )
            return NsysReport(list(_spans(database, tables)), list(_work(database, tables)))
    except (sqlite3.Error, IndexError) as error:
        raise UserError(f"{path} is not a known report of nsys: {error}", "use another version of nsys") from error


def _spans(database: sqlite3.Connection, tables: set[str]) -> Iterator[NsysRange]:
    strings = _strings(database, tables)
    categories: dict[Any, str] = {}
    domains: set[Any] = set()
    ranges = []
    for row in database.execute(f"SELECT * FROM {EVENTS} ORDER BY start"):
        event = _Row(row)
        text = event["text"] or strings.get(event["textId"], "")
        process = _process(event["globalTid"])
        if event["eventType"] == NAMED_DOMAIN and text == DOMAIN:
            domains.add((process, event["domainId"]))
        elif event["eventType"] == CATEGORY:
            categories[process, event["domainId"], event["category"]] = text
        elif event["eventType"] == RANGE and event["end"] is not None:
            ranges.append((process, text, event))
    for process, text, event in ranges:
        if (process, event["domainId"]) in domains:
            case = event["int64Value"] if event["int64Value"] is not None else event["uint64Value"]
            category = categories.get((process, event["domainId"], event["category"]), "")
            yield NsysRange(-1 if case is None else case, text, category, event["start"], event["end"], process)


def _work(database: sqlite3.Connection, tables: set[str]) -> Iterator[DeviceWork]:
    if CALLS not in tables:
        return
    start_of_launch = {
        (_process(row["globalTid"]), row["correlationId"]): row["start"]
        for row in database.execute(f"SELECT globalTid, correlationId, start FROM {CALLS}")
    }
    strings = _strings(database, tables)
    traced_launches = set()
    for kind in DeviceWorkKind:
        if kind.value not in tables:
            continue
        for row in database.execute(f"SELECT * FROM {kind.value} ORDER BY start"):
            activity = _Row(row)
            launch = (_process(activity["globalPid"]), activity["correlationId"])
            if kind is DeviceWorkKind.GRAPH and launch in traced_launches:
                continue
            traced_launches.add(launch)
            short, whole = activity["shortName"], activity["demangledName"]
            name = GRAPH_NAME if kind is DeviceWorkKind.GRAPH else strings.get(whole if short is None else short, "")
            copied = int(activity["bytes"] or 0) if kind is DeviceWorkKind.COPY else 0
            launched = start_of_launch.get(launch, -1)
            yield DeviceWork(kind, name, activity["start"], activity["end"], launched, launch[0], copied)


def _strings(database: sqlite3.Connection, tables: set[str]) -> dict[Any, str]:
    if STRINGS not in tables:
        return {}
    return {row["id"]: row["value"] for row in database.execute(f"SELECT id, value FROM {STRINGS}")}


def _process(number: int | None) -> int:
    return -1 if number is None else (number >> 24) & 0xFFFFFF


class _Row:
    def __init__(self, row: sqlite3.Row) -> None:
        self._row, self._names = row, set(row.keys())

    def __getitem__(self, name: str) -> Any:
        return self._row[name] if name in self._names else None
