"""`opcapture stop`: end a recording early."""

from __future__ import annotations

import argparse
import sys

from opgrip.capture.on_demand.client import converse, find_processes
from opgrip.capture.on_demand.words import STOP

DESCRIPTION = "End the recording of a process before it has all its steps; the trace has those that have ended."
EXAMPLES = """\
examples:
  opcapture stop 4711
"""


def prepare(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("process", metavar="PID|NAME", help="as opcapture list shows it")


def run(args: argparse.Namespace) -> int:
    """Ask, and say whether there was one."""
    for process in find_processes(args.process):
        stopped = any(answer.get("stopped") for answer in converse(process, STOP))
        words = "its recording ends" if stopped else "it does not record"
        print(f"opcapture: process {process.pid}: {words}", file=sys.stderr)
    return 0
