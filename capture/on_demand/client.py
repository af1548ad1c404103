"""Ask processes to record, and check what they answer."""

from __future__ import annotations

import errno
import os
import socket
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any

from opgrip.capture.on_demand.folder import pid_of, sockets
from opgrip.capture.on_demand.words import ABOUT, DONE, PROTOCOL, RECORD, REFUSED, TELL, Connection
from opgrip.cli.command import listed, printable
from opgrip.errors import UserError, shortened

KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("answer", "why", "name", "command"), (str,)),
    **dict.fromkeys(("torch", "job", "file", "limit", "problem"), (str, type(None))),
    **dict.fromkeys(("parent", "recordings", "steps", "cut", "calls", "signatures", "dropped", "bytes"), (int,)),
    **dict.fromkeys(("rank", "world_size", "position", "began_at"), (int, type(None))),
    **dict.fromkeys(("recording", "stopped"), (bool,)),
    "notes": (list,),
}
"""Of the fields that are looked at here."""
OF_A_FILE = ("steps", "calls", "signatures", "dropped", "bytes")
"""What is said of a recording beside its file."""
MOST_NUMBER = 1 << 63
MOST_TEXT = 40


def check_answer(answer: Mapping[str, Any]) -> None:
    """Raise `ValueError` for an answer whose fields are not of their kinds, or that lacks some."""
    for name, value in answer.items():
        if name in KINDS and not _is_of_kind(value, KINDS[name]):
            raise ValueError(f"{name} cannot be {printable(shortened(repr(value), MOST_TEXT))}")
    if answer.get("answer") == DONE and answer.get("file"):
        missing = next((name for name in OF_A_FILE if name not in answer), None)
        if missing is not None:
            raise ValueError(f"{missing} is missing")


def _is_of_kind(value: Any, kinds: tuple[type, ...]) -> bool:
    if isinstance(value, bool):
        return bool in kinds
    if isinstance(value, int):
        return int in kinds and 0 <= value < MOST_NUMBER
    if isinstance(value, list):
        return list in kinds and all(isinstance(item, str) for item in value)
    return isinstance(value, kinds)


CONNECT_S = 2.0
TELL_S = 5.0
"""For a process to say what it is: one whose lock is held for longer is busy."""
MOST_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Process:
    """A process that can be asked.

    Attributes
    ----------
    socket : where
    about : what it says of itself; empty where it did not answer in time
    workers : the processes of its own, as those that load data, by their numbers
    """

    pid: int
    socket: Path
    about: dict[str, Any]
    workers: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """What it is called."""
        return str(self.about.get("name", "?"))

    @property
    def rank(self) -> int | None:
        """Its rank in its job; None where it is of none."""
        number = self.about.get("rank")
        return number if isinstance(number, int) else None

    @property
    def job(self) -> str | None:
        """What all ranks of its job have alike; None where it is of none."""
        word = self.about.get("job")
        return word if isinstance(word, str) else None

    def is_worker_of(self, other: Process) -> bool:
        """Whether another one has started it as a part of itself: of its rank, or without a job of its name."""
        if self.about.get("parent") != other.pid or (self.job, self.rank) != (other.job, other.rank):
            return False
        return self.job is not None or self.name == other.name


def processes() -> list[Process]:
    """The processes that can be asked, by their numbers; what others have left behind is cleaned away."""
    paths = list(sockets())
    if not paths:
        return []
    with ThreadPoolExecutor(min(len(paths), MOST_AT_ONCE)) as pool:
        items = [item for item in pool.map(_process_at, paths) if item is not None]
    return sorted(items, key=lambda item: item.pid)


def without_workers(items: Sequence[Process]) -> list[Process]:
    """The processes that no other of them started as a part of it; each knows its workers."""
    workers = {item.pid: [other.pid for other in items if other.is_worker_of(item)] for item in items}
    parts = {pid for pids in workers.values() for pid in pids}
    return [replace(item, workers=tuple(workers[item.pid])) for item in items if item.pid not in parts]


