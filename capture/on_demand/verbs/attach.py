"""`opcapture attach`: let a process that runs be asked to record, which was started without an agent."""

from __future__ import annotations

import argparse
import sys

from opgrip.capture.on_demand.attach import attach
from opgrip.cli.command import positive

DESCRIPTION = "Start an agent in a process that runs, where the system allows it: it can then be asked to record."
EXAMPLES = """\
examples:
  opcapture attach 4711 && opcapture trigger 4711
"""


def prepare(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("pid", type=positive, metavar="PID", help="of a Python process of this user")


def run(args: argparse.Namespace) -> int:
    """Attach, and say so."""
    words = attach(args.pid)
    print(f"opcapture: {words}: ask it with opcapture trigger {args.pid}", file=sys.stderr)
    return 0
