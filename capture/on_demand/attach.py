"""Starts an agent in a process that runs: by Python's own means where it has them, else by a debugger."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from time import monotonic, sleep

from opgrip.capture.on_demand.client import listens
from opgrip.capture.on_demand.folder import pid_of, sockets
from opgrip.errors import UserError

ATTACHED = Path(__file__).with_name("attached.py")
GDB_SCRIPT = Path(__file__).with_name("gdb_script.py")
DEBUGGER_S = 60
LEAVE_S = 10
"""For the debugger to leave the process when that has taken too long."""
APPEAR_S = 20
"""For the agent's socket to appear."""
TRIES = 3
"""A process may be busy in each of its threads when it is stopped."""


def attach(pid: int) -> str:
    """Start an agent in a process; gives the way in which it was done, in words.

    Raises
    ------
    UserError : where the system does not allow it, or the process is none that can have one
    """
    _check_process(pid)
    if _has_agent(pid):
        raise UserError(f"process {pid} has an agent already", f"ask it with opcapture trigger {pid}")
    way = _start_agent(pid)
    until = monotonic() + APPEAR_S
    while not _has_agent(pid):
        if monotonic() > until:
            raise UserError(
                f"process {pid} started no agent", "its Python needs opgrip installed; its stderr says more"
            )
        sleep(0.05)
    return f"process {pid} has an agent now, {way}"


def _start_agent(pid: int) -> str:
    if not hasattr(sys, "remote_exec"):
        return _by_debugger(pid)
    try:
        return _by_python(pid)
    except UserError:
        # the process may run an older Python
        if shutil.which("gdb") is None:
            raise
    return _by_debugger(pid)


def _by_python(pid: int) -> str:
    """By what Python 3.14 has for it; the process runs the file at a place of its own choice."""
    try:
        # which the type checker's Python does not have
        vars(sys)["remote_exec"](pid, str(ATTACHED))
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(f"process {pid} cannot be attached to", str(error)) from error
    return "by sys.remote_exec"


def _by_debugger(pid: int) -> str:
    gdb = shutil.which("gdb")
    if gdb is None:
        raise UserError(
            f"process {pid} cannot be attached to",
            "this needs gdb, or Python 3.14 for both; else start it with an agent",
        )
    said = ""
    for _ in range(TRIES):
        said = _run_debugger(gdb, pid)
        if "opgrip: done" in said:
            return "by gdb"
        if "opgrip: no thread waits" not in said:
            break
        sleep(0.2)
    raise UserError(f"process {pid} cannot be attached to", _reason(said))


def _run_debugger(gdb: str, pid: int) -> str:
    """What gdb says; one that does not come back in time takes out of the process what it has put there."""
    # the process stands still while gdb reads symbols: of torch's libraries that takes many seconds
    quick = ["-iex", "set auto-solib-add off"]
    command = [gdb, "-nx", "-batch", *quick, "-p", str(pid), "-x", str(GDB_SCRIPT)]
    env = os.environ | {"OPGRIP_ATTACHED_FILE": str(ATTACHED), "DEBUGINFOD_URLS": ""}
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=env,
        # Ctrl-C comes to it from here
        start_new_session=True,
    ) as process:
        try:
            said, _ = process.communicate(timeout=DEBUGGER_S)
        except subprocess.TimeoutExpired as error:
            problem = f"process {pid} cannot be attached to"
            if _has_left(process):
                raise UserError(
                    problem, f"gdb did not come back within {DEBUGGER_S} s, and was told to leave it"
                ) from error
            raise UserError(
                problem, "gdb did not come back from it, and was killed: a breakpoint that stays may end the process"
            ) from error
        except BaseException:
            _has_left(process)
            raise
    return said


def _has_left(process: subprocess.Popen[str]) -> bool:
    """Let gdb give its call up and leave the process, which has a breakpoint of that call until then."""
    process.send_signal(signal.SIGINT)
    try:
        process.communicate(timeout=LEAVE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return False
    return True


def _reason(said: str) -> str:
    """Why gdb failed, in a line."""
    if re.search(r"ptrace: Operation not permitted|Could not attach", said):
        return "the system does not let gdb: as root, or with kernel.yama.ptrace_scope=0 and the capability SYS_PTRACE"
    if "no thread waits" in said:
        return "each of its threads is busy: try again"
    if "No symbol" in said:
        return "its Python hides the functions that are called"
    lines = [line for line in said.splitlines() if line.strip()]
    return lines[-1] if lines else "gdb says nothing"


def _check_process(pid: int) -> None:
    try:
        os.kill(pid, 0)
    except ProcessLookupError as error:
        raise UserError(f"there is no process {pid}") from error
    except PermissionError as error:
        raise UserError(f"process {pid} is another user's", "ask as its user") from error
    try:
        libraries = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    if "python" not in libraries:
        raise UserError(f"process {pid} runs no Python")


def _has_agent(pid: int) -> bool:
    return any(pid_of(path) == pid and listens(path) for path in sockets())
