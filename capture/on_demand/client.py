"""Client of agents: sends requests to running processes, and starts agents in processes without one."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from time import monotonic, sleep
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


def listens(path: Path) -> bool:
    """Return True if a process listens on a socket; remove the socket if its process has ended."""
    try:
        _connect(path).close()
    except OSError as error:
        _clean_up(path, error)
        # the process is too busy to answer
        return isinstance(error, TimeoutError | BlockingIOError)
    return True


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
        return f"it runs without an agent: opcapture attach {word} starts one if the system allows it"
    if everyone:
        return f"these can: {listed([f'{item.pid} ({printable(item.name)})' for item in everyone])}"
    return "no process can; start one with opcapture --on-demand -- SCRIPT"


INJECTED = Path(__file__).with_name("injected.py")
DEBUGGER_S = 60
LEAVE_S = 10  # time in seconds for gdb to detach from the process after a timeout
APPEAR_S = 20  # time in seconds for the agent's socket to appear
TRIES = 3  # number of attempts, because all threads of a process may be busy when it is stopped


def attach(pid: int) -> str:
    """Start an agent in a running process, by Python's remote execution if possible, else by gdb.

    Return a line for the user that names the method.

    Raises UserError: the system does not allow it, or the agent cannot run in the process.
    """
    _check_process(pid)
    if _has_agent(pid):
        raise UserError(f"process {pid} already has an agent", f"record it with opcapture trigger {pid}")
    how = _inject(pid)
    until = monotonic() + APPEAR_S
    while not _has_agent(pid):
        if monotonic() > until:
            advice = "install opgrip in its Python; its stderr may contain the reason"
            raise UserError(f"process {pid} started no agent", advice)
        sleep(0.05)
    return f"process {pid} has an agent now, {how}"


def _inject(pid: int) -> str:
    if not hasattr(sys, "remote_exec"):
        return _inject_by_debugger(pid)
    try:
        # Python 3.14 or later, unknown to the type checker; the process runs the file at its next safe point
        vars(sys)["remote_exec"](pid, str(INJECTED))
        return "by sys.remote_exec"
    except (OSError, RuntimeError, ValueError) as error:
        # the process may run an older Python
        if shutil.which("gdb") is None:
            raise UserError(f"process {pid} cannot be attached to", str(error)) from error
    return _inject_by_debugger(pid)


def _inject_by_debugger(pid: int) -> str:
    problem = f"process {pid} cannot be attached to"
    gdb = shutil.which("gdb")
    if gdb is None:
        raise UserError(
            problem, "install gdb, use Python 3.14 in both processes, or start the program with opcapture --on-demand"
        )
    output = ""
    for _ in range(TRIES):
        output = _run_debugger(gdb, pid)
        if "opgrip: done" in output:
            return "by gdb"
        if "opgrip: no thread waits" not in output:
            break
        sleep(0.2)
    raise UserError(problem, _reason_of_debugger(output))


def _run_debugger(gdb: str, pid: int) -> str:
    """Run gdb on a process and return its output; after a timeout, gdb first removes its breakpoint from the
    process.
    """
    # the process is stopped while gdb reads symbols, which takes many seconds for torch's libraries
    quick = ["-iex", "set auto-solib-add off"]
    command = [gdb, "-nx", "-batch", *quick, "-p", str(pid), "-x", str(INJECTED)]
    env = os.environ | {"OPGRIP_ATTACHED_FILE": str(INJECTED), "DEBUGINFOD_URLS": ""}
    # start a new session, so that Ctrl-C reaches gdb only through this process
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=env,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=DEBUGGER_S)
        except subprocess.TimeoutExpired as error:
            if _leaves(process):
                reason = f"gdb did not finish within {DEBUGGER_S} s, and was detached"
            else:
                reason = "gdb did not detach and was killed: a remaining breakpoint may end the process"
            raise UserError(f"process {pid} cannot be attached to", reason) from error
        except BaseException:
            _leaves(process)
            raise
    return output


def _leaves(process: subprocess.Popen[str]) -> bool:
    """Interrupt gdb so that it removes its breakpoint from the process; return True if gdb ends, else kill it."""
    process.send_signal(signal.SIGINT)
    try:
        process.communicate(timeout=LEAVE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return False
    return True


def _reason_of_debugger(output: str) -> str:
    if re.search(r"ptrace: Operation not permitted|Could not attach", output):
        return "the system does not allow gdb: run as root, or with kernel.yama.ptrace_scope=0 and SYS_PTRACE"
    if "no thread waits" in output:
        return "each of its threads is busy: try again"
    if "No symbol" in output:
        return "its Python hides the functions that are called"
    lines = [line for line in output.splitlines() if line.strip()]
    return lines[-1] if lines else "gdb printed no reason"


def _check_process(pid: int) -> None:
    try:
        os.kill(pid, 0)
    except ProcessLookupError as error:
        raise UserError(f"no process has the number {pid}", "see opcapture list") from error
    except PermissionError as error:
        raise UserError(f"process {pid} is another user's", "run the command as that user") from error
    try:
        libraries = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    if "python" not in libraries:
        raise UserError(f"process {pid} does not run Python", "name the PID of a Python program")


def _has_agent(pid: int) -> bool:
    return any(pid_of(path) == pid and listens(path) for path in sockets())
