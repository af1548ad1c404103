"""Kernels of a replayed call: columns from the records that an accelerator kept of some of its runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from opgrip.platform.activity_records import LaunchedWork, idle_spans
from opgrip.replay.results.columns import Columns, column


@dataclass(frozen=True, slots=True)
class KernelColumns(Columns):
    """Columns from an accelerator's own records of runs like the timed ones, without the delay before a run."""

    kernels: float | None = column("number of kernels, copies and fills of a run", heading="kernels")
    launches: float | None = column("number of launches of these by the host; a CUDA graph is one launch")
    gpu_us: float | None = column(
        "time in which kernels, copies or fills of a run kept the GPU busy", "us", "kernels us"
    )
    launch_gap_us: float | None = column("time in which the GPU was idle between the first and the last of them", "us")
    launch_bound: bool | None = column(
        "True if the GPU waited for launches for longer than it was busy, between the first and the last of them"
    )
    kernel_names: str | None = column("names of the kernels, copies and fills, with the number of each in a run")


def kernel_columns(runs: Sequence[Sequence[LaunchedWork]]) -> KernelColumns:
    """Return the columns of a row.

    runs : the work of each run, in order of its begin; at least one run
    """
    figures = [_figures(run) for run in runs]
    busy_us, gap_us, waiting_us = (median(values) / 1e3 for values in zip(*figures, strict=True))
    return KernelColumns(
        kernels=fmean(map(len, runs)),
        launches=fmean(len({work.launch for work in run}) for run in runs),
        gpu_us=busy_us,
        launch_gap_us=gap_us,
        launch_bound=waiting_us > busy_us,
        kernel_names=counted_names((work.name for run in runs for work in run), len(runs)),
    )


def counted_names(names: Iterable[str], runs: int) -> str:
    """Return the distinct names, most frequent first, with the number of each in one of several runs."""
    return "; ".join(f"{name} x{number / runs:g}" for name, number in Counter(names).most_common())


def _figures(run: Sequence[LaunchedWork]) -> tuple[int, int, int]:
    """Return for how many ns a device was busy with a run, idle within it, and idle because a launch came too late."""
    if not run:
        return 0, 0, 0
    first, last = min(work.start_ns for work in run), max(work.end_ns for work in run)
    gaps = idle_spans((work.start_ns, work.end_ns) for work in run)
    launched_ns: dict[int, int] = {}
    known = set[int]()
    for work in run:
        # later kernels of a launch, such as a graph's, do not wait for the host
        if work.launch not in known:
            launched_ns[work.start_ns] = work.launched_ns
            known.add(work.launch)
    idle_ns = sum(end - start for start, end in gaps)
    waiting_ns = sum(end - start for start, end in gaps if launched_ns.get(end, 0) > start)
    return last - first - idle_ns, idle_ns, waiting_ns
