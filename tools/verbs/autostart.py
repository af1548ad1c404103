"""`opgrip autostart on`, `off`, `status`: the start-up file that lets programs of this environment be recorded."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from opgrip.capture.on_demand.autostart import LINE, VARIABLE, startup_file
from opgrip.cli.output_files import cannot_be_written, whole_file
from opgrip.errors import UserError
from opgrip.tools.verbs.verb import Verb, verbs

EXAMPLES = """\
examples:
  opgrip autostart on
  OPGRIP_CAPTURE=step-%h-%p.jsonl OPGRIP_STEPS=3 python server.py     and then: opcapture trigger server
  opgrip autostart off
"""


def run_on(args: argparse.Namespace) -> int:
    """Write the start-up file."""
    path = startup_file()
    if _is_ours(path):
        print(f"opgrip autostart: {path} already exists")
        return 0
    if path.exists():
        raise UserError(f"{path} was written by another version", "remove it with opgrip autostart off")
    try:
        with whole_file(path, force=False) as file:
            file.write(LINE.encode())
    except OSError as error:
        raise cannot_be_written(path, error) from error
    print(f"opgrip autostart: {path}: programs with {VARIABLE} set now accept requests to record")
    return 0


def run_off(args: argparse.Namespace) -> int:
    """Remove the start-up file."""
    path = startup_file()
    if not path.exists():
        print(f"opgrip autostart: already off: {path} does not exist")
        return 0
    try:
        path.unlink()
    except OSError as error:
        raise cannot_be_written(path, error) from error
    print(f"opgrip autostart: removed {path}")
    return 0


def run_status(args: argparse.Namespace) -> int:
    """Print whether the start-up file exists, and its path."""
    path = startup_file()
    if not path.exists():
        print(f"off: {path} does not exist")
    elif _is_ours(path):
        print(f"on: {path}, for programs of {sys.prefix} with {VARIABLE} set")
    else:
        print(f"on, from another version: {path}; update it with opgrip autostart off, then on")
    return 0


def _is_ours(path: Path) -> bool:
    try:
        return path.read_bytes() == LINE.encode()
    except OSError:
        return False


verbs.register("autostart on")(Verb("allow recording of programs without changing them", EXAMPLES, None, run_on))
verbs.register("autostart off")(Verb("remove the start-up file", EXAMPLES, None, run_off))
verbs.register("autostart status")(Verb("report if the start-up file exists", EXAMPLES, None, run_status))
