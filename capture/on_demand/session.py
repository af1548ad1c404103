"""One recording on demand in the recorded process, from its request to its file."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any

from torch.profiler import record_function

from opgrip.capture.hooks.compiled import CompiledWatch
from opgrip.capture.hooks.scopes import ThreadWatch
from opgrip.capture.on_demand.protocol import RecordingRequest
from opgrip.capture.on_demand.recorded_steps import Extent, StepDetector, StepRecording
from opgrip.capture.on_demand.settings import AgentSettings, check_pattern, recording_path
from opgrip.capture.program.capture_choices import EVENTS
from opgrip.capture.program.environment import describe_autocast
from opgrip.capture.program.processes import unused
from opgrip.capture.recording.thread_mode import ThreadMode
from opgrip.capture.session.capture import Capture
from opgrip.capture.session.graph_keeper import GraphKeeper
from opgrip.capture.session.schedule import ALWAYS, Schedule, Watching
from opgrip.capture.torch_compat.torch_private import innermost_mode, load_private
from opgrip.cli.output_files import give_name
from opgrip.errors import ExistingFileError
from opgrip.traces.values import value_models


@dataclass(slots=True)
class ThreadStep:
    mode: ThreadMode
    mark: record_function | None = None


class StepCapture(Capture):
    """A capture that records each thread from the start to the end of its steps, and not between them.

    Threads started during a step are not recorded: only a thread itself can remove its dispatch mode, and a mode that
    is never removed would slow the thread for ever.

    warmup : True to begin with steps whose calls are examined but not recorded
    """

    def __init__(self, path: Path, warmup: bool, **options: Any) -> None:
        # records of kernels begin and end in one thread, and a step may run in any
        super().__init__(path, schedule=Schedule(warmup=1) if warmup else ALWAYS, device_time=EVENTS, **options)
        self.path = path
        self._file = path.absolute()
        self._recorder.threads.by_steps = True
        watches = [watch for watch in self._watching.watches if not isinstance(watch, ThreadWatch)]
        # until a step begins, compiled code runs as usual
        self._of_compiled = [watch for watch in watches if isinstance(watch, CompiledWatch)]
        self._hooks, self._hooks_lock = ExitStack(), threading.Lock()
        others = [watch for watch in watches if watch not in self._of_compiled]
        self._watching = Watching(self._recorder, others, with_mode=False)

    def open(self) -> None:
        """Create the file of the trace and watch for steps; no call is recorded yet."""
        try:
            self._open()
            self.set_learning(self.schedule.warmup > 0)
            # steps are counted by StepRecording
            self.schedule = ALWAYS
            self._watching.resume()
            self.discard(if_empty=True)
        except BaseException:
            self.discard()
            self.close()
            raise

    def close(self) -> None:
        flusher = self._flusher
        super().close()
        with self._hooks_lock:
            self._of_compiled.clear()
            self._hooks.close()
        if flusher is not None and flusher.writer is not None and isinstance(self.failure, ExistingFileError):
            self._take_another_name(flusher.writer.unfinished)

    def _take_another_name(self, part: Path | None) -> None:
        while part is not None:
            self.path = unused(Path(self._file))
            try:
                give_name(part, self.path, force=False)
            except ExistingFileError:
                continue
            self.failure = self.problem = None
            return

    def set_learning(self, learning: bool) -> None:
        """Examine the calls of steps without recording them if `learning` is True; else record them."""
        if self._flusher is not None:
            self._flusher.set_learning(learning)

    def leaves_out_step(self) -> bool:
        """Return True if the step that begins now must be left out, to keep within `max_overhead`."""
        budget = self._recorder.budget
        return budget is not None and budget.leaves_out_step()

    def pass_step(self) -> None:
        """Note that this thread runs no step that could be recorded, so that no step's time is measured."""
        if self._recorder.budget is not None:
            self._recorder.budget.leave_steps()

    def enter_step(self, nested: bool, label: str | None) -> ThreadStep:
        """Start recording this thread; `nested` as for `StepRecording.begin_step`.

        label : label of the step's calls in the trace

        Raises RuntimeError: a dispatch mode of the program is active, which might end before the step.
        """
        if not nested and innermost_mode() is not None:
            raise RuntimeError("a torch dispatch mode of the program is active and might end before the step")
        with self._hooks_lock:
            while self._of_compiled:
                self._hooks.enter_context(self._of_compiled.pop())
        mode = self._recorder.threads.here()
        mode.settle()
        mode.set_autocast(describe_autocast())
        mode.check_settings()
        mode.__enter__()
        mode.idle = self._recorder.threads.idle
        step = ThreadStep(mode)
        if label is not None:
            step.mark = record_function(label)
            step.mark.__enter__()
        return step

    def leave_step(self, step: ThreadStep) -> bool:
        """Stop recording this thread at the end of a step.

        Return False if that is not possible yet, because a dispatch mode of the program is active on top of the
        capture's.
        """
        mark, step.mark = step.mark, None
        try:
            if mark is not None:
                mark.__exit__(None, None, None)
        finally:
            step.mode.idle = True
        if innermost_mode() not in (step.mode, None):
            return False
        step.mode.__exit__(None, None, None)
        return True

    def _warn(self) -> None:
        # report to the client, not to the program
        pass

    def _begin_in_child(self) -> None:
        flusher, self._flusher = self._flusher, None
        self._forks.active = False
        if flusher is not None and flusher.writer is not None:
            flusher.writer.abandon()
        if self._recorder.fitter.full is not None:
            self._recorder.fitter.full.abandon()
        self._watching.pause()
        # another thread of the parent may have held the lock
        self._hooks_lock = threading.Lock()
        self._of_compiled.clear()
        self._hooks.close()


