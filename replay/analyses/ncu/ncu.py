"""Runs batches of cases under ncu, adds the measured metrics to the rows, and keeps finished batches for `--resume`."""

from __future__ import annotations

import re
import shlex
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opgrip.cli.command import counted
from opgrip.cli.journal import Codec, Journal
from opgrip.errors import UserError
from opgrip.replay.analyses.ncu.ncu_report import BASIC, SETS, NcuColumns, columns_of, joined, read_report
from opgrip.replay.analyses.profiler_programs import (
    LAST_LINES,
    Flags,
    Key,
    key_of,
    merged_arguments,
    profiled_command,
    profiled_rows,
    run_program,
)
from opgrip.replay.results.results import RAN, Result
from opgrip.replay.timing.ranges import DOMAIN, NCU
from opgrip.replay.timing.timing_options import COLD, DISCRETE

if TYPE_CHECKING:
    from opgrip.replay.run.request import RunRequest


@dataclass(frozen=True, slots=True)
class Batch:
    """The metrics that one ncu process measured for its batch of cases.

    number : number of the batch, from 1
    added : the columns of ncu for each row, by the row's key
    outside : number of kernels in ncu's report that were not launched by a run of any row
    """

    number: int
    added: Mapping[Key, NcuColumns]
    outside: int


def batches_path(output: Path) -> Path:
    """Return the path of the file that keeps finished batches for `--resume`."""
    return output.with_name(f"{output.name}.ncu-journal")


def open_batches(path: Path | None, run_options: Mapping[str, Any], resume: bool) -> Journal[Batch]:
    """Open the file of finished batches; those of an earlier run are used only if that run had the same options."""
    return Journal(path, run_options, Codec(_encoded, _decoded), resume, replace=True)


def _encoded(batch: Batch) -> dict[str, Any]:
    rows = [[*key, asdict(added)] for key, added in batch.added.items()]
    return {"batch": batch.number, "rows": rows, "outside": batch.outside}


def _decoded(record: Any) -> Batch:
    added = {(case, label): NcuColumns(**cells) for case, label, cells in record["rows"]}
    return Batch(record["batch"], added, record["outside"])


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

    report : path of the reports without its end, `.batchN.ncu-rep`
    arguments : more arguments for ncu, from the user
    warmup, iterations : number of warm-up runs and of profiled runs of each row
    batch_size : number of cases per ncu process
    command : command line that contains `{command}` and starts ncu on another machine; None to run ncu on this one
    device : device to profile on; None for the device of the replay
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
    """Raised if the GPU lacks a requested metric, so that ncu ran nothing; the message is the metric's name."""


def profile_rows(
    request: RunRequest,
    results: Sequence[Result],
    ncu: Ncu,
    timeout_s: float,
    journal_path: Path | None,
    resume: bool,
    say: Callable[[str], None],
) -> tuple[list[Result], bool]:
    """Run the cases once more under ncu; return the rows with ncu's columns, and True if all batches succeeded.

    timeout_s : time limit of a case without ncu, in seconds
    journal_path : file in which finished batches are kept; None to keep none
    resume : True to use the finished batches in that file Raises `UserError` if ncu fails for a reason that would
        affect every batch.
    """
    from opgrip.replay.run.request import identity

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
            say(f"batch {number} of {len(parts)}, {counted(len(part), 'case')} from case {part[0]}, is lost: {death}")
    journal.close()
    _summarize(journal.items, ncu, say)
    if lost:
        again = "" if journal_path is None else "; profile them with --resume"
        say(f"{lost} of {len(parts)} batches of cases were not profiled{again}")
    added = {key: item for batch in journal.items for key, item in batch.added.items()}
    rows = [row.adding(added[key]) if (key := key_of(row)) in added else row for row in results]
    return rows, not lost


def json_of(ncu: Ncu) -> dict[str, object]:
    """Return the settings of ncu that a resumed run must share with the interrupted one."""
    options = asdict(ncu)
    for place in ("binary", "report", "command"):
        del options[place]
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
    say(f"this GPU has no metric {metric}, which is left out")
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
    """Return the words of a command template, with `{command}` replaced by the words of `command`."""
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
