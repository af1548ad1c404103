"""Processes of untrusted candidates, which are stopped except while they answer.

A candidate may change everything in its process, so nothing that it reports is believed:

- New values are written into new memory while the process is stopped.
- The time that it reports is checked by this process's clock: if a request takes longer outside the reported time than
  a request to run the operator does, the difference counts as the candidate's time.
- Results are read from the memory of the stopped process, at the addresses that it reported with its time.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from time import monotonic, perf_counter_ns
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opgrip.errors import UserError
from opgrip.platform.sandbox import Child, Ended, check_bubblewrap
from opgrip.replay.checks.verdicts import WrongResultError
from opgrip.replay.modes.candidate import Candidate
from opgrip.replay.operators.lookup import Unsupported
from opgrip.replay.run.workload import Workload

MODULE = "opgrip.replay.run.untrusted_process"
PAGE = mmap.PAGESIZE
MOST_PROCESSES = 32  # processes of candidates that are kept; a further one ends the one that ran longest ago
LEAST_BYTES = 16 << 20  # bytes of shared memory at first
STOPPED = "Tt"  # states of threads that a signal or a debugger stopped
STOPS_WITHIN_S = 10
OF_TIMEOUT = 0.9  # share of `--timeout` after which a candidate is ended, before the process that times it would be
# errors that a process may report
ERRORS = {
    kind.__name__: kind
    for kind in (UserError, Unsupported, ArithmeticError, AttributeError, IndexError, KeyError, MemoryError)
    + (NotImplementedError, RuntimeError, TypeError, ValueError, ZeroDivisionError)
}

_processes: dict[Candidate | None, UntrustedProcess] = {}


@cache
def unconfined() -> str | None:
    """Return why bubblewrap cannot confine processes here, and what still protects; None if it can."""
    try:
        check_bubblewrap()
    except UserError as error:
        return (
            f"{error.problem.replace('--sandbox', 'the sandbox of --untrusted')}: candidates can read files, write "
            "files and use the network; they still run in separate processes, whose times and results are checked "
            "from outside"
        )
    return None


class UntrustedProcess:
    def __init__(self, candidate: Candidate | None, workload: Workload) -> None:
        limits, self._owner = workload.request.limits, os.getpid()
        self._timeout_s = OF_TIMEOUT * limits.timeout
        self._file = os.memfd_create("opgrip", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        # memory that shrinks would end this process
        fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self._grow(LEAST_BYTES)
        self._next = 0
        request = {
            "candidate": None if candidate is None else asdict(candidate),
            "extensions": workload.request.inputs.extensions,
            "device": workload.device,
            "shared": self._file,
            "memory_limit": limits.memory_limit,
        }
        self._child = Child(MODULE, request, confined=None if unconfined() else [], shared=[self._file])
        self._leaf, self._above, self._mem = -1, -1, -1
        self._stopped: list[_Thread] = []
        self.took_ns = 0
        self.earlier: Sequence[Any] = ()
        self.latest: Sequence[Any] = ()

    def ask(self, message: Mapping[str, Any]) -> Any:
        """Let the process continue, send a message, stop the process and all that it started, and return its answer.

        Raises the error that the process reports, and `WrongResultError` if it has run since it was stopped.
        """
        if self._mem < 0:
            self._begin()
        # a timer of the system, or another process, can let it continue
        if self._stopped and list(_threads_below(self._above)) != self._stopped:
            raise WrongResultError("it runs while its process is stopped")
        began = perf_counter_ns()
        for pid in {thread.pid for thread in self._stopped}:
            _send_signal(pid, signal.SIGCONT)
        self._child.send(message)
        try:
            return self._answer()
        finally:
            self.took_ns = perf_counter_ns() - began
            self._stop()

    def _stop(self) -> None:
        until = monotonic() + STOPS_WITHIN_S
        while True:
            self._stopped = list(_threads_below(self._above))
            running = {thread.pid for thread in self._stopped if thread.state not in STOPPED}
            if not running:
                return
            for pid in running:
                _send_signal(pid, signal.SIGSTOP)
            if monotonic() > until:
                raise WrongResultError("its process cannot be stopped")

    def read(self, address: int, size: int) -> Tensor:
        """Return a copy of `size` bytes of the process's memory, (size,) uint8."""
        data = bytearray(size)
        view, done = memoryview(data), 0
        try:
            while done < size and (count := os.preadv(self._mem, [view[done : done + (1 << 30)]], address + done)):
                done += count
        except (OSError, OverflowError):
            done = -1
        if done < size:
            raise WrongResultError("its process sent addresses of results that are not in its memory")
        return torch.frombuffer(data, dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)

    def place(self, size: int) -> int:
        """Return the offset of free bytes in the shared memory, other ones than in the run before if there are
        enough.
        """
        if len(self.memory) < 2 * size:
            self._grow(2 * size)
        if self._next + size >= len(self.memory):
            self._next = PAGE * secrets.randbelow((len(self.memory) - size) // PAGE + 1)
        offset, self._next = self._next, self._next + max(size, PAGE)
        return offset

    def shared(self, offset: int, size: int) -> Tensor:
        """Return shared memory as a tensor, (size,) uint8."""
        if not size:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self.memory, dtype=torch.uint8, offset=offset, count=size)

    def mapped_at(self) -> list[tuple[int, int, int]]:
        """Return (first address, end, offset in the file) of each range at which the process sees shared memory."""
        own = f"{os.fstat(self._file).st_ino} "
        ranges = []
        for line in _read(f"/proc/{self._leaf}/maps").splitlines():
            if own in line and "memfd:opgrip" in line:
                addresses, _, offset, *_ = line.split()
                first, last = (int(word, 16) for word in addresses.split("-"))
                ranges.append((first, last, int(offset, 16)))
        return ranges

    def ids(self) -> list[int]:
        return _descendants(self._above)

    def close(self) -> None:
        # a fork of this process does not own the child
        if self._owner == os.getpid():
            for pid in reversed(_descendants(self._child.pid)):
                _send_signal(pid, signal.SIGKILL)
            self._child.close()
        if self._mem >= 0:
            os.close(self._mem)
        os.close(self._file)

    def _grow(self, size: int) -> None:
        os.ftruncate(self._file, size)
        self.memory = mmap.mmap(self._file, size)

    def _begin(self) -> None:
        self._answer()
        # nothing of the candidate has run: the last process is the one that will, and the one above adopts orphans
        self._above, self._leaf = [self._child.pid, *_descendants(self._child.pid)][-2:]
        self._mem = os.open(f"/proc/{self._leaf}/mem", os.O_RDONLY)
        self._child.send({})
        self._answer()
        self._stop()

    def _answer(self) -> Any:
        until = monotonic() + self._timeout_s
        messages: list[Any] = []
        while not messages:
            received = self._child.receive()
            if isinstance(received, Ended):
                raise UserError(received.reason)
            messages = received
            if monotonic() > until:
                raise UserError(f"it took longer than {self._timeout_s:g} s", "allow more with --timeout")
        if len(messages) > 1 or not isinstance(messages[0], dict | list):
            raise WrongResultError(f"its process did not send one JSON object or list but {str(messages)[:60]}")
        if isinstance(messages[0], dict) and "error" in messages[0]:
            kind, words = map(str, messages[0]["error"])
            raise ERRORS[kind](words) if kind in ERRORS else RuntimeError(f"{kind}: {words}")
        return messages[0]


