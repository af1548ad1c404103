"""A signal that asks for a recording."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress
from types import FrameType

from opgrip.capture.on_demand.agent import agent_here
from opgrip.capture.on_demand.settings import Request
from opgrip.errors import UserError, one_line
from opgrip.hook_errors import raise_if_from_program

ADVISED = ("USR1", "USR2")
OURS = ("KILL", "STOP", "INT", "TERM", "SEGV", "FPE", "ILL", "BUS", "ABRT", "CHLD")
"""Signals that mean something else."""


def signal_of(name: str) -> signal.Signals:
    """The signal of a name such as USR1; `UserError` where there is none, or it means something else."""
    word = name.upper().removeprefix("SIG")
    number = getattr(signal, f"SIG{word}", None)
    if not isinstance(number, signal.Signals) or word in OURS:
        raise UserError(f"{name} is no signal that can ask for a recording", f"choose {' or '.join(ADVISED)}")
    return number


def listen_to(number: signal.Signals) -> None:
    """Ask the agent of this process when a signal comes; what was recorded is said on stderr, as nobody else is told.

    Raises
    ------
    UserError : where the program has a handler of that signal, which stays, or this is not its main thread
    """
    if threading.current_thread() is not threading.main_thread():
        raise UserError(f"{number.name} is not listened to", "torch was loaded outside of the program's main thread")
    if signal.getsignal(number) is not signal.SIG_DFL:
        raise UserError(f"{number.name} has a handler of the program, which stays", "choose another signal")
    signal.signal(number, _ask)


def _ask(_number: int, _frame: FrameType | None) -> None:
    # the program's main thread runs this between two of its lines: nothing may reach it
    try:
        threading.Thread(target=_record, name="opgrip-recording", daemon=True).start()
    except Exception as error:
        raise_if_from_program(error)
        with suppress(Exception):
            # the line may be one that writes to sys.stderr, which nobody else may enter then
            os.write(2, f"opgrip: there is no trace: {one_line(error)}\n".encode())


def _record() -> None:
    from opgrip.capture.on_demand.telling import lines_of

    try:
        # a forked process has kept the handler, and has an agent of its own
        agent = agent_here()
        lines = ["this process has no agent"] if agent is None else lines_of(agent.record(Request()))
    except Exception as error:
        lines = [str(error) if isinstance(error, UserError) else one_line(error)]
    with suppress(Exception):
        for line in lines:
            print(f"opgrip: {line}", file=sys.stderr, flush=True)
