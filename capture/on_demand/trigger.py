"""Ways to ask for a recording of one's own steps: `step()`, `opgrip.capture.trigger()` and a signal."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

from opgrip.capture.on_demand.agent import Agent, agent_here, start_agent
from opgrip.capture.on_demand.names import DEFAULT, program_name
from opgrip.capture.on_demand.settings import Request, Settings
from opgrip.errors import UserError, one_line, raise_if_from_program

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


class Marks:
    """How many steps the program has ended, and who is told of each while a recording waits for some."""

    def __init__(self) -> None:
        self.listeners: tuple[Callable[[], None], ...] = ()
        self._next = count().__next__
        self._last = -1

    @property
    def steps(self) -> int:
        """How many steps the program has ended."""
        return self._last + 1

    def step(self) -> None:
        """Count a step that has ended."""
        self._last = self._next()
        for listener in self.listeners:
            listener()


marks = Marks()


def step() -> None:
    """Tell that a step of the program has ended and the next one begins, for recordings that are asked for.

    ::

        for batch in batches:
            train(batch)
            opgrip.capture.step()

    Costs next to nothing while nobody records. Each thread that calls it has steps of its own. It is no place for the
    block of a torch mode to begin or end between two calls of it.
    """
    marks.step()


class Triggered:
    """A recording that the program asked for.

    Attributes
    ----------
    result : what was recorded: `file`, `steps`, `calls` and others; None until it is done, or where it failed
    problem : why there is no trace; None where there is one, or it is not done
    """

    def __init__(self) -> None:
        self.result: dict[str, Any] | None = None
        self.problem: str | None = None
        self._armed, self._done = threading.Event(), threading.Event()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the recording is written; whether it is."""
        return self._done.wait(seconds)

    def _run(self, agent: Agent, request: Request) -> None:
        try:
            self.result = agent.record(request, lambda word, told: self._armed.set())
            self.problem = self.result["problem"]
        except Exception as error:
            self.problem = str(error) if isinstance(error, UserError) else one_line(error)
        finally:
            self._armed.set()
            self._done.set()


def trigger(
    output: str | Path | None = None,
    *,
    steps: int | None = None,
    seconds: float | None = None,
    warmup: int | None = None,
    step_module: str | None = None,
    **options: Any,
) -> Triggered:
    """Record the next steps of this program, whichever thread runs them, and go on.

    ::

        if latency > limit:
            opgrip.capture.trigger("slow-%t.jsonl", steps=1, warmup=0)

    When it returns, the next step is noticed. Nothing that fails later reaches the program: see `Triggered.problem`.

    Parameters
    ----------
    output : the trace, as a pattern such as `step-%h-%p-%n.jsonl`; None as the program was started
    steps : steps that are recorded; 3 where the program was not started with another number
    seconds : record the steps that begin in so much time
    warmup : steps before those, in which the capture learns
    step_module : a step is an outermost call of a module of such a class
    options : of `Capture`

    Raises
    ------
    UserError : where this process can have no agent, or no thread that records
    """
    # what a recording needs is loaded here: two threads that load torch at once get modules that are half done
    from opgrip.capture.on_demand import session

    session.load()
    agent = start_agent(Settings(program_name(), str(Path(DEFAULT).absolute())))
    path = None if output is None else str(Path(output).absolute())
    triggered = Triggered()
    request = Request(path, steps, seconds, warmup, step_module, options=options)
    thread = threading.Thread(target=triggered._run, args=(agent, request), name="opgrip-recording", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise UserError("this process cannot record", one_line(error)) from error
    triggered._armed.wait()
    return triggered
