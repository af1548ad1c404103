"""Client of agents: finds running processes that can be recorded, and sends them requests."""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any

from opgrip.capture.on_demand.protocol import (
    ABOUT,
    PROTOCOL,
    RECORD,
    REFUSED,
    TELL,
    MessageSocket,
    check_answer,
    peer_of,
    pid_of,
    sockets,
)
from opgrip.cli.command import listed, printable
from opgrip.errors import UserError

CONNECT_S = 2.0
# time in seconds for a process to describe itself; a process that holds the interpreter lock longer counts as busy
TELL_S = 5.0
MOST_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class RecordableProcess:
    """A running process with an agent, which can be asked to record.

    pid, socket : process id, and path of the agent's socket
    about : description by the process (see `Agent.about`); empty if it did not answer in time
    workers : process ids of its workers, for example data loaders
    """

    pid: int
    socket: Path
    about: dict[str, Any]
    workers: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return str(self.about.get("name", "?"))

    @property
    def rank(self) -> int | None:
        number = self.about.get("rank")
        return number if isinstance(number, int) else None

    @property
    def job(self) -> str | None:
        word = self.about.get("job")
        return word if isinstance(word, str) else None

    def is_worker_of(self, other: RecordableProcess) -> bool:
        """Return True if `other` started this process as a worker.

        A worker has the same rank as the process that started it or, outside a job, the same name.
        """
        if self.about.get("parent") != other.pid or (self.job, self.rank) != (other.job, other.rank):
            return False
        return self.job is not None or self.name == other.name


def processes() -> list[RecordableProcess]:
    """Return the processes with an agent, sorted by process id; sockets of processes that have ended are removed."""
    paths = list(sockets())
    if not paths:
        return []
    with ThreadPoolExecutor(min(len(paths), MOST_AT_ONCE)) as pool:
        items = [item for item in pool.map(_process_at, paths) if item is not None]
    return sorted(items, key=lambda item: item.pid)


def without_workers(items: Sequence[RecordableProcess]) -> list[RecordableProcess]:
    """Return the processes that are not workers of others, each with the process ids of its workers."""
    workers = {item.pid: [other.pid for other in items if other.is_worker_of(item)] for item in items}
    parts = {pid for pids in workers.values() for pid in pids}
    return [replace(item, workers=tuple(workers[item.pid])) for item in items if item.pid not in parts]


def find_processes(word: str) -> list[RecordableProcess]:
    """Return the process with this process id or name, or all ranks of the job with this name.

    Workers are only found by process id.

    Raises UserError: no process matches, or several processes match that are not ranks of one job.
    """
    everyone = processes()
    items = [item for item in everyone if str(item.pid) == word] or [
        item for item in without_workers(everyone) if item.name == word
    ]
    if not items:
        raise UserError(f"process {word} does not accept requests to record", _advice(word, everyone))
    jobs = {item.job for item in items}
    if len(items) > 1 and (len(jobs) > 1 or None in jobs):
        numbers = ", ".join(str(item.pid) for item in items)
        raise UserError(f"{len(items)} processes are called {word}", f"name one by its PID: {numbers}")
    return items


def converse(process: RecordableProcess, do: str, **fields: Any) -> Iterator[dict[str, Any]]:
    """Send a request to a process and yield its answers as they arrive.

    do : kind of the request, one of `REQUESTS`
    fields : further fields of the request

    Raises UserError: the process refuses the request, or ends before it has answered.
    """
    try:
        connection = _connect(process.socket)
    except OSError as error:
        raise UserError(f"process {process.pid} cannot be reached", _reason(error)) from error
    # a recording takes as long as its steps do
    until_s = inf if do == RECORD else monotonic() + TELL_S
    try:
        connection.send({"protocol": PROTOCOL, "do": do, **fields})
        while (message := _next_answer(process, connection, until_s)) is not None:
            if message.get("answer") == REFUSED:
                raise UserError(printable(message.get("why")))
            yield message
    except OSError as error:
        raise UserError(f"process {process.pid} no longer responds", _reason(error)) from error
    finally:
        connection.close()


def _next_answer(process: RecordableProcess, connection: MessageSocket, until_s: float) -> dict[str, Any] | None:
    try:
        message = connection.receive(None if until_s == inf else until_s - monotonic())
        if message is not None:
            check_answer(message)
    except ValueError as error:
        raise UserError(f"the answer of process {process.pid} cannot be read", printable(error)) from error
    return message


def _reason(error: OSError) -> str:
    return str(error.strerror or error).lower()


def _clean_up(path: Path, error: OSError) -> None:
    # outside of Linux a busy process refuses connections too, and the pid may have been reused
    if error.errno == errno.ECONNREFUSED and (sys.platform == "linux" or not _runs(pid_of(path) or 0)):
        with suppress(OSError):
            path.unlink()


def _process_at(path: Path) -> RecordableProcess | None:
    """Return the process that listens on a socket, or None if there is none."""
    pid = pid_of(path)
    if pid is None:
        return None
    try:
        connection = _connect(path)
    except OSError as error:
        _clean_up(path, error)
        return None
    try:
        connection.send({"protocol": PROTOCOL, "do": TELL})
        message = connection.receive(TELL_S) or {}
        check_answer(message)
    except (OSError, ValueError):
        message = {}
    finally:
        connection.close()
    return RecordableProcess(pid, path, message if message.get("answer") == ABOUT else {})


def _connect(path: Path) -> MessageSocket:
    """Return a connection to the process that a socket's path names."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    link.settimeout(CONNECT_S)
    try:
        link.connect(str(path))
        peer = peer_of(link)
        if peer is not None and peer != (pid_of(path), path.parent.lstat().st_uid):
            raise PermissionError(errno.EPERM, "its socket was opened by another process")
    except OSError:
        link.close()
        raise
    return MessageSocket(link)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _user_of(pid: int) -> int | None:
    with suppress(OSError):
        return Path(f"/proc/{pid}").stat().st_uid
    return None


def _advice(word: str, everyone: Sequence[RecordableProcess]) -> str:
    if word.isdecimal() and _runs(int(word)):
        if _user_of(int(word)) not in (None, os.geteuid()):
            return "it is another user's: run the command as that user, with the process's TMPDIR and XDG_RUNTIME_DIR"
        return "it runs without an agent: start it with opcapture --on-demand -- SCRIPT"
    if everyone:
        return f"these can: {listed([f'{item.pid} ({printable(item.name)})' for item in everyone])}"
    return "no process can; start one with opcapture --on-demand -- SCRIPT"
