"""Recordings that the program itself requests, with `opgrip.capture.trigger()` or a signal, and `step()`, which
marks steps.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import count
from math import inf
from pathlib import Path
from time import perf_counter_ns
from types import FrameType
from typing import Any

from opgrip.capture.on_demand.agent import END_S, Agent, agent_here, start_agent
from opgrip.capture.on_demand.protocol import RecordingRequest, lines_of
from opgrip.capture.on_demand.settings import default_settings
from opgrip.errors import UserError, one_line, raise_if_from_program


def listen_to(number: signal.Signals) -> None:
    """Record the next steps whenever a signal arrives. The result is printed to stderr, because no client waits for it.

    Raises UserError: the program already handles that signal, or this is not its main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        raise UserError(
            f"{number.name} cannot start a recording", "torch was loaded outside of the program's main thread"
        )
    if signal.getsignal(number) is not signal.SIG_DFL:
        raise UserError(f"the program already has a handler for {number.name}", "choose another signal")
    signal.signal(number, _ask)


def _ask(_number: int, _frame: FrameType | None) -> None:
    # the main thread runs this between two lines of the program, so no exception may escape
    try:
        threading.Thread(target=_record, name="opgrip-recording", daemon=True).start()
    except Exception as error:
        raise_if_from_program(error)
        with suppress(Exception):
            # the interrupted line may be writing to sys.stderr, which cannot be entered again
            os.write(2, f"opgrip: no trace was written: {one_line(error)}\n".encode())


def _record() -> None:
    try:
        # a forked process keeps the handler but has another agent
        agent = agent_here()
        if agent is None:
            lines = ["this process has no agent"]
        else:
            waiting = lambda why: print_lines([f"no step has begun yet: {why}"])  # noqa: E731
            lines = lines_of(agent.record(RecordingRequest(), waiting=waiting))
    except Exception as error:
        lines = [str(error) if isinstance(error, UserError) else one_line(error)]
    print_lines(lines)


def print_lines(lines: Iterable[str]) -> None:
    """Print lines about a recording to stderr, because no client waits for them."""
    with suppress(Exception):
        for line in lines:
            print(f"opgrip: {line}", file=sys.stderr, flush=True)


def record_at_start(agent: Agent) -> None:
    """Record the program's next steps, and report the recording on stderr when it ends."""
    # begin here: the program must not make a step meanwhile
    session = agent.begin(RecordingRequest(wait_s=inf), perf_counter_ns())
    recording = threading.Thread(
        target=lambda: print_lines(lines_of(agent.finish(session))), name="opgrip-recording", daemon=True
    )
    recording.start()
    pid = os.getpid()

    def end() -> None:
        if os.getpid() == pid:
            agent.close()
            recording.join(END_S)

    atexit.register(end)


class MarkedSteps:
    """Counts the steps that the program marks with `step()`, and notifies the current recording of each."""

    def __init__(self) -> None:
        self.listeners: tuple[Callable[[], None], ...] = ()
        self._next = count().__next__
        self._last = -1

    @property
    def steps(self) -> int:
        return self._last + 1

    def step(self) -> None:
        self._last = self._next()
        for listener in self.listeners:
            listener()


marks = MarkedSteps()


def step() -> None:
    """Mark the end of a step of the program and the start of the next one, for recordings on demand.

    ::

        for batch in batches:
            train(batch)
            opgrip.capture.step()

    The call costs almost nothing while nothing is recorded. Each thread that calls this has separate steps. A `with`
    block of a torch mode must contain two consecutive calls, or neither of them.
    """
    marks.step()


class Triggered:
    """A recording that the program requested with `trigger`.

    result : facts about the recording: `file`, `steps`, `calls` and others; None while it runs, or if it failed
    problem : reason why the trace is missing; None if the trace exists or the recording still runs
    """

    def __init__(self) -> None:
        self.result: dict[str, Any] | None = None
        self.problem: str | None = None
        self._armed, self._done = threading.Event(), threading.Event()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the recording is written; return False if that takes longer than `seconds`."""
        return self._done.wait(seconds)

    def _run(self, agent: Agent, request: RecordingRequest) -> None:
        try:
            self.result = agent.record(request, lambda session: self._armed.set())
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
    """Record the next steps of this program, in any of its threads; return at once, while the recording runs in the
    background.

    ::

        if latency > limit:
            opgrip.capture.trigger("slow-%t.jsonl", steps=1, warmup=0)

    Later failures raise no exception; see `Triggered.problem`.

    output : name of the trace, a pattern such as `step-%h-%p-%n.jsonl`; None for the pattern set at the program's start
    steps : number of recorded steps; 3 unless the program was started with another number
    seconds : record all steps that begin within this time
    warmup : number of steps before the recorded ones, in which the capture examines new signatures
    step_module : pattern for the classes of modules whose outermost calls count as steps
    options : options of `Capture`

    Raises UserError: the agent, or the thread that records, cannot be started.
    """
    # import here: two threads that import torch at once get incomplete modules
    from opgrip.capture.on_demand import session

    session.load()
    agent = start_agent(default_settings())
    path = None if output is None else str(Path(output).absolute())
    triggered = Triggered()
    request = RecordingRequest(path, steps, seconds, warmup, step_module, options=options)
    thread = threading.Thread(target=triggered._run, args=(agent, request), name="opgrip-recording", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise UserError("this process cannot record", one_line(error)) from error
    triggered._armed.wait()
    return triggered
