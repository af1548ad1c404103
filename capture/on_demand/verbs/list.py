"""`opcapture list`: the processes that can be asked to record."""

from __future__ import annotations

import argparse
import sys

from opgrip.capture.on_demand.client import Process, processes
from opgrip.display.tables import TableColumn, print_table

DESCRIPTION = "Show the processes of this machine that can be asked to record."
EXAMPLES = """\
examples:
  opcapture list
"""


def prepare(parser: argparse.ArgumentParser) -> None:
    """The verb has no options."""


def run(args: argparse.Namespace) -> int:
    """Print a row for each."""
    items = processes()
    if not items:
        print("no process can be asked to record; start one with opcapture --on-demand -- SCRIPT", file=sys.stderr)
        return 0
    columns = [
        TableColumn("pid", "pid", "d"),
        TableColumn("name", "name", least=8),
        TableColumn("state", _state),
        TableColumn("rank", lambda item: "" if item.rank is None else item.rank, ">"),
        TableColumn("recordings", lambda item: item.about.get("recordings", ""), ">"),
        TableColumn("command", lambda item: item.about.get("command", "")),
    ]
    print_table(columns, items, sys.stdout)
    return 0


def _state(item: Process) -> str:
    if not item.about:
        return "busy"
    return "recording" if item.about.get("recording") else "idle"