LOOK_S = 0.05  # interval in seconds between two checks of the time while a recording runs
EXPLAIN_S = 2.0  # time in seconds without a step after which the reason is reported
GRACE_S = 5.0  # time in seconds that unfinished steps get when a recording is ended early


class RecordingSession:
    """The recording that serves one request.

    number : number of the recording in this process, from 1
    asked_ns : time at which the request arrived, by `perf_counter_ns`
    """

    def __init__(self, settings: AgentSettings, request: RecordingRequest, number: int, asked_ns: int) -> None:
        pattern = request.output or settings.output
        check_pattern(pattern)
        self.request = request
        self.extent = _extent(settings, request)
        self.step_module = request.step_module or settings.step_module
        self._asked_ns = asked_ns
        details = {"on_demand": {"recording": number, "step_module": self.step_module}}
        self.path = recording_path(str(Path(pattern)), number)
        options = {**settings.options, **request.options, "details": details}
        self._capture = StepCapture(self.path, self.extent.warmup > 0, **options)
        self._recording = StepRecording(self._capture, self.extent)
        self._steps = StepDetector(self._recording, self.step_module)
        self._stopping = threading.Event()
        self._grace_s = GRACE_S

    def begin(self) -> None:
        self._capture.open()
        try:
            self._steps.source.enter()
        except BaseException:
            self._end()
            raise

    def finish(self, waiting: Callable[[str], None]) -> dict[str, Any]:
        """Wait until the recording has ended; return its result: `file`, numbers of `steps` and `calls`, and others."""
        try:
            self._wait(waiting)
        finally:
            self._end()
        return self._result()

    def _end(self) -> None:
        try:
            self._steps.source.leave()
        finally:
            self._recording.end()
            if not self._recording.steps and not self._recording.cut:
                self._capture.discard()
            self._capture.close()

    def stop(self, grace_s: float = GRACE_S) -> None:
        """End the recording; steps that are not finished within `grace_s` seconds are cut."""
        self._grace_s = grace_s
        self._stopping.set()

    def abandon(self) -> None:
        self._recording.abandon()
        self._steps.source.leave()

    def _wait(self, waiting: Callable[[str], None]) -> None:
        recording, asked_s, stopped_s = self._recording, monotonic(), None
        wait_s, explain_s = self.request.wait_s, EXPLAIN_S
        while not recording.done.wait(LOOK_S):
            recording.look()
            now = monotonic()
            if stopped_s is None and self._stopping.is_set():
                stopped_s = now
                recording.end_when_idle()
            if stopped_s is not None and now - stopped_s >= self._grace_s:
                return
            if recording.has_begun:
                continue
            if now - asked_s > wait_s:
                return
            if now - asked_s > explain_s:
                waiting(self._steps.explain())
                explain_s = inf

    def _result(self) -> dict[str, Any]:
        capture, recording = self._capture, self._recording
        first_ns = recording.first_call_ns
        return {
            "file": str(capture.path) if capture.calls and capture.problem is None else None,
            "steps": recording.steps,
            "cut": recording.cut,
            "calls": capture.calls,
            "signatures": capture.signatures,
            "dropped": capture.dropped,
            "bytes": capture.bytes_written,
            "limit": capture.stopped,
            "waited_s": None if first_ns is None else (first_ns - self._asked_ns) / 1e9,
            "problem": self._problem(),
            "notes": [*capture.notes(), *self._steps.notes()],
        }

    def _problem(self) -> str | None:
        if self._capture.problem is not None:
            return str(self._capture.problem)
        if self._recording.steps or self._recording.cut:
            return None
        when = "before it was stopped" if self._stopping.is_set() else f"within {self.request.wait_s:g} s"
        return f"no step began {when}: {self._steps.explain()}"


_keepers: list[GraphKeeper] = []


def load() -> None:
    """Import the modules that the first recording needs, which takes seconds, and keep the calls of CUDA graphs that
    the program captures from now on.
    """
    load_private()
    value_models.names()
    if not _keepers:
        # a recording knows the graphs that the program captured before it
        _keepers.append(GraphKeeper().__enter__())


def _extent(settings: AgentSettings, request: RecordingRequest) -> Extent:
    seconds = settings.seconds if request.seconds is None else request.seconds
    steps = request.steps
    if steps is None:
        # seconds requested without steps are the only limit
        steps = None if request.seconds is not None else settings.steps
    warmup = settings.warmup if request.warmup is None else request.warmup
    return Extent(steps, seconds, warmup)
