"""Locks by which processes take turns: several at once, or one exclusively."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path


@contextmanager
def turn(path: Path, gate: Path, alone: bool) -> Iterator[None]:
    """Hold the lock of the file or folder `path` during the block. Processes get it in the order of their requests."""
    with ExitStack() as stack:
        with _locked(gate, fcntl.LOCK_EX):
            stack.enter_context(_locked(path, fcntl.LOCK_EX if alone else fcntl.LOCK_SH))
        yield


@contextmanager
def _locked(path: Path, kind: int) -> Iterator[None]:
    number = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(number, kind)
        yield
    finally:
        # closing does not unlock it if a process that was forked meanwhile still runs
        fcntl.flock(number, fcntl.LOCK_UN)
        os.close(number)
