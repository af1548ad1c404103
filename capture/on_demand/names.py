"""The names of recordings: a pattern that says which process, rank and time they are of."""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from pathlib import Path

from opgrip.capture.program.processes import rank, with_mark
from opgrip.errors import UserError

DEFAULT, PRIVATE_DEFAULT = "step-%h-%p-%n.jsonl", "private-%p-%n.jsonl"
FIELDS = {
    "h": "the host",
    "p": "the process's number",
    "r": "its rank, 0 where it has none",
    "t": "the time in UTC, as 20260131T235959",
    "n": "the number of the recording",
    "%": "a percent sign",
}
"""What stands for what after a percent sign."""
SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
"""How the names of traces end."""
_FIELD = re.compile(r"%(.?)", re.DOTALL)
_MARKS = re.compile(r"^([^.]*)(?:\.\d+)?(?:\.rank\d+)?(?=\.)")
"""What is added to a name for a rank, and where there is a file of that name already."""


def program_name() -> str:
    """What this process is called; a program that embeds Python may have no arguments."""
    return Path(sys.argv[0]).stem if getattr(sys, "argv", None) and sys.argv[0] else "python"


def check_pattern(pattern: str) -> None:
    """Raise `UserError` for a pattern that names no trace."""
    strange = next((field for field in _FIELD.findall(pattern) if field not in FIELDS), None)
    if strange is not None:
        raise UserError(
            f"%{strange} in {pattern} stands for nothing", f"use {', '.join(f'%{name}' for name in FIELDS)}"
        )
    if not pattern.endswith(SUFFIXES):
        raise UserError(f"{pattern} is no name of a trace", f"end it in {', '.join(SUFFIXES)}")


def recording_path(pattern: str, number: int) -> Path:
    """Where a recording of this process goes: a name that no file has."""
    path = _filled(pattern, number)
    own = rank()
    if own is not None and "%r" not in pattern and "%p" not in pattern:
        path = with_mark(path, f"rank{own}")
    return unused(path)


def folder_of(pattern: str) -> Path:
    """Where recordings of this process go."""
    return _filled(pattern, 1).parent


def _filled(pattern: str, number: int) -> Path:
    values = {
        "h": socket.gethostname(),
        "p": str(os.getpid()),
        "r": str(rank() or 0),
        "t": time.strftime("%Y%m%dT%H%M%S", time.gmtime()),
        "n": str(number),
        "%": "%",
    }
    return Path(_FIELD.sub(lambda field: values[field[1]], pattern))


def is_of_pattern(name: str, pattern: str) -> bool:
    """Whether a file is named as recordings of a pattern are on this host, whichever process made it."""
    number = r"\d+"
    host = re.escape(socket.gethostname())
    forms = {"h": host, "p": number, "r": number, "t": r"\d{8}T\d{6}", "n": number, "%": "%"}
    parts = _FIELD.split(Path(pattern).name)
    form = "".join(re.escape(part) if place % 2 == 0 else forms[part] for place, part in enumerate(parts))
    return any(re.fullmatch(form, text) for text in (name, _MARKS.sub(r"\1", name)))


def unused(path: Path) -> Path:
    """The path, with a number before its suffixes where a file has that name."""
    number, free = 1, path
    while os.path.lexists(free):
        number += 1
        free = with_mark(path, str(number))
    return free
