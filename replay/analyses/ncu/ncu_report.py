"""Reports of ncu: the metrics that can be measured, the kernels in a report, and the columns that they add to a row.

Metrics: https://docs.nvidia.com/nsight-compute/ProfilingGuide/index.html, "Metrics Reference".
"""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opgrip.errors import UserError
from opgrip.replay.analyses.profiler_programs import Key, key_of, last_words
from opgrip.replay.results.columns import Columns, column
from opgrip.replay.results.results import Result
from opgrip.replay.timing.ranges import row_name

DURATION = "gpu__time_duration.sum"
# metrics that are summed over the kernels of a run, by column
SUMS: Mapping[str, tuple[str, ...]] = {
    "ncu_dram_bytes": ("dram__bytes_read.sum", "dram__bytes_write.sum"),
    "ncu_l2_bytes": ("lts__t_bytes.sum",),
}
# metrics in percent that are averaged over the kernels of a run, weighted by time, by column
SHARES: Mapping[str, str] = {
    "ncu_dram_share": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "ncu_l2_share": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "ncu_sm_share": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "ncu_tensor_share": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "ncu_occupancy": "sm__warps_active.avg.pct_of_peak_sustained_active",
}
BASIC = (DURATION, *(name for names in SUMS.values() for name in names), *SHARES.values())
SETS: Mapping[str, tuple[str, ...]] = {
    "basic": BASIC,
    "memory": (*BASIC, "l1tex__t_bytes.sum", "l1tex__t_sector_hit_rate.pct", "lts__t_sector_hit_rate.pct"),
    "compute": (
        *BASIC,
        "smsp__inst_executed.sum",
        "smsp__sass_thread_inst_executed_op_fadd_pred_on.sum",
        "smsp__sass_thread_inst_executed_op_fmul_pred_on.sum",
        "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum",
    ),
}
# pattern of a metric's name: its unit, two underscores, the counter and its aggregation
NAMED = re.compile(r"[a-z0-9]+__\w+(\.\w+)*")


def metrics_of(text: str) -> tuple[str, ...]:
    """Return the names of the metrics in a comma-separated list of metrics and sets; always with the duration of
    kernels.
    """
    metric_names = [DURATION]
    for word in filter(None, (word.strip() for word in text.split(","))):
        if word not in SETS and not NAMED.fullmatch(word):
            raise UserError(
                f"{word!r} is not a metric", f"choose a set, {', '.join(SETS)}, or from ncu --query-metrics"
            )
        metric_names += SETS.get(word, (word,))
    return tuple(dict.fromkeys(metric_names))


# folders of ncu's Python module, relative to the program or to a script that starts it
MODULES = ("extras/python", "../nsight-compute*/extras/python", "../../nsight-compute*/extras/python")
SCRIPT = Path(__file__).with_name("extras.py")
TO_CSV = ("--csv", "--page=raw", "--print-units=base")
# headings of the first column, the column of kernel names, and the column of NVTX ranges
FIRST, KERNEL, RANGES = "ID", "Kernel Name", "Range:PL_Type"


@dataclass(frozen=True, slots=True)
class NcuKernel:
    """A launched kernel with its metrics.

    ranges : text that contains the names of the NVTX ranges in which it was launched
    metrics : value of each metric by name, in ns, bytes or percent
    """

    name: str
    ranges: str
    metrics: Mapping[str, float]


def read_report(binary: str, report: Path, requested_metrics: Sequence[str]) -> list[NcuKernel]:
    """Return the kernels of a report with their metrics; raise `UserError` if ncu cannot read the report.

    binary : path of ncu
    """
    folder = module_folder(binary)
    if folder is not None:
        script_command = [sys.executable, str(SCRIPT), str(folder), str(report), *requested_metrics]
        done = _run(script_command)
        if done.returncode == 0:
            return [NcuKernel(**json.loads(line)) for line in done.stdout.splitlines()]
    done = _run([binary, f"--import={report}", *TO_CSV])
    if done.returncode:
        raise UserError(f"ncu cannot read its report: {last_words(done)}", "update ncu")
    return list(kernels_of_csv(done.stdout, requested_metrics))


def module_folder(binary: str) -> Path | None:
    """Return the folder of the Python module `ncu_report` that belongs to an ncu, or None if there is none."""
    beside = Path(binary).resolve().parent
    module_paths = (path for pattern in MODULES for path in sorted(beside.glob(f"{pattern}/ncu_report.py"))[::-1])
    return next((path.parent.resolve() for path in module_paths), None)


