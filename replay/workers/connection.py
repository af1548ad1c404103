"""A process that serves cases, from the side of the one that asks: another takes its place where it ends."""

from __future__ import annotations

import json
import os
import select
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from time import monotonic_ns
from types import TracebackType
from typing import Any

from opgrip.replay.results.results import FAILED, TIMEOUT
from opgrip.replay.workers.job import Job, Loaded
from opgrip.replay.workers.watch import NOTHING, Watch
from opgrip.replay.workers.worker_processes import POLL_S, Ended, Process, how_it_ended, last_words, start


class Connection:
    """A process, started when it is asked for something and again where it has ended.

    Parameters
    ----------
    timeout_s : of one run, or of making a row ready; None for as long as it takes
    may_fork : whether this process has run nothing of torch yet, and forks of it can
    """

    def __init__(self, job: Job, loaded: Loaded, timeout_s: float | None, may_fork: bool) -> None:
        self._job, self._loaded, self._timeout_s, self._may_fork = job, loaded, timeout_s, may_fork
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed at the exit
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._watch = Watch(self._file.fileno())
        self._process: Process | None = None
        self._killed = False
        self._buffer = b""

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._process is not None:
            if self._job.plan.profiled and error is None:
                # a profiler has what it saw of a process when that ends by itself
                self._process.let_end()
            else:
                self._process.kill()
            self._process.wait()
        self._file.close()
        self._errors.close()

    def fileno(self) -> int:
        """The descriptor that it says something on."""
        assert self._process is not None, "it was asked"
        return self._process.from_

    def ask(self, message: Mapping[str, Any]) -> None:
        """Tell the process what to do."""
        if self._process is None:
            self._watch.mark_idle()
            self._buffer, self._killed = b"", False
            self._process = start(self._job, self._loaded, self._watch, self._errors, self._may_fork)
        with suppress(BrokenPipeError):
            os.write(self._process.to, json.dumps(message).encode() + b"\n")

    def hear(self, wait_s: float = POLL_S) -> list[dict[str, Any]] | Ended:
        """What it has said since it was heard last; nothing where it says nothing for so long."""
        process = self._process
        assert process is not None, "it was asked"
        if not select.select([process.from_], [], [], wait_s)[0]:
            self._end_what_hangs(process)
            return []
        chunk = os.read(process.from_, 1 << 16)
        if not chunk:
            return self._ended(process)
        *lines, self._buffer = (self._buffer + chunk).split(b"\n")
        return [json.loads(line) for line in lines]

    def _ended(self, process: Process) -> Ended:
        at, code, words = self._watch.read(), process.wait(), last_words(self._errors)
        self._process = None
        if self._killed:
            return Ended(at.case, at.row, TIMEOUT, f"it took longer than {self._timeout_s:g} s")
        return Ended(at.case, at.row, FAILED, f"{how_it_ended(code)}{': ' if words else ''}{words}")

    def _end_what_hangs(self, process: Process) -> None:
        at = self._watch.read()
        if self._timeout_s is None or at.case == NOTHING or self._killed:
            return
        if monotonic_ns() - at.since_ns > self._timeout_s * 1e9:
            self._killed = True
            process.kill()
