"""Columns about the kernels of a call, from the accelerator's own records of some runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from opgrip.replay.results.columns import Columns, column
from opgrip.replay.results.results import Result, Row, rate_of

if TYPE_CHECKING:
    # torch takes long to import, and this module is imported to print the help
    from opgrip.platform.activity_records import LaunchedWork


@dataclass(frozen=True, slots=True)
class KernelColumns(Columns):
    kernels: float | None = column("number of kernels, copies and fills of a run", heading="kernels")
    launches: float | None = column(
        "number of launches of kernels, copies and fills by the host in a run; a CUDA graph is one launch"
    )
    gpu_us: float | None = column(
        "time in which kernels, copies or fills of a run kept the GPU busy", "us", "kernels us"
    )
    launch_gap_us: float | None = column(
        "time in which the GPU was idle between the first and the last kernel, copy or fill of a run", "us"
    )
    launch_bound: bool | None = column(
        "True if the GPU waited for launches for longer than it was busy, between the first and the last kernel, "
        "copy or fill"
    )
    kernel_names: str | None = column("names of the kernels, copies and fills, with the number of each in a run")
    of_peak_rate: float | None = column(
        "`flops` divided by `gpu_us`, as a share of the datasheet's dense rate for `math_dtype`; of TF32 if "
        "the case may use it",
        "1",
    )
    of_peak_bandwidth: float | None = column(
        "`bytes_moved` divided by `gpu_us`, as a share of the bandwidth of memory in the datasheet; above 1 if caches "
        "hold the data",
        "1",
    )


def fill_kernels(row: Row, runs: Sequence[Sequence[LaunchedWork]], context: Mapping[str, Any]) -> None:
    """Add the columns about kernels to a row.

    runs : the device work of each recorded run, in order of launch; at least one run
    """
    from opgrip.platform.peaks import datasheet_of
    from opgrip.replay.operators.devices import name_of

    columns = kernel_columns(runs)
    sheet = datasheet_of(name_of(row.device))
    if sheet is not None and columns.gpu_us:
        rate, bytes_rate = rate_of(row.flops, columns.gpu_us), rate_of(row.bytes_moved, columns.gpu_us)
        peak = sheet.rate(arithmetic_dtype(row, context))
        columns = replace(
            columns,
            of_peak_rate=None if rate is None or peak is None else rate / peak,
            of_peak_bandwidth=None if bytes_rate is None else bytes_rate / sheet.gb_per_s,
        )
    row.add(columns)


def arithmetic_dtype(row: Result | Row, context: Mapping[str, Any]) -> str | None:
    """Return the name of the dtype in which a row's case computes; TF32 replaces float32 if the case may use it."""
    from opgrip.platform.peaks import TF32
    from opgrip.platform.precisions import is_tf32
    from opgrip.replay.operators.contexts import KINDS

    may_be_rounded = row.math_dtype == "float32" and row.device.partition(":")[0] in KINDS
    return TF32 if may_be_rounded and is_tf32(row.op, context) else row.math_dtype


def kernel_columns(runs: Sequence[Sequence[LaunchedWork]]) -> KernelColumns:
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
    """Return the distinct names, the most frequent first, each with its mean number per run, such as `a x2; b x1`."""
    return "; ".join(f"{name} x{number / runs:g}" for name, number in Counter(names).most_common())


def _figures(run: Sequence[LaunchedWork]) -> tuple[int, int, int]:
    if not run:
        return 0, 0, 0
    first, last = min(work.start_ns for work in run), max(work.end_ns for work in run)
    gaps = idle_spans((work.start_ns, work.end_ns) for work in run)
    launched_ns: dict[int, int] = {}
    launches = set[int]()
    for work in run:
        # later kernels of a launch, such as a graph's, do not wait for the host
        if work.launch not in launches:
            launched_ns[work.start_ns] = work.launched_ns
            launches.add(work.launch)
    idle_ns = sum(end - start for start, end in gaps)
    waiting_ns = sum(end - start for start, end in gaps if launched_ns.get(end, 0) > start)
    return last - first - idle_ns, idle_ns, waiting_ns


def idle_spans(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return (begin, end) of each gap between the spans."""
    gaps: list[tuple[int, int]] = []
    busy_until: int | None = None
    for start, end in sorted(spans):
        if busy_until is not None and start > busy_until:
            gaps.append((busy_until, start))
        busy_until = max(busy_until or end, end)
    return gaps
