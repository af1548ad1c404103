"""Client of agents: finds running processes that can be recorded, and sends them requests."""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any

from opgrip.capture.on_demand.protocol import (
    ABOUT,
    ARMED,
    DONE,
    PROTOCOL,
    RECORD,
    REFUSED,
    STOP,
    TELL,
    WAITING,
    MessageSocket,
    check_answer,
    lines_of,
    peer_of,
    pid_of,
    sockets,
)
from opgrip.cli.command import listed, printable
from opgrip.cli.progress import Reporter
from opgrip.errors import UserError

CONNECT_S = 2.0
TELL_S = 5.0  # time for a process to describe itself; one that holds the interpreter lock longer counts as busy
MOST_AT_ONCE = 16
END_S = 10.0  # time in seconds for writing a recording that Ctrl-C has ended
MOST_WORKERS = 4  # maximum number of process ids of workers that are printed


@dataclass(frozen=True, slots=True)
class RecordableProcess:
    """A running process with an agent, which can be asked to record.

    socket : path of the agent's socket
    about : description by the process (see `Agent.about`); empty if it did not answer in time
    """

    pid: int
    socket: Path
    about: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.about.get("name", "?"))

    def is_worker_of(self, other: RecordableProcess) -> bool:
        """Return True if `other` started this process, for example as a data loader, and not as another rank."""
        return self.about.get("parent") == other.pid and (self.name, self.rank) == (other.name, other.rank)

    @property
    def rank(self) -> int | None:
        number = self.about.get("rank")
        return number if isinstance(number, int) else None


def processes() -> list[RecordableProcess]:
    """Return the processes with an agent, sorted by process id; sockets of processes that have ended are removed."""
    paths = list(sockets())
    if not paths:
        return []
    with ThreadPoolExecutor(min(len(paths), MOST_AT_ONCE)) as pool:
        items = [item for item in pool.map(_process_at, paths) if item is not None]
    return sorted(items, key=lambda item: item.pid)


def find_process(word: str, rank: int | None, reporter: Reporter) -> RecordableProcess:
    """Return the process with this process id or name.

    Processes that a process of the same name started, such as data loaders, are only found by process id.

    rank : the process's rank, if several ranks of a job have the name

    Raises UserError: no process matches, or several do.
    """
    everyone = processes()
    items = [item for item in everyone if str(item.pid) == word]
    if not items:
        named = [item for item in everyone if item.name == word]
        items = [item for item in named if not any(item.is_worker_of(other) for other in named)]
    if not items:
        raise UserError(f"process {word} does not accept requests to record", _advice(word, everyone))
    ranks = [item for item in items if rank in (None, item.rank)]
    if not ranks:
        raise UserError(f"no process {word} on this machine has rank {rank}", "see opcapture list")
    if len(ranks) > 1:
        numbers = ", ".join(str(item.pid) for item in ranks)
        choice = " or --rank" if rank is None and len({item.rank for item in ranks}) == len(ranks) else ""
        raise UserError(f"{len(ranks)} processes are called {word}", f"choose one by its PID{choice}: {numbers}")
    (process,) = ranks
    workers = [str(item.pid) for item in everyone if item.is_worker_of(process)]
    if workers and word == process.name:
        numbers = ", ".join(workers[:MOST_WORKERS] + ["..."] * (len(workers) > MOST_WORKERS))
        reporter.say(
            f"process {process.pid} has started others with the same name, which are not recorded: to record one, give "
            f"its PID: {numbers}"
        )
    return process


def record(process: RecordableProcess, request: Mapping[str, Any], reporter: Reporter) -> dict[str, Any]:
    """Record steps of a process, report the progress, and return the result, as `Agent.finish` does.

    Raises UserError: the process refuses the request, or ends before its recording does.
    """
    connection = _send(process, RECORD, request)
    try:
        try:
            return _follow(process, connection, inf, reporter)
        except KeyboardInterrupt:
            with suppress(UserError):
                list(converse(process, STOP))
                _follow(process, connection, monotonic() + END_S, reporter)
            raise
    finally:
        connection.close()


def _follow(
    process: RecordableProcess, connection: MessageSocket, until_s: float, reporter: Reporter
) -> dict[str, Any]:
    file = ""
    for answer in _answers(process, connection, until_s):
        if answer.get("answer") == ARMED:
            file = printable(answer.get("file", ""))
            reporter.say(f"process {process.pid} waits for a step")
        elif answer.get("answer") == WAITING:
            reporter.say(f"process {process.pid}: no step has begun yet: {printable(answer.get('why', ''))}")
        elif answer.get("answer") == DONE:
            for line in lines_of(answer):
                reporter.say(f"process {process.pid}: {printable(line)}")
            return answer
    hint = (
        f"its calls up to then are in {file}, or in the .part file next to it: read it with --partial" if file else ""
    )
    raise UserError(f"process {process.pid} ended before its recording did", hint)


def converse(process: RecordableProcess, do: str) -> Iterator[dict[str, Any]]:
    """Send a request without fields to a process and yield its answers as they arrive.

    Raises UserError: the process refuses the request, or does not answer in time.
    """
    connection = _send(process, do, {})
    try:
        yield from _answers(process, connection, monotonic() + TELL_S)
    finally:
        connection.close()


def _send(process: RecordableProcess, do: str, fields: Mapping[str, Any]) -> MessageSocket:
    try:
        connection = _connect(process.socket)
    except OSError as error:
        raise UserError(f"process {process.pid} cannot be reached", _reason(error)) from error
    try:
        connection.send({"protocol": PROTOCOL, "do": do, **fields})
    except OSError as error:
        connection.close()
        raise UserError(f"process {process.pid} no longer responds", _reason(error)) from error
    return connection


def _answers(process: RecordableProcess, connection: MessageSocket, until_s: float) -> Iterator[dict[str, Any]]:
    while True:
        try:
            message = connection.receive(None if until_s == inf else until_s - monotonic())
            if message is None:
                return
            check_answer(message)
        except ValueError as error:
            raise UserError(f"the answer of process {process.pid} cannot be read", printable(error)) from error
        except OSError as error:
            raise UserError(f"process {process.pid} no longer responds", _reason(error)) from error
        if message.get("answer") == REFUSED:
            raise UserError(printable(message.get("why")))
        yield message


def _reason(error: OSError) -> str:
    return str(error.strerror or error).lower()


def _process_at(path: Path) -> RecordableProcess | None:
    pid = pid_of(path)
    if pid is None:
        return None
    try:
        connection = _connect(path)
    except OSError as error:
        # outside of Linux a busy process refuses connections too, and the pid may have been reused
        if error.errno == errno.ECONNREFUSED and (sys.platform == "linux" or not _runs(pid)):
            with suppress(OSError):
                path.unlink()
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