def find_processes(word: str) -> list[Process]:
    """The process of a number or a name; several where these are the ranks of one job. Workers have numbers alone.

    Raises
    ------
    UserError : where there is none, or several that are no ranks of one job
    """
    everyone = processes()
    items = [item for item in everyone if str(item.pid) == word] or [
        item for item in without_workers(everyone) if item.name == word
    ]
    if not items:
        raise UserError(f"process {word} cannot be asked to record", _advice(word, everyone))
    jobs = {item.job for item in items}
    if len(items) > 1 and (len(jobs) > 1 or None in jobs):
        numbers = ", ".join(str(item.pid) for item in items)
        raise UserError(f"{len(items)} processes are called {word}", f"name one by its number: {numbers}")
    return items


def converse(process: Process, do: str, **fields: Any) -> Iterator[dict[str, Any]]:
    """What a process answers to a request, as it comes.

    Raises
    ------
    UserError : for what it refuses, and where it ends before it is done
    """
    try:
        connection = _connect(process.socket)
    except OSError as error:
        raise UserError(f"process {process.pid} cannot be asked", _reason(error)) from error
    # a recording takes as long as its steps do
    until_s = inf if do == RECORD else monotonic() + TELL_S
    try:
        connection.send({"protocol": PROTOCOL, "do": do, **fields})
        while (message := _next_answer(process, connection, until_s)) is not None:
            if message.get("answer") == REFUSED:
                raise UserError(printable(message.get("why")))
            yield message
    except OSError as error:
        raise UserError(f"process {process.pid} does not answer any more", _reason(error)) from error
    finally:
        connection.close()


def _next_answer(process: Process, connection: Connection, until_s: float) -> dict[str, Any] | None:
    try:
        message = connection.receive(None if until_s == inf else until_s - monotonic())
        if message is not None:
            check_answer(message)
    except ValueError as error:
        raise UserError(f"process {process.pid} answers what cannot be read", printable(error)) from error
    return message


def _reason(error: OSError) -> str:
    return str(error.strerror or error).lower()


def listens(path: Path) -> bool:
    """Whether the process that a socket's name says is there; what another one has left behind is cleaned away."""
    try:
        _connect(path).close()
    except OSError as error:
        _clean_up(path, error)
        # too busy to say
        return isinstance(error, TimeoutError | BlockingIOError)
    return True


def _clean_up(path: Path, error: OSError) -> None:
    # elsewhere than on Linux a process that is busy refuses too; a number alone may be another process's by now
    if error.errno == errno.ECONNREFUSED and (sys.platform == "linux" or not _runs(pid_of(path) or 0)):
        with suppress(OSError):
            path.unlink()


def _process_at(path: Path) -> Process | None:
    """The process at a socket; None where nobody listens there any more."""
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
    return Process(pid, path, message if message.get("answer") == ABOUT else {})


def _connect(path: Path) -> Connection:
    """A conversation with the process that a socket's name says.

    Raises
    ------
    OSError : where nobody listens there, or another process does
    """
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    link.settimeout(CONNECT_S)
    try:
        link.connect(str(path))
        peer = peer_of(link)
        if peer is not None and peer != (pid_of(path), path.parent.lstat().st_uid):
            raise PermissionError(errno.EPERM, "another process listens in its place")
    except OSError:
        link.close()
        raise
    return Connection(link)


def peer_of(link: socket.socket) -> tuple[int, int] | None:
    """The process at the other end and its user, as they were when it began to listen; None where no system tells."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return None
    pid, user, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, option, struct.calcsize("3i")))
    return pid, user


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


def _advice(word: str, everyone: Sequence[Process]) -> str:
    if word.isdecimal() and _runs(int(word)):
        if _user_of(int(word)) not in (None, os.geteuid()):
            return "it is another user's: ask as its user, with the TMPDIR and XDG_RUNTIME_DIR that it has"
        return f"it runs without an agent: opcapture attach {word} starts one, where the system allows it"
    if everyone:
        return f"these can: {listed([f'{item.pid} ({printable(item.name)})' for item in everyone])}"
    return "no process can; start one with opcapture --on-demand -- SCRIPT"
