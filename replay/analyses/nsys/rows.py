"""Joins what a report has to the rows of a replay."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from opgrip.replay.analyses.nsys.report import Kind, Report, Span, Work
from opgrip.replay.analyses.profiling.rows import Key, key_of
from opgrip.replay.results.columns import Columns, column
from opgrip.replay.results.results import Result
from opgrip.replay.timing.ranges import BEFORE, DROPPED, PREPARE, READY


@dataclass(frozen=True, slots=True)
class NsysColumns(Columns):
    """What Nsight Systems saw of a row."""

    nsys_us: float | None = column("median of the runs that it saw, by its clock", "us", "nsys us")
    nsys_own_us: float | None = column(
        "median of the same runs by ours: what profiling costs is the distance from `median_us`", "us"
    )
    nsys_runs: int | None = column("runs that it saw")
    nsys_kernels: str | None = column(
        "names of a run's kernels, and how many of each; `CUDA graph` where nsys saw one as a whole alone"
    )
    nsys_launches: float | None = column("kernels of a run", heading="launches")
    nsys_gpu_us: float | None = column("time of a run's kernels on the GPU", "us", "gpu us")
    nsys_gap_us: float | None = column(
        "time between a run's first work on the GPU and its last in which that had nothing of it to do", "us", "gaps us"
    )
    nsys_copies: float | None = column("memcpys of a run")
    nsys_copied_bytes: int | None = column("of those of a run", "bytes")
    nsys_memsets: float | None = column("memsets of a run")


@dataclass(slots=True)
class Run:
    """A timed run of a row, or a phase around one, and the work on devices that was launched in it."""

    span: Span
    work: list[Work] = field(default_factory=list)


DELAY_KERNEL = "spin_kernel"
"""Of torch, which keeps the device busy before a run that its own clock times."""
Runs = dict[Key, list[Run]]
"""What a profiler saw of the timed runs of each row."""


def joined(report: Report) -> tuple[Runs, int]:
    """What was seen of each row; and how much of the work on devices was launched in no range of ours."""
    runs_by_row: Runs = defaultdict(list)
    all_by_process: dict[int, list[Run]] = defaultdict(list)
    for span in report.spans:
        run, runs = Run(span), runs_by_row[span.case, span.category]
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
        # ranges of one process follow each other
        place = bisect_right(starts.get(work.process, []), work.launched_ns) - 1
        run_before = all_by_process[work.process][place] if place >= 0 else None
        if run_before is None or run_before.span.end_ns < work.launched_ns:
            outside += 1
        else:
            run_before.work.append(work)
    return {key: runs for key, runs in runs_by_row.items() if runs}, outside


def joined_alone(reports: Iterable[Report]) -> tuple[Runs, int]:
    """The same of several reports, in each of which time begins anew."""
    runs_by_row: Runs = defaultdict(list)
    all_outside = 0
    for report in reports:
        own_runs, outside = joined(report)
        all_outside += outside
        for key, runs in own_runs.items():
            runs_by_row[key] += runs
    return dict(runs_by_row), all_outside


def with_seen(row: Result, own: Result | None, runs_by_row: Mapping[Key, list[Run]]) -> Result:
    """A row with what the profiler saw of it.

    Parameters
    ----------
    own : the row of the run that was profiled
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


def _with_work(row: NsysColumns, runs: Sequence[Run]) -> NsysColumns:
    count = len(runs)
    everything = [work for run in runs for work in run.work]
    kernels = [work for work in everything if work.kind in (Kind.KERNEL, Kind.GRAPH)]
    copies = [work for work in everything if work.kind is Kind.COPY]
    names = Counter(work.name for work in kernels)
    return replace(
        row,
        nsys_kernels="; ".join(f"{name} x{number / count:g}" for name, number in names.most_common()),
        nsys_launches=len(kernels) / count,
        nsys_gpu_us=sum(work.end_ns - work.start_ns for work in kernels) / count / 1e3,
        nsys_gap_us=median(_idle_ns(run.work) for run in runs if run.work) / 1e3,
        nsys_copies=len(copies) / count,
        nsys_copied_bytes=round(sum(work.copied_bytes for work in copies) / count),
        nsys_memsets=sum(work.kind is Kind.MEMSET for work in everything) / count,
    )


def _idle_ns(work: Sequence[Work]) -> int:
    """Time between the first work of a run and the end of its last, in which the device did nothing of it."""
    idle, busy_until = 0, None
    for item in sorted(work, key=lambda item: item.start_ns):
        if busy_until is not None:
            idle += max(0, item.start_ns - busy_until)
        busy_until = max(busy_until or 0, item.end_ns)
    return idle
