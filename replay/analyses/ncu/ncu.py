"""Runs batches of cases under ncu, reads its reports, and adds the measured metrics to the rows."""

from __future__ import annotations

import csv
import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from opgrip.cli.command import counted
from opgrip.cli.journal import Codec, Journal
from opgrip.errors import UserError
from opgrip.replay.analyses.profiler_programs import (
    LAST_LINES,
    Flags,
    Key,
    key_of,
    last_words,
    merged_arguments,
    profiled_command,
    profiled_rows,
    run_program,
)
from opgrip.replay.results.columns import Columns, column
from opgrip.replay.results.results import RAN, Result
from opgrip.replay.run.request import RunRequest, identity
from opgrip.replay.timing.ranges import DOMAIN, NCU, row_name
from opgrip.replay.timing.timing_options import COLD, DISCRETE

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
    """Return the metrics in a comma-separated list of metrics and sets of metrics; kernel duration is always added."""
    metric_names = [DURATION]
    for word in filter(None, (word.strip() for word in text.split(","))):
        if word not in SETS and not NAMED.fullmatch(word):
            raise UserError(
                f"{word!r} is not a metric",
                f"choose a set ({', '.join(SETS)}) or a name that ncu --query-metrics prints",
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
    metrics : value of each metric by name, in ncu's base units, such as ns, bytes or percent
    """

    name: str
    ranges: str
    metrics: Mapping[str, float]


def read_report(binary: str, report: Path, requested_metrics: Sequence[str]) -> list[NcuKernel]:
    folder = module_folder(binary)
    if folder is not None:
        script_command = [sys.executable, str(SCRIPT), str(folder), str(report), *requested_metrics]
        done = _run_ncu(script_command)
        if done.returncode == 0:
            return [NcuKernel(**json.loads(line)) for line in done.stdout.splitlines()]
    done = _run_ncu([binary, f"--import={report}", *TO_CSV])
    if done.returncode:
        raise UserError(f"ncu cannot read its report: {last_words(done)}", "update ncu")
    return list(kernels_of_csv(done.stdout, requested_metrics))


def module_folder(binary: str) -> Path | None:
    beside = Path(binary).resolve().parent
    module_paths = (path for pattern in MODULES for path in sorted(beside.glob(f"{pattern}/ncu_report.py"))[::-1])
    return next((path.parent.resolve() for path in module_paths), None)


def kernels_of_csv(text: str, requested_metrics: Sequence[str]) -> Iterator[NcuKernel]:
    lines = text.splitlines(keepends=True)
    # ncu prints messages before the table
    start = next((index for index, line in enumerate(lines) if line.lstrip("\ufeff").startswith(f'"{FIRST}"')), None)
    if start is None:
        if any(line.strip() and not line.startswith("==") for line in lines):
            raise UserError(
                "opgrip does not know the format in which this ncu prints its report", "use another version of ncu"
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


def _run_ncu(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
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


@dataclass(frozen=True, slots=True)
class Batch:
    """The metrics that one ncu process measured for its batch of cases.

    outside : number of kernels in ncu's report that were not launched by a run of any row
    """

    number: int
    added: Mapping[Key, NcuColumns]
    outside: int


def batches_path(output: Path) -> Path:
    return output.with_name(f"{output.name}.ncu-journal")


def open_batches(path: Path | None, run_options: Mapping[str, Any], resume: bool) -> Journal[Batch]:
    def encode(batch: Batch) -> dict[str, Any]:
        rows = [[*key, asdict(added)] for key, added in batch.added.items()]
        return {"batch": batch.number, "rows": rows, "outside": batch.outside}

    def decode(record: Any) -> Batch:
        added = {(case, label): NcuColumns(**cells) for case, label, cells in record["rows"]}
        return Batch(record["batch"], added, record["outside"])

    return Journal(path, run_options, Codec(encode, decode), resume, replace=True)


FLAGS = Flags("--export", "--metrics", {"-o": "--export", "-f": "--force-overwrite"}, ("--nvtx-include",))
# usual installation paths of ncu, searched after PATH
PLACES = ("/usr/local/cuda*/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu", "/usr/local/NVIDIA-Nsight-Compute*/ncu")
COMMAND = "{command}"  # placeholder for ncu and its arguments in `--batch-command`

ALWAYS = (
    "--target-processes=all",
    "--profile-from-start=off",
    "--nvtx",
    # matches the rows' ranges; ncu appends nothing to the name of a start/end range
    f"--nvtx-include=regex:{DOMAIN}@case .+",
    "--clock-control=none",
    "--force-overwrite",
)
# factor by which the time limit of a run is increased, because ncu repeats each kernel for every few counters
SLOWER = 20
FORBIDDEN = "ERR_NVGPUCTRPERM"
NO_METRIC = re.compile(r"Failed to find metric[s]? (\S+)")
NO_KERNELS = "No kernels were profiled"


@dataclass(frozen=True, slots=True)
class Ncu:
    """How to run ncu, and what it measures.

    report : start of the reports' paths, to which `.batchN.ncu-rep` is added
    command : command line that contains `{command}` and starts ncu on another machine; None to run ncu on this one
    """

    binary: str
    report: Path
    metrics: Sequence[str] = BASIC
    arguments: Sequence[str] = ()
    warmup: int = 1
    iterations: int = 1
    batch_size: int = 10
    command: str | None = None
    device: str | None = None


class _Died(Exception):
    pass


class _NoMetric(Exception):
    pass


def profile_rows(
    request: RunRequest,
    results: Sequence[Result],
    ncu: Ncu,
    timeout_s: float,
    journal_path: Path | None,
    resume: bool,
    say: Callable[[str], None],
) -> tuple[list[Result], bool]:
    """Run the cases once more under ncu; return the rows with ncu's columns, and True if all batches succeeded."""
    cases = list(dict.fromkeys(row.case for row in results if row.status in RAN))
    parts = [cases[start : start + ncu.batch_size] for start in range(0, len(cases), ncu.batch_size)]
    ncu_options = json_of(ncu)
    journal = open_batches(journal_path, {"job": identity(request), "ncu": ncu_options, "batches": parts}, resume)
    request = replace(
        request,
        effort=replace(request.effort, warmup=ncu.warmup, iterations=ncu.iterations),
        inputs=replace(request.inputs, device=ncu.device or request.inputs.device),
        timing=replace(request.timing, exec_mode=DISCRETE, cache=request.timing.caches),
        profiled=NCU,
    )
    lost = 0
    for number, part in enumerate(parts, 1):
        if number in {batch.number for batch in journal.items}:
            continue
        rows = [row for row in results if row.case in part]
        try:
            batch, ncu = _batch_with_existing_metrics(request, rows, ncu, number, timeout_s, results, say)
            journal.add(batch)
        except _Died as death:
            lost += 1
            say(
                f"batch {number} of {len(parts)}, {counted(len(part), 'case')} from case {part[0]}, "
                f"was not profiled: {death}"
            )
    journal.close()
    _summarize(journal.items, ncu, say)
    if lost:
        again = "" if journal_path is None else "; profile them with --resume"
        say(f"{lost} of {len(parts)} batches of cases were not profiled{again}")
    added = {key: item for batch in journal.items for key, item in batch.added.items()}
    rows = [row.adding(added[key]) if (key := key_of(row)) in added else row for row in results]
    return rows, not lost


def json_of(ncu: Ncu) -> dict[str, object]:
    options = asdict(ncu)
    for name in ("binary", "report", "command"):
        del options[name]
    return options


def report_path(ncu: Ncu, number: int) -> Path:
    return ncu.report.with_name(f"{ncu.report.name}.batch{number}.ncu-rep")


def _batch_with_existing_metrics(
    request: RunRequest,
    rows: Sequence[Result],
    ncu: Ncu,
    number: int,
    timeout_s: float,
    everything: Sequence[Result],
    say: Callable[[str], None],
) -> tuple[Batch, Ncu]:
    try:
        return _batch(request, rows, ncu, number, timeout_s, everything), ncu
    except _NoMetric as lack:
        metric = _metric_named(str(lack), ncu.metrics)
        remaining_metrics = [name for name in ncu.metrics if name != metric]
        if metric is None or not remaining_metrics or all(metric not in names for names in SETS.values()):
            problem = f"ncu does not know the metric {metric or lack} on this GPU"
            raise UserError(problem, "name other metrics with --ncu-metrics") from None
    say(f"metric {metric} is left out, because this GPU does not have it")
    ncu = replace(ncu, metrics=remaining_metrics)
    return _batch_with_existing_metrics(request, rows, ncu, number, timeout_s, everything, say)


def _metric_named(text: str, metrics: Sequence[str]) -> str | None:
    plain = text.removeprefix("regex:^").replace("\\", "")
    matching = [name for name in metrics if re.match(rf"{re.escape(name)}(?!\w)", plain)]
    return max(matching, key=len, default=None)


def _batch(
    request: RunRequest, rows: Sequence[Result], ncu: Ncu, number: int, timeout_s: float, everything: Sequence[Result]
) -> Batch:
    others = {row.case for row in everything} - {row.case for row in rows}
    # in the folder of the results because `--batch-command` may run on a machine that does not share /tmp
    with tempfile.TemporaryDirectory(prefix=".opgrip-ncu-", dir=ncu.report.parent) as name:
        folder = Path(name).resolve()
        report = folder / "report.ncu-rep"
        _run(ncu, request, report, profiled_command(folder, request, others, timeout_s * SLOWER))
        kernels = read_report(ncu.binary, report, ncu.metrics)
        own = {key_of(row): row for row in profiled_rows(folder)}
        shutil.move(report, report_path(ncu, number))
    if not kernels:
        raise _Died(f"its report {report_path(ncu, number)} is empty")
    kernels_by_row, outside = joined(rows, kernels)
    added = {}
    for key, row_kernels in kernels_by_row.items():
        row = own.get(key)
        runs = ncu.iterations if row is None else max(1, row.samples + row.dropped)
        added[key] = columns_of(row_kernels, runs, ncu.metrics)
    return Batch(number, added, outside)


def _run(ncu: Ncu, request: RunRequest, report: Path, command: Sequence[str]) -> None:
    caches = f"--cache-control={'all' if request.timing.caches == (COLD,) else 'none'}"
    metrics_option = f"--metrics={','.join(ncu.metrics)}"
    arguments = merged_arguments((*ALWAYS, caches, metrics_option), ncu.arguments, FLAGS)
    ncu_command = [ncu.binary, *arguments, f"--export={report}", *command]
    started = ncu_command if ncu.command is None else in_template(ncu.command, ncu_command)
    try:
        done = run_program(started)
    except OSError as error:
        raise UserError(
            f"{started[0]} cannot be run: {error.strerror}", "correct the command given by --batch-command"
        ) from error
    printed = f"{done.stdout}\n{done.stderr}"
    if FORBIDDEN in printed:
        raise UserError(
            "this user may not read the GPU's counters",
            "run as root or with CAP_SYS_ADMIN, or set NVreg_RestrictProfilingToAdminUsers=0 for the kernel module "
            "nvidia and reload it",
        )
    unknown = NO_METRIC.search(printed)
    if unknown is not None:
        raise _NoMetric(unknown[1].rstrip(","))
    if not report.exists():
        raise _Died(_reason(printed, done.returncode))


def in_template(template: str, command: Sequence[str]) -> list[str]:
    words: list[str] = []
    for word in shlex.split(template):
        words += command if word == COMMAND else [word.replace(COMMAND, shlex.join(command))]
    return words


def _reason(printed: str, status: int) -> str:
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    if any(NO_KERNELS in line for line in lines):
        return "its cases launched no kernels"
    errors = [line.removeprefix("==ERROR==").strip() for line in lines if line.startswith("==ERROR==")]
    ended = f"status {status}" if status >= 0 else f"signal {-status}"
    return "; ".join((errors or lines or [ended])[-LAST_LINES:])


def _summarize(batches: Sequence[Batch], ncu: Ncu, say: Callable[[str], None]) -> None:
    outside = sum(batch.outside for batch in batches)
    if outside:
        say(f"{outside} kernels in ncu's reports belong to no row of the results")
    if batches:
        numbers = [batch.number for batch in batches]
        say(f"open ncu's reports in Nsight Compute: {report_path(ncu, min(numbers))} and so on to batch {max(numbers)}")
