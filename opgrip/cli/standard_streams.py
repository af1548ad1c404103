"""Standard streams that were closed before a command was started, as some supervisors of jobs do."""

from __future__ import annotations

import os
import sys

NAMES = ("stdin", "stdout", "stderr")


def open_closed_streams() -> None:
    """Let what is closed be empty, and take all that is written: else the next file to be opened took its place."""
    for number, name in enumerate(NAMES):
        if getattr(sys, name) is None:
            file = os.open(os.devnull, os.O_RDWR)
            if file != number:
                os.dup2(file, number)
                os.close(file)
            stream = open(number, "w" if number else "r", encoding="utf-8", errors="replace")  # noqa: SIM115
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
