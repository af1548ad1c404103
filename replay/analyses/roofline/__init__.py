"""The roofline analysis: the least time that a machine needs for a call, and the resource that sets it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

from opgrip.cli.options import OUTPUT, option, titled
from opgrip.cli.terminal import print_line
from opgrip.display.tables import TableColumn, print_table
from opgrip.replay.analyses import Analysis, AnalysisSession, analyses
from opgrip.replay.cases.selection import FORWARD
from opgrip.replay.modes import EAGER, runs_graphs
from opgrip.replay.results.columns import Columns, column
from opgrip.replay.results.results import OK, Result
from opgrip.replay.run.kernels import arithmetic_dtype
from opgrip.replay.timing.timing_options import COLD, GRAPH, ON_DEVICE

if TYPE_CHECKING:
    from opgrip.platform.peaks import Peaks
    from opgrip.replay.run.workload import Workload

BANDWIDTH, ARITHMETIC, LAUNCH, INTERPRETER = "bandwidth", "arithmetic", "launch", "interpreter"
BOUNDS = (BANDWIDTH, ARITHMETIC, LAUNCH, INTERPRETER)


@dataclass(frozen=True, slots=True)
class LimitColumns(Columns):
    limit_us: float | None = column("shortest time in which this machine could run one call", "us")
    of_limit: float | None = column("`limit_us` divided by the median", "1")
    bound: str | None = column("resource that sets `limit_us`: `bandwidth`, `arithmetic`, `launch`, `interpreter`")


@dataclass(frozen=True, slots=True)
class Limit:
    """The least time that a machine needs for a call.

    bound : what limits the call: `bandwidth`, `arithmetic`, `launch` or `interpreter`
    level : name of the memory level from which its bytes are read
    """

    us: float
    bound: str
    level: str


def limit_of(
    flops: int | None,
    size: int,
    dtype: str | None,
    operators: int,
    ceilings: Peaks,
    threads: int = 1,
    cold: bool = False,
    launches: bool = True,
    by_interpreter: bool = True,
) -> Limit:
    level = ceilings.level(size, threads, cold)
    rate = ceilings.rate(dtype, threads)
    launch = ceilings.launch_us if size or flops else ceilings.dispatch_us
    times = {
        BANDWIDTH: size / ceilings.bandwidth(level, threads) / 1e3,
        ARITHMETIC: 0.0 if rate is None else (flops or 0) / rate / 1e3,
        LAUNCH: launch if launches else 0.0,
    }
    bound = max(times, key=lambda name: times[name])
    if by_interpreter and operators > 1 and operators * ceilings.launch_us > times[bound]:
        return Limit(times[bound], INTERPRETER, level.name)
    return Limit(times[bound], bound, level.name)


def with_limits(
    rows: Iterable[Result],
    ceilings: Peaks,
    threads_of: Callable[[Result], int],
    dtype_of: Callable[[Result], str | None] = lambda row: row.math_dtype,
    launches: bool = True,
) -> list[Result]:
    return [_with_limit(row, ceilings, threads_of(row), dtype_of(row), launches) for row in rows]


def dtype_of(workload: Workload) -> Callable[[Result], str | None]:
    """Return a function that determines the dtype in which a row's case computes: `tf32` instead of float32 if the
    recorded torch settings allow TF32.
    """
    context_of_case = {case.number: case.context for case in workload.cases}
    return lambda row: arithmetic_dtype(row, context_of_case.get(row.case, {}))


def threads_of(workload: Workload) -> Callable[[Result], int]:
    import torch

    threads_of_case = {case.number: case.context.get("threads") for case in workload.cases}
    usual, most = torch.get_num_threads(), os.cpu_count() or 1

    def threads(row: Result) -> int:
        count = row.threads or threads_of_case.get(row.case)
        return count if type(count) is int and 0 < count <= most else usual

    return threads


def usual_threads(rows: Iterable[Result], threads_of: Callable[[Result], int]) -> int:
    return Counter(map(threads_of, rows)).most_common(1)[0][0]


def _with_limit(row: Result, ceilings: Peaks, threads: int, dtype: str | None, launches: bool) -> Result:
    if row.status != OK or not row.median_us or row.bytes_moved is None:
        return row
    in_graph = row.method == GRAPH or runs_graphs(row.mode)
    limit = limit_of(
        row.flops,
        row.bytes_moved,
        dtype,
        row.operators or 1,
        ceilings,
        threads if ceilings.device == "cpu" else 1,
        row.cache == COLD,
        launches=launches and not in_graph and row.method not in ON_DEVICE,
        by_interpreter=launches and not in_graph,
    )
    if not limit.us:
        return row
    return row.adding(LimitColumns(limit.us, limit.us / row.median_us, limit.bound))


@dataclass(frozen=True, slots=True)
class Nearness:
    """The total time of one operator's calls, compared with the least time that the machine needs for them.

    share : share of these calls in the time of all calls that have a limit
    gain : share of the time of all calls that would be saved if each call took its least time
    """

    operator: str
    share: float
    calls: int
    us: float
    limit_us: float
    bound: str
    gain: float

    @property
    def of_limit(self) -> float:
        return self.limit_us / self.us


def nearness(rows: Sequence[Result]) -> list[Nearness]:
    limited = [row for row in rows if LimitColumns.of(row).limit_us is not None and row.median_us]
    total = sum(time_of(row) for row in limited)
    by_operator: dict[str, list[Result]] = {}
    for row in limited:
        by_operator.setdefault(_name(row), []).append(row)
    entries = [_nearness(name, own, total) for name, own in by_operator.items()]
    return sorted(entries, key=lambda item: -item.share)


def print_roofline(rows: Sequence[Result], file: IO[str]) -> None:
    entries = nearness(rows)
    if not entries:
        print("no roofline limit is known: nothing was timed, or the bytes and operations are unknown", file=file)
        return
    columns = [
        TableColumn("share", "share", ".1%", rank=2),
        TableColumn("operator", "operator", least=20),
        TableColumn("calls", "calls", ",d", rank=3),
        TableColumn("time us", "us", ",.0f", rank=1),
        TableColumn("limit us", "limit_us", ",.0f", rank=1),
        TableColumn("of limit", "of_limit", ".0%"),
        TableColumn("bound", "bound"),
        TableColumn("gain", "gain", ".1%"),
    ]
    print_table(columns, entries, file, "how near the times are to the machine's limit")
    us, limit = sum(item.us for item in entries), sum(item.limit_us for item in entries)
    bounds = Counter[str]()
    for item in entries:
        bounds[item.bound] += item.share  # type: ignore[assignment]
    bounds_text = ", ".join(f"{share:.0%} {bound}" for bound, share in bounds.most_common())
    print_line(f"{limit / us:.0%} of the machine's limit for all calls together; bounds: {bounds_text}", file)


def _nearness(name: str, rows: Sequence[Result], total: float) -> Nearness:
    limits = [(row, LimitColumns.of(row)) for row in rows]
    us, limit = sum(map(time_of, rows)), sum(row.count * (own.limit_us or 0.0) for row, own in limits)
    times: dict[str, float] = {}
    for row, own in limits:
        times[own.bound or ""] = times.get(own.bound or "", 0.0) + time_of(row)
    saved = sum(row.count * max((row.median_us or 0.0) - (own.limit_us or 0.0), 0.0) for row, own in limits)
    calls = sum(row.count for row in rows)
    return Nearness(name, us / total, calls, us, limit, max(times, key=lambda bound: times[bound]), saved / total)


def time_of(row: Result) -> float:
    """Return the total time in us of all calls that a row represents."""
    return row.count * (row.median_us or 0.0)


def _name(row: Result) -> str:
    return " ".join(
        [
            row.op,
            *([row.direction] if row.direction != FORWARD else []),
            *([row.mode] if row.mode != EAGER else []),
            *([f"threads {row.threads}"] if row.threads else []),
            *([f"batch x{row.batch_scale}"] if row.batch_scale != 1 else []),
        ]
    )


@titled("roofline and energy")
@dataclass(frozen=True, slots=True)
class RooflineOptions:
    roofline: bool = option(
        False,
        "compare each call with the machine's peak bandwidth and arithmetic rate, and report what limits "
        "it; -o roofline.svg plots it",
        only=("single cases", "one trace"),
        role=OUTPUT,
        common=True,
    )


@analyses.register("roofline")
class RooflineAnalysis(Analysis):
    options = RooflineOptions
    columns = LimitColumns
    order = 60
    counts_work = True

    @classmethod
    def is_requested(cls, options: RooflineOptions) -> bool:
        return options.roofline

    def add_to(self, rows: Sequence[Result]) -> list[Result]:
        from opgrip.platform.peaks import to_json

        ceilings, threads = ceilings_of(self.session), threads_of(self.session.workload)
        self.header = {"ceilings": to_json(ceilings), "threads": usual_threads(rows, threads)}
        return with_limits(rows, ceilings, threads, dtype_of(self.session.workload))

    def print(self, rows: Sequence[Result], file: IO[str]) -> None:
        print_roofline(rows, file)


def ceilings_of(session: AnalysisSession) -> Peaks:
    """Return the stored peak rates of the session's device; measure and store them if there are none."""
    from opgrip.platform.peaks import keep, read_cached_peaks
    from opgrip.replay.analyses.roofline.measuring import measure

    ceilings = read_cached_peaks(session.device)
    if ceilings is None:
        with session.reporter.following(
            "measuring the peak bandwidth and arithmetic rates of this machine"
        ) as on_progress:
            ceilings = measure(session.device, on_progress)
        path = keep(ceilings, session.device)
        session.reporter.say(f"the peak rates of {session.device} are stored in {path}; opgrip machine shows them")
    return ceilings
