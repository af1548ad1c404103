"""The options of `opreplay` that concern Nsight Compute."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

import torch

from opgrip.replay.profilers.installed import arguments_in, find_program
from opgrip.replay.profilers.ncu.metrics import SETS, metrics_of
from opgrip.replay.profilers.ncu.ncu import COMMAND, PLACES, Ncu, report_path
from opgrip.replay.timing.ranges import check_ranges
from opgrip.traces.command import not_negative, positive
from opgrip.traces.devices import check_device
from opgrip.traces.errors import UserError
from opgrip.traces.output import check_writable


def add_ncu(group: argparse._ArgumentGroup) -> None:
    """Add them to a parser."""
    group.add_argument(
        "--ncu",
        action="store_true",
        help="run the cases once more under Nsight Compute: times, bytes, throughput and occupancy of each row's "
        "kernels, and reports beside --output",
    )
    group.add_argument(
        "--ncu-metrics",
        default="basic",
        metavar="SET,...",
        help=f"sets, {', '.join(SETS)}, or names of metrics (default: %(default)s)",
    )
    group.add_argument("--ncu-bin", metavar="FILE", help="the program ncu (default: where installers put it)")
    group.add_argument(
        "--ncu-args-file", type=Path, metavar="FILE", help="further arguments of ncu, as on a command line"
    )
    group.add_argument(
        "--ncu-warmup", type=not_negative, default=1, metavar="N", help="runs before those that it sees (default: 1)"
    )
    group.add_argument("--ncu-iterations", type=positive, default=1, metavar="N", help="runs that it sees (default: 1)")
    group.add_argument(
        "--run-batch-size",
        type=positive,
        default=10,
        metavar="N",
        help="cases that a process of ncu sees; one that dies loses these alone (default: 10)",
    )
    group.add_argument(
        "--batch-command",
        metavar="TEMPLATE",
        help=f"starts each such process, as in 'srun --gres=gpu:1 {COMMAND}' (default: here)",
    )
    group.add_argument("--batch-device", metavar="DEVICE", help="that the cases run on there (default: as --device)")


def ncu_of(args: argparse.Namespace, device: str) -> Ncu | None:
    """How ncu is to be run; None where it is not.

    Parameters
    ----------
    device : that the cases run on

    Raises
    ------
    UserError : where it is not there, or cannot be used so
    """
    if not args.ncu:
        if args.batch_command is not None or args.batch_device is not None:
            raise UserError("--batch-command and --batch-device are for runs under ncu", "give --ncu too")
        return None
    profiled_device = args.batch_device or device
    if torch.device(profiled_device).type != "cuda":
        lacks = "" if torch.cuda.is_available() else " and this machine has none"
        raise UserError(
            f"ncu sees GPUs only{lacks}, but the cases run on {profiled_device}",
            "give --device cuda, or --batch-device cuda with a --batch-command that reaches a GPU",
        )
    _check_template(args.batch_command)
    if args.batch_command is None:
        check_device(profiled_device)
    if any(count > 1 for count in args.streams):
        raise UserError("ncu runs kernels one by one, and no cases at once", "leave --streams away, or --ncu")
    check_ranges("ncu")
    base = Path(args.trace.name if args.output is None else args.output).with_suffix("")
    arguments = () if args.ncu_args_file is None else arguments_in(args.ncu_args_file)
    binary = find_program("ncu", "Nsight Compute", PLACES, args.ncu_bin)
    ncu = Ncu(
        binary,
        base,
        metrics_of(args.ncu_metrics),
        tuple(arguments),
        args.ncu_warmup,
        args.ncu_iterations,
        args.run_batch_size,
        args.batch_command,
        args.batch_device,
    )
    check_writable(report_path(ncu, 1), args.force or args.append or args.resume)
    return ncu


def _check_template(template: str | None) -> None:
    if template is None:
        return
    try:
        shlex.split(template)
    except ValueError as error:
        raise UserError(f"--batch-command is no command line: {error}", "quote it as a shell wants it") from error
    if COMMAND not in template:
        raise UserError(f"--batch-command {template!r} starts nothing", f"put {COMMAND} where ncu is to stand")
