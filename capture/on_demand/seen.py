"""Signatures that a service has called so far: only recordings with new ones are kept, and a file per day counts all
calls.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep

from opgrip.capture.program.processes import rank
from opgrip.cli.output_files import cannot_be_written, open_ordinary
from opgrip.errors import UserError
from opgrip.traces.analysis.difference_sides import SUFFIX, Side, read_day, write_day
from opgrip.traces.table.trace import load

LOCK_S = 10.0  # time in seconds to wait while another process of the service counts a recording


class SeenSignatures:
    """The signatures that all processes of a service on this machine have called.

    folder : folder of the service's recordings
    name : name of the service; None if its files must reveal neither name nor host
    """

    def __init__(self, folder: Path, name: str | None) -> None:
        own = rank()
        mark = "" if own is None else f".rank{own}"
        stem = "private" if name is None else f"{name}-{socket.gethostname()}"
        self._stem = re.sub(r"[^\w.-]", "_", f"{stem}{mark}")
        self._folder = folder
        self._known: set[str] = set()
        self._read: dict[Path, int] = {}
        self._reported: set[Path] = set()

    def day_file(self) -> Path:
        """Return the path of the file with today's counts (UTC)."""
        return self._folder / f"{self._stem}-{time.strftime('%Y-%m-%d', time.gmtime())}{SUFFIX}"

    def add(self, recording: Path) -> int:
        """Add the calls of a recording to today's counts; return the number of its signatures that are new to
        the service.
        """
        side = Side()
        side.add(load(recording))
        with self._locked():
            path = self.day_file()
            day = self._day(path)
            if day is None:
                if os.path.lexists(path):
                    path.replace(path.with_name(f"{path.name}.unread"))
                day = Side()
            self._read_other_days(path)
            new = side.cases.keys() - day.cases.keys() - self._known
            day.include(side)
            write_day(day, path)
        return len(new)

    def _read_other_days(self, today: Path) -> None:
        """Read the files of days other than `today` that have changed, because other processes of the service may still
        write them.
        """
        for path in self._folder.glob(f"{self._stem}-????-??-??{SUFFIX}"):
            changed_ns = path.stat().st_mtime_ns
            if path != today and self._read.get(path) != changed_ns:
                self._read[path] = changed_ns
                other = self._day(path)
                if other is not None:
                    self._known |= other.cases.keys()

    def _day(self, path: Path) -> Side | None:
        """Return the counts in the file of a day; None if it is missing or unreadable, which is reported once."""
        try:
            if path.is_symlink():
                raise UserError(f"{path} is a symbolic link", "remove it")
            return read_day(path) if path.exists() else None
        except UserError as error:
            if path not in self._reported:
                self._reported.add(path)
                print(
                    "opgrip: the recording is complete, but its calls are not counted in the list of known "
                    f"signatures: {error}",
                    file=sys.stderr,
                    flush=True,
                )
            return None

    @contextmanager
    def _locked(self) -> Iterator[None]:
        path, until_s = self._folder / f".{self._stem}.lock", monotonic() + LOCK_S
        try:
            file = open_ordinary(path)
        except OSError as error:
            raise cannot_be_written(path, error) from error
        with file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError as error:
                    if monotonic() >= until_s:
                        raise UserError(f"{path} is locked by another process", "end that process") from error
                    sleep(LOCK_S / 100)
            yield