def kernels_of_csv(text: str, requested_metrics: Sequence[str]) -> Iterator[NcuKernel]:
    """Yield the kernels in the CSV text that `ncu --page=raw` printed; raise `UserError` for other text."""
    lines = text.splitlines(keepends=True)
    # ncu prints messages before the table
    start = next((place for place, line in enumerate(lines) if line.lstrip("\ufeff").startswith(f'"{FIRST}"')), None)
    if start is None:
        if any(line.strip() and not line.startswith("==") for line in lines):
            raise UserError(
                "opgrip does not know the form in which this ncu prints its report", "use another version of ncu"
            )
        return
    rows = csv.reader(lines[start:])
    heading = [name.lstrip("\ufeff") for name in next(rows)]
    if KERNEL not in heading:
        raise UserError(f"the report that ncu prints has no column {KERNEL!r}", "use another version of ncu")
    next(rows, None)
    for cells in rows:
        row = dict(zip(heading, cells, strict=False))
        if row.get(FIRST, "").isdigit():
            ranges = "\n".join(cell for name, cell in row.items() if RANGES in name)
            yield NcuKernel(row.get(KERNEL, ""), ranges, dict(_metrics(row, requested_metrics)))


def _metrics(row: Mapping[str, str], requested_metrics: Sequence[str]) -> Iterator[tuple[str, float]]:
    for name in requested_metrics:
        with suppress(ValueError):
            yield name, float(row.get(name, "").replace(",", ""))


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False
        )
    except OSError as error:
        raise UserError(
            f"{command[0]} cannot be run: {error.strerror}", "set the path of ncu with --ncu-bin"
        ) from error


@dataclass(frozen=True, slots=True)
class NcuColumns(Columns):
    ncu_kernels: str | None = column("names of the kernels of a run, with the number of each")
    ncu_launches: float | None = column("number of kernels of a run")
    ncu_us: float | None = column("time of the kernels of a run", "us", "ncu us")
    ncu_dram_bytes: int | None = column("bytes that a run moves between the GPU and its memory", "bytes")
    ncu_l2_bytes: int | None = column("bytes that a run moves through the L2 cache", "bytes")
    ncu_dram_share: float | None = column("used share of the memory's peak bandwidth", "1", "dram")
    ncu_l2_share: float | None = column("used share of the L2 cache's peak bandwidth", "1")
    ncu_sm_share: float | None = column("used share of the multiprocessors' peak rate", "1", "sm")
    ncu_tensor_share: float | None = column("used share of the tensor cores' peak rate", "1", "tensor")
    ncu_occupancy: float | None = column("number of active warps, divided by the maximum", "1", "occupied")
    ncu_metrics: str | None = column("further metrics of `--ncu-metrics`, as `name=value; ...`")


def joined(rows: Sequence[Result], kernels: Sequence[NcuKernel]) -> tuple[dict[Key, list[NcuKernel]], int]:
    """Return the kernels that each row launched, by the row's key, and the number of kernels that no row launched."""
    keys = {row_name(row.case, row.op, key_of(row)[1]): key_of(row) for row in rows}
    # longest names first, because one name can be the start of another
    names = "|".join(re.escape(name) for name in sorted(keys, key=len, reverse=True))
    named = re.compile(rf"(?<!\w)(?:{names})(?![\w.])")
    kernels_by_row: dict[Key, list[NcuKernel]] = {}
    outside = 0
    for kernel in kernels:
        match = named.search(kernel.ranges)
        if match is None:
            outside += 1
        else:
            kernels_by_row.setdefault(keys[match.group()], []).append(kernel)
    return kernels_by_row, outside


def columns_of(kernels: Sequence[NcuKernel], runs: int, requested_metrics: Sequence[str]) -> NcuColumns:
    """Return ncu's columns of a row, as means over its runs.

    kernels : kernels of all profiled runs of the row
    """
    names = Counter(kernel.name for kernel in kernels)
    sums = {field: [_sum(kernels, name) for name in metrics] for field, metrics in SUMS.items()}
    shares: dict[str, Any] = {field: _mean(kernels, name) for field, name in SHARES.items()}
    own = {DURATION, *SHARES.values(), *(name for metrics in SUMS.values() for name in metrics)}
    others = {name: _per_run(kernels, runs, name) for name in requested_metrics if name not in own}
    duration = _sum(kernels, DURATION)
    return NcuColumns(
        ncu_kernels="; ".join(f"{name} x{count / runs:g}" for name, count in names.most_common()),
        ncu_launches=len(kernels) / runs,
        ncu_us=None if duration is None else duration / runs / 1e3,
        **{field: None if None in parts else round(sum(filter(None, parts)) / runs) for field, parts in sums.items()},
        **{field: None if share is None else share / 100 for field, share in shares.items()},
        ncu_metrics="; ".join(f"{name}={value:g}" for name, value in others.items() if value is not None) or None,
    )


def _sum(kernels: Sequence[NcuKernel], name: str) -> float | None:
    values = [kernel.metrics[name] for kernel in kernels if name in kernel.metrics]
    return sum(values) if values else None


def _mean(kernels: Sequence[NcuKernel], name: str) -> float | None:
    measured = [kernel for kernel in kernels if name in kernel.metrics]
    time = sum(map(_time, measured))
    return sum(kernel.metrics[name] * _time(kernel) for kernel in measured) / time if time else None


def _time(kernel: NcuKernel) -> float:
    return kernel.metrics.get(DURATION, 1.0)


def _per_run(kernels: Sequence[NcuKernel], runs: int, name: str) -> float | None:
    if name.endswith(".sum"):
        total = _sum(kernels, name)
        return None if total is None else total / runs
    return _mean(kernels, name)
