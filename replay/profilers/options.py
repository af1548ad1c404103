"""The options of `opreplay` that concern profilers."""

from __future__ import annotations

import argparse
from pathlib import Path

from opgrip.replay.profilers.nsys.nsys import Nsys, arguments_in, find_nsys
from opgrip.traces.command import not_negative, positive
from opgrip.traces.errors import UserError
from opgrip.traces.output import check_writable

REPORT = ".nsys-rep"


def add_profilers(group: argparse._ArgumentGroup) -> None:
    """Add them to a parser."""
    group.add_argument(
        "--nsys",
        action="store_true",
        help="run the cases once more under Nsight Systems: kernels, launches, time on the GPU and gaps of each row, "
        "and a report beside --output",
    )
    group.add_argument("--nsys-bin", metavar="FILE", help="the program nsys (default: where installers put it)")
    group.add_argument(
        "--nsys-args-file", type=Path, metavar="FILE", help="further arguments of nsys profile, as on a command line"
    )
    group.add_argument(
        "--nsys-warmup", type=not_negative, default=3, metavar="N", help="runs before those that it sees (default: 3)"
    )
    group.add_argument(
        "--nsys-iterations", type=positive, default=10, metavar="N", help="runs that it sees (default: 10)"
    )


def nsys_of(args: argparse.Namespace) -> Nsys | None:
    """How nsys is to be run; None where it is not.

    Raises
    ------
    UserError : where it is not there, or cannot be used so
    """
    if not args.nsys:
        return None
    if any(count > 1 for count in args.streams):
        raise UserError("nsys cannot tell cases that run side by side apart", "leave --streams away, or --nsys")
    report = Path(args.trace.name if args.output is None else args.output).with_suffix(REPORT)
    check_writable(report, args.force or args.append or args.resume)
    arguments = () if args.nsys_args_file is None else arguments_in(args.nsys_args_file)
    return Nsys(find_nsys(args.nsys_bin), report, tuple(arguments), args.nsys_warmup, args.nsys_iterations)
