"""The options of `opreplay` that concern profilers."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from opgrip.replay.profilers.installed import arguments_in, find_program
from opgrip.replay.profilers.ncu.ncu import Ncu
from opgrip.replay.profilers.ncu.options import add_ncu, ncu_of
from opgrip.replay.profilers.nsys.nsys import PLACES, Nsys
from opgrip.replay.profilers.timeline import SUFFIX
from opgrip.replay.timing.ranges import check_ranges
from opgrip.traces.command import not_negative, positive
from opgrip.traces.errors import UserError
from opgrip.traces.output import check_writable

REPORT = ".nsys-rep"


@dataclass(frozen=True, slots=True)
class Profilers:
    """The profilers that cases run under once more; None for those that are not wanted.

    Attributes
    ----------
    timeline : where that of torch's own goes
    """

    nsys: Nsys | None
    ncu: Ncu | None
    timeline: Path | None


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
    add_ncu(group)
    group.add_argument(
        "--profile",
        action="store_true",
        help=f"run the cases once more under torch's profiler: a timeline for Perfetto beside --output, NAME{SUFFIX}",
    )


def profilers_of(args: argparse.Namespace, device: str) -> Profilers:
    """The profilers that a command line asks for.

    Parameters
    ----------
    device : that the cases run on

    Raises
    ------
    UserError : where one is not there, or cannot be used so
    """
    timeline = None
    if args.profile:
        timeline = _beside(args, SUFFIX)
        check_writable(timeline, _may_replace(args))
    return Profilers(_nsys_of(args), ncu_of(args, device), timeline)


def _nsys_of(args: argparse.Namespace) -> Nsys | None:
    if not args.nsys:
        return None
    if any(count > 1 for count in args.streams):
        raise UserError("nsys cannot tell cases that run side by side apart", "leave --streams away, or --nsys")
    check_ranges("nsys")
    report = _beside(args, REPORT)
    check_writable(report, _may_replace(args))
    arguments = () if args.nsys_args_file is None else arguments_in(args.nsys_args_file)
    binary = find_program("nsys", "Nsight Systems", PLACES, args.nsys_bin)
    return Nsys(binary, report, tuple(arguments), args.nsys_warmup, args.nsys_iterations)


def _beside(args: argparse.Namespace, suffix: str) -> Path:
    return Path(args.trace.name if args.output is None else args.output).with_suffix(suffix)


def _may_replace(args: argparse.Namespace) -> bool:
    return bool(args.force or args.append or args.resume)
