"""The options of `opreplay` that concern the machine's limits."""

from __future__ import annotations

import argparse

from opgrip.replay.measuring.energy import open_meter
from opgrip.traces.errors import UserError

DRAWING = ".svg"


def add_roofline(group: argparse._ArgumentGroup) -> None:
    """Add them to a parser."""
    group.add_argument(
        "--roofline",
        action="store_true",
        help="how near each call comes to what the machine can give, and what binds it; -o roofline.svg draws it",
    )
    group.add_argument(
        "--energy", action="store_true", help="run each case for a second more on a GPU: its energy, clock, throttling"
    )


def check_roofline(args: argparse.Namespace, device: str) -> None:
    """Raise `UserError` where the options do not go together, or the energy cannot be read."""
    if args.output is not None and args.output.suffix == DRAWING:
        if not args.roofline:
            raise UserError(f"{args.output} is a drawing of the roofline", "add --roofline, or end its name in .json")
        if args.append:
            raise UserError(f"rows cannot be added to {args.output}", "write .json or .csv")
    if args.energy:
        open_meter(device).close()
