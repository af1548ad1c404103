"""`opgrip autostart on`, `off`, `status`: the start-up file that lets programs of this environment be recorded."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from opgrip.capture.on_demand.autostart import LINE, VARIABLE, startup_file
from opgrip.cli.output_files import cannot_be_written, whole_file
from opgrip.errors import UserError
from opgrip.tools.verbs import verb

EXAMPLES = """\
examples:
  opgrip autostart on
  OPGRIP_CAPTURE=step-%h-%p.jsonl OPGRIP_STEPS=3 python server.py     and then: opcapture trigger server
  opgrip autostart off
"""


@verb("autostart on", "allow recording of programs without changing them", EXAMPLES)
def run_on(args: argparse.Namespace) -> int:
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


@verb("autostart off", "remove the start-up file", EXAMPLES)
def run_off(args: argparse.Namespace) -> int:
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


@verb("autostart status", "report if the start-up file exists", EXAMPLES)
def run_status(args: argparse.Namespace) -> int:
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
