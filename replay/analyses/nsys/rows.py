"""Joins what a report has to the rows of a replay."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from opgrip.replay.analyses.nsys.report import Report, Span, Work
from opgrip.replay.analyses.profiling.rows import Key, key_of
from opgrip.replay.measuring.columns import Columns, column
from opgrip.replay.measuring.results import Result
from opgrip.replay.timing.ranges import DROPPED, PREPARE, READY


@dataclass(frozen=True, slots=True)
class NsysColumns(Columns):
    """What Nsight Systems saw of a row."""

    nsys_us: float | None = column("median of the runs that it saw, by its clock", "us", "nsys us")
    nsys_own_us: float | None = column(
        "median of the same runs by ours: what profiling costs is the distance from `median_us`", "us"
    )
    nsys_runs: int | None = column("runs that it saw")
    nsys_kernels: str | None = column("names of a run's kernels, and how many of each")
    nsys_launches: float | None = column("kernels of a run", heading="launches")
    nsys_gpu_us: float | None = column("time of a run's kernels on the GPU", "us", "gpu us")
    nsys_gap_us: float | None = column(
        "time between a run's first work on the GPU and its last in which that had nothing of it to do", "us", "gaps us"
    )
    nsys_copies: float | None = column("memcpys of a run")
    nsys_copied_bytes: int | None = column("of those of a run", "bytes")


@dataclass(slots=True)
class RunRecord:
    """What a profiler saw of the timed runs of a row.

    Attributes
    ----------
    spans : one a run
    work : on the device, by the run
    """

    spans: list[Span] = field(default_factory=list)
    work: dict[Span, list[Work]] = field(default_factory=lambda: defaultdict(list))


def joined(report: Report) -> tuple[dict[Key, RunRecord], int]:
    """What was seen of each row; and how many kernels and copies fall in no range."""
    records_by_row: dict[Key, RunRecord] = defaultdict(RunRecord)
    by_process: dict[int, list[Span]] = defaultdict(list)
    dropped: set[Span] = set()
    for span in report.spans:
        spans = records_by_row[span.case, span.category].spans
        if span.message == DROPPED and spans:
            dropped.add(spans.pop())
        elif span.message not in (PREPARE, READY, DROPPED):
            by_process[span.process].append(span)
            spans.append(span)
    starts = {process: [span.start_ns for span in spans] for process, spans in by_process.items()}
    outside = 0
    for work in report.work:
        place = bisect_right(starts.get(work.process, []), work.launched_ns) - 1
        run = by_process[work.process][place] if place >= 0 else None
        if run is None or run.end_ns < work.launched_ns:
            outside += 1
        elif run not in dropped:
            records_by_row[run.case, run.category].work[run].append(work)
    return {key: record for key, record in records_by_row.items() if record.spans}, outside


def with_seen(row: Result, own: Result | None, records_by_row: Mapping[Key, RunRecord]) -> Result:
    """A row with what the profiler saw of it.

    Parameters
    ----------
    own : the row of the run that was profiled
    """
    record = records_by_row.get(key_of(row))
    if record is None:
        return row
    timed = NsysColumns(
        nsys_us=median(span.end_ns - span.start_ns for span in record.spans) / 1e3,
        nsys_own_us=None if own is None else own.median_us,
        nsys_runs=len(record.spans),
    )
    return row.adding(timed if not record.work else _with_work(timed, record))


def _with_work(row: NsysColumns, record: RunRecord) -> NsysColumns:
    runs = len(record.spans)
    everything = [work for items in record.work.values() for work in items]
    kernels = [work for work in everything if not work.copied_bytes]
    copies = [work for work in everything if work.copied_bytes]
    names = Counter(work.name for work in kernels)
    return replace(
        row,
        nsys_kernels="; ".join(f"{name} x{count / runs:g}" for name, count in names.most_common()),
        nsys_launches=len(kernels) / runs,
        nsys_gpu_us=sum(work.end_ns - work.start_ns for work in kernels) / runs / 1e3,
        nsys_gap_us=median(map(_idle_ns, record.work.values())) / 1e3,
        nsys_copies=len(copies) / runs,
        nsys_copied_bytes=round(sum(work.copied_bytes for work in copies) / runs),
    )


def _idle_ns(work: Sequence[Work]) -> int:
    """Time between the first work of a run and the end of its last, in which the device did nothing of it."""
    idle, busy_until = 0, None
    for item in sorted(work, key=lambda item: item.start_ns):
        if busy_until is not None:
            idle += max(0, item.start_ns - busy_until)
        busy_until = max(busy_until or 0, item.end_ns)
    return idle
