"""Runs cases in a process of their own: one that crashes, hangs or wants too much memory costs its row alone."""

from __future__ import annotations

import json
import os
import select
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic_ns
from types import TracebackType
from typing import Any

from opgrip.replay.cases import Case
from opgrip.replay.job import Job, Loaded
from opgrip.replay.preparation import empty_rows
from opgrip.replay.replay import windows
from opgrip.replay.results import FAILED, TIMEOUT, Result
from opgrip.replay.workers.processes import Process, how_it_ended, last_words, start
from opgrip.replay.workers.watch import NOTHING, Watch
from opgrip.traces.errors import UserError

POLL_S = 0.1
RETRIES = 2
"""Times that a process may end where no case is to blame."""


def supervise(
    job: Job,
    loaded: Loaded,
    timeout_s: float | None = None,
    done: Collection[int] = (),
    may_fork: bool = False,
) -> Iterator[list[Result]]:
    """The rows of each case, in the program's order, each as soon as its part of the cases is done.

    Parameters
    ----------
    timeout_s : of one run, or of making a case ready
    done : numbers of cases that are left out
    may_fork : whether this process has run nothing of torch yet, and forks of it can
    """
    without: list[int] = []
    cases = sorted((case for case in loaded.cases if case.number not in done), key=loaded.surroundings.first)
    if not cases:
        return
    with _Worker(job, loaded, timeout_s, may_fork) as worker:
        for window in windows(cases):
            rows = _window(worker, window, without, loaded)
            for case in window:
                yield rows[case.number]


def _window(worker: _Worker, cases: Sequence[Case], without: list[int], loaded: Loaded) -> dict[int, list[Result]]:
    rows: dict[int, list[Result]] = {}
    blameless = 0
    while left := [case for case in cases if case.number not in rows]:
        found, ended = worker.run([case.number for case in left], without)
        for row in found:
            rows.setdefault(row.case, []).append(row)
        if ended is None:
            continue
        at_fault = next((case for case in left if case.number == ended.case), None)
        if at_fault is not None:
            rows[ended.case] = empty_rows(at_fault, loaded.settings, ended.status, ended.reason)
        elif ended.case in loaded.surroundings.cases:
            without.append(ended.case)
        else:
            blameless += 1
            if blameless > RETRIES:
                raise UserError("the process that runs the cases cannot go on", ended.reason)
    return rows


@dataclass(frozen=True, slots=True)
class _Ended:
    """How a worker's process ended in the middle of a case."""

    case: int
    status: str
    reason: str


class _Worker:
    """The process that runs cases, and the next one where it ends."""

    def __init__(self, job: Job, loaded: Loaded, timeout_s: float | None, may_fork: bool) -> None:
        self._job, self._loaded, self._timeout_s, self._may_fork = job, loaded, timeout_s, may_fork
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed at the exit
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._watch = Watch(self._file.fileno())
        self._process: Process | None = None
        self._killed = False
        self._buffer = b""

    def __enter__(self) -> _Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._file.close()
        self._errors.close()

    def run(self, cases: Sequence[int], without: Sequence[int]) -> tuple[list[Result], _Ended | None]:
        """The rows of these cases, up to where the process ended, if it did."""
        if self._process is None:
            self._watch.left()
            self._buffer, self._killed = b"", False
            self._process = start(self._job, self._loaded, self._watch, self._errors, self._may_fork)
        self._ask({"cases": list(cases), "without": list(without)}, self._process)
        rows: list[Result] = []
        while message := self._hear(self._process):
            if "done" in message:
                return rows, None
            rows.append(Result(**message["row"]))
        return rows, self._ended(self._process)

    def _ended(self, process: Process) -> _Ended:
        at, code, words = self._watch.read(), process.wait(), last_words(self._errors)
        self._process = None
        if self._killed:
            return _Ended(at.case, TIMEOUT, f"a run took longer than {self._timeout_s:g} s")
        return _Ended(at.case, FAILED, f"{how_it_ended(code)}{': ' if words else ''}{words}")

    def _ask(self, message: Mapping[str, Any], process: Process) -> None:
        with suppress(BrokenPipeError):
            os.write(process.to, json.dumps(message).encode() + b"\n")

    def _hear(self, process: Process) -> dict[str, Any]:
        """The next message; an empty one where the process has ended."""
        while b"\n" not in self._buffer:
            if not select.select([process.from_], [], [], POLL_S)[0]:
                self._end_what_hangs(process)
                continue
            chunk = os.read(process.from_, 1 << 16)
            if not chunk:
                return {}
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def _end_what_hangs(self, process: Process) -> None:
        at = self._watch.read()
        if self._timeout_s is None or at.case == NOTHING or self._killed:
            return
        if monotonic_ns() - at.since_ns > self._timeout_s * 1e9:
            self._killed = True
            process.kill()