class _Thread(NamedTuple):
    pid: int
    state: str
    turns: str


def _threads_below(pid: int) -> Iterator[_Thread]:
    for thread in _threads_of(pid):
        for child in map(int, _read(f"/proc/{pid}/task/{thread}/children").split()):
            for own in _threads_of(child):
                state = _read(f"/proc/{child}/task/{own}/stat").rpartition(")")[2][1:2]
                # zombies disappear at any time
                if state and state not in "ZX":
                    yield _Thread(child, state, _read(f"/proc/{child}/task/{own}/schedstat").rpartition(" ")[2])
            yield from _threads_below(child)


def _threads_of(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []


def _descendants(pid: int) -> list[int]:
    return list(dict.fromkeys(thread.pid for thread in _threads_below(pid)))


def _read(path: str) -> str:
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _send_signal(pid: int, number: int) -> None:
    with suppress(OSError):
        os.kill(pid, number)


def process_of(candidate: Candidate | None, workload: Workload) -> UntrustedProcess:
    """Return the process of a candidate, or the one that runs operators if `candidate` is None; start it if needed."""
    if candidate in _processes:
        # the last one ran last
        _processes[candidate] = _processes.pop(candidate)
    else:
        while len(_processes) >= MOST_PROCESSES:
            _processes.pop(next(iter(_processes))).close()
        _processes[candidate] = UntrustedProcess(candidate, workload)
    return _processes[candidate]


def untrusted_processes() -> list[int]:
    """Return the ids of the processes that run candidates and operators, and of those that they started."""
    return [pid for process in _processes.values() for pid in process.ids()]


def end_process(candidate: Candidate | None) -> None:
    if (process := _processes.pop(candidate, None)) is not None:
        process.close()
