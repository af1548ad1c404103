"""The names of recordings: a pattern that says which process, rank and time they are of."""

from __future__ import annotations

import os
import re
import socket
import time
from pathlib import Path

from opgrip.capture.ranks import rank, with_mark
from opgrip.traces.errors import UserError

DEFAULT = "step-%h-%p-%n.jsonl"
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
    values = {
        "h": socket.gethostname(),
        "p": str(os.getpid()),
        "r": str(rank() or 0),
        "t": time.strftime("%Y%m%dT%H%M%S", time.gmtime()),
        "n": str(number),
        "%": "%",
    }
    path = Path(_FIELD.sub(lambda field: values[field[1]], pattern))
    own = rank()
    if own is not None and "%r" not in pattern and "%p" not in pattern:
        path = with_mark(path, f"rank{own}")
    return _unused(path)


def of_pattern(pattern: str) -> re.Pattern[str]:
    """What matches the file names of this process's recordings of a pattern, and no other process's."""
    own = {"h": socket.gethostname(), "p": str(os.getpid()), "r": str(rank() or 0), "t": None, "n": None, "%": "%"}
    forms = {"t": r"\d{8}T\d{6}", "n": r"\d+"}
    parts = re.split(r"%(.)", Path(pattern).name)
    text = "".join(
        re.escape(part) if place % 2 == 0 else re.escape(own[part] or "") or forms[part]
        for place, part in enumerate(parts)
    )
    return re.compile(text)


def _unused(path: Path) -> Path:
    """The path, with a number before its suffixes where a file has that name."""
    number, free = 1, path
    while os.path.lexists(free):
        number += 1
        free = with_mark(path, str(number))
    return free
