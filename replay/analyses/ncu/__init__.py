"""The Nsight Compute analysis (`--ncu`): its options, and the checks that it makes before any case runs."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from opgrip.cli.command import not_negative, positive
from opgrip.cli.options import EFFORT, OUTPUT, option, titled
from opgrip.cli.output_files import check_writable
from opgrip.errors import UserError
from opgrip.replay.analyses import Analysis, AnalysisSession, analyses
from opgrip.replay.analyses.ncu.ncu import COMMAND, FLAGS, PLACES, SETS, NcuColumns, metrics_of
from opgrip.replay.analyses.profiler_programs import arguments_in, find_program
from opgrip.replay.results.results import Result
from opgrip.replay.timing.ranges import check_ranges


@titled("profilers")
@dataclass(frozen=True, slots=True)
class NcuOptions:
    ncu: bool = option(
        False,
        "run the cases once more under Nsight Compute: adds time, bytes, throughput and occupancy of the "
        "kernels to each row, and writes reports next to --output",
        only=("single cases", "one trace"),
        role=OUTPUT,
        common=True,
    )
    ncu_metrics: str = option(
        "basic",
        f"metrics to collect: the sets {', '.join(SETS)}, or names of single metrics (default: %(default)s)",
        metavar="SET,...",
        role=OUTPUT,
    )
    ncu_bin: str | None = option(
        None, "path of ncu (default: on PATH, or where NVIDIA's installers put it)", metavar="FILE", role=OUTPUT
    )
    ncu_args_file: Path | None = option(
        None, "file with further arguments for ncu, written as on a command line", parse=Path, role=OUTPUT
    )
    ncu_warmup: int = option(1, "warm-up runs per case under ncu (default: 1)", parse=not_negative, role=EFFORT)
    ncu_iterations: int = option(1, "profiled runs per case under ncu (default: 1)", parse=positive, role=EFFORT)
    run_batch_size: int = option(
        10,
        "number of cases per ncu process; if the process crashes, only these cases are lost (default: 10)",
        parse=positive,
        role=EFFORT,
    )
    batch_command: str | None = option(
        None,
        f"command that starts each ncu process, such as 'srun --gres=gpu:1 {COMMAND}' (default: start it here)",
        metavar="TEMPLATE",
        needs=("--ncu",),
        role=OUTPUT,
    )
    batch_device: str | None = option(
        None,
        "device on which the processes that --batch-command starts run the cases (default: as --device)",
        metavar="DEVICE",
        needs=("--ncu",),
        role=OUTPUT,
    )


@analyses.register("ncu")
class NcuAnalysis(Analysis):
    options = NcuOptions
    columns = NcuColumns
    order = 30

    def __init__(self, options: NcuOptions, session: AnalysisSession) -> None:
        import torch

        from opgrip.platform.machine import check_device
        from opgrip.replay.analyses.ncu.ncu import Ncu, report_path

        super().__init__(options, session)
        session.check_one_cache("ncu")
        if options.batch_device is None:
            session.check_one_device("ncu")
        device = options.batch_device or session.device
        if torch.device(device).type != "cuda":
            lacks = "" if torch.cuda.is_available() else " (this machine has none)"
            raise UserError(
                f"ncu profiles only GPUs{lacks}, but the cases run on {device}",
                "give --device cuda, or --batch-device cuda with a --batch-command that reaches a GPU",
            )
        _check_template(options.batch_command)
        if options.batch_command is None:
            check_device(device)
        if any(count > 1 for count in session.workload.request.points.streams):
            raise UserError(
                "ncu runs one kernel at a time, and cannot run cases concurrently", "remove --streams or --ncu"
            )
        check_ranges("ncu")
        arguments = () if options.ncu_args_file is None else arguments_in(options.ncu_args_file, FLAGS)
        self._ncu = Ncu(
            find_program("ncu", "Nsight Compute", PLACES, options.ncu_bin),
            session.base.with_suffix(""),
            metrics_of(options.ncu_metrics),
            tuple(arguments),
            options.ncu_warmup,
            options.ncu_iterations,
            options.run_batch_size,
            options.batch_command,
            options.batch_device,
        )
        check_writable(report_path(self._ncu, 1), session.may_replace)

    @classmethod
    def is_requested(cls, options: NcuOptions) -> bool:
        return options.ncu

    def add_to(self, rows: Sequence[Result]) -> list[Result]:
        from opgrip.replay.analyses.ncu.ncu import batches_path, profile_rows

        session, request = self.session, self.session.workload.request
        journal_path = None if session.output is None else batches_path(session.output)
        with session.running(rows, "ncu"):
            new_rows, self.saw_all = profile_rows(
                request, rows, self._ncu, session.timeout_s, journal_path, session.resume, session.reporter.say
            )
        return new_rows

    def finish(self) -> None:
        from opgrip.replay.analyses.ncu.ncu import batches_path

        if self.session.output is not None:
            batches_path(self.session.output).unlink(missing_ok=True)


def _check_template(template: str | None) -> None:
    if template is None:
        return
    try:
        shlex.split(template)
    except ValueError as error:
        raise UserError(f"--batch-command is not a command line: {error}", "quote its words as in a shell") from error
    if COMMAND not in template:
        raise UserError(
            f"--batch-command {template!r} does not start ncu", f"put {COMMAND} where the ncu command belongs"
        )
