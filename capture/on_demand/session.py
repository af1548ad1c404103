"""One recording on demand in the recorded process."""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import inf
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.profiler import record_function

from opgrip.capture.hooks.compiled import CompiledWatch
from opgrip.capture.hooks.scopes import ThreadWatch
from opgrip.capture.on_demand.agent import marks
from opgrip.capture.on_demand.protocol import RecordingRequest
from opgrip.capture.on_demand.settings import AgentSettings, check_pattern, recording_path
from opgrip.capture.program.capture_choices import EVENTS
from opgrip.capture.program.environment import describe_autocast
from opgrip.capture.program.patches import Patches
from opgrip.capture.program.processes import unused
from opgrip.capture.recording.thread_mode import ThreadMode
from opgrip.capture.session.capture import Capture
from opgrip.capture.session.graph_keeper import GraphKeeper
from opgrip.capture.session.schedule import ALWAYS, Schedule
from opgrip.capture.torch_compat.torch_private import MODULE_CALLS, innermost_mode, load_private
from opgrip.cli.command import STEP
from opgrip.cli.output_files import give_name
from opgrip.errors import ExistingFileError, one_line, raise_if_from_program
from opgrip.platform import monotonic, perf_counter_ns
from opgrip.traces.values import value_models


@dataclass(frozen=True, slots=True)
class Extent:
    """How many steps a recording on demand includes.

    steps : number of recorded steps; None for all steps that begin within `seconds`
    seconds : time in seconds after the start of the first step during which more steps may begin
    """

    steps: int | None = 3
    seconds: float | None = None
    warmup: int = 1


class ThreadLife:
    """Identifies a thread; unlike a thread's number, it is never used again."""

    __slots__ = ("__weakref__",)


class _Here(threading.local):
    def __init__(self) -> None:
        self.life = ThreadLife()


this_thread = _Here()


class StepRecording:
    """Decides which steps are recorded, and records each in the thread that runs it.

    first_call_ns : start of the first recorded step, by `perf_counter_ns`
    """

    def __init__(self, capture: StepCapture, extent: Extent) -> None:
        self.capture = capture
        self.extent = extent
        self.steps = self.cut = 0
        self.refused: Counter[str] = Counter()
        self.done = threading.Event()
        self.first_call_ns: int | None = None
        self._lock = threading.Lock()
        self._learned = self._begun = 0
        self._running: dict[int, tuple[ThreadStep, ref[ThreadLife]]] = {}
        self._learning = extent.warmup > 0
        self._until: float | None = None

    @property
    def has_begun(self) -> bool:
        return bool(self._learned or self._begun or self._running)

    def begin_step(self, nested: bool) -> ThreadStep | None:
        try:
            with self._lock:
                if not self._is_wanted():
                    self.capture.pass_step()
                    return None
                if self.capture.leaves_out_step():
                    return None
                label = None if self._learning else f"{STEP} {self._begun + 1}"
                step = self.capture.enter_step(nested, label)
                self._running[id(step)] = step, ref(this_thread.life)
                if self._learning:
                    return step
                self._begun += 1
                self.first_call_ns = self.first_call_ns or perf_counter_ns()
                if self._until is None and self.extent.seconds is not None:
                    self._until = monotonic() + self.extent.seconds
                return step
        except Exception as error:
            raise_if_from_program(error)
            self.refused[one_line(error)] += 1
            return None

    def end_step(self, step: ThreadStep) -> bool:
        """Stop recording the thread of `step`; return False if this must be tried again later."""
        try:
            is_left = self.capture.leave_step(step)
        except Exception as error:
            raise_if_from_program(error)
            self.refused[one_line(error)] += 1
            is_left = True
        finally:
            with self._lock:
                if self._running.pop(id(step), None) is not None and not self.done.is_set():
                    self._learned += self._learning
                    self.steps += not self._learning
                    self._check_end()
        return is_left

    def end(self) -> None:
        with self._lock:
            if not self.done.is_set() and not self._learning:
                self.cut += len(self._running)
            self.done.set()

    def end_when_idle(self) -> None:
        """Let no more steps begin, and end the recording when all unfinished steps have ended."""
        with self._lock:
            self._until = monotonic()
            self._check_end()

    def look(self) -> None:
        with self._lock:
            for number in [number for number, (_, life) in self._running.items() if life() is None]:
                del self._running[number]
                self._learned += self._learning
                self.cut += not self._learning
            self._check_end()

    def abandon(self) -> None:
        """End the recording in a forked child process."""
        self._lock = threading.Lock()
        self.done = threading.Event()
        self.done.set()

    def _is_wanted(self) -> bool:
        if self.done.is_set():
            return False
        if self._learning and self._learned + len(self._running) >= self.extent.warmup:
            if self._running:
                return False
            self._learning = False
            self.capture.set_learning(False)
        if self._until is not None and monotonic() >= self._until:
            self._check_end()
            return False
        return self._learning or self.extent.steps is None or self._begun < self.extent.steps

    def _check_end(self) -> None:
        enough = self.extent.steps is not None and self.steps + self.cut >= self.extent.steps
        over = self._until is not None and monotonic() >= self._until
        if (enough or over) and not self._running:
            self.done.set()


class _MarkingThread(threading.local):
    step: ThreadStep | None = None
    # an ended step whose dispatch mode could not be removed yet, because a mode of the program is on top of it
    left_on: ThreadStep | None = None


class ProgramSteps:
    """Detects the steps that a program marks with calls of `opgrip.capture.step()`."""

    def __init__(self, recording: StepRecording) -> None:
        self.recording = recording
        self._here = _MarkingThread()
        # no lock: in a fork, lives of other threads end in the child before it could create a new lock
        self._steps: dict[ref[ThreadLife], ThreadStep | None] = {}
        self._pid = os.getpid()
        self._is_left = False
        # keep one object: each access to a bound method creates a new one
        self._listener = self.pass_boundary

    def enter(self) -> None:
        marks.listeners += (self._listener,)

    def leave(self) -> None:
        self._is_left = True
        self._close_if_over()

    def pass_boundary(self) -> None:
        here, recording = self._here, self.recording
        if here.left_on is not None and recording.capture.leave_step(here.left_on):
            here.left_on = None
        if here.step is not None:
            step, here.step = here.step, None
            if not recording.end_step(step):
                here.left_on = step
        if here.left_on is None:
            life = ref(this_thread.life, self._end_thread)
            # before checking for the end, so that the last thread to leave sees it
            self._steps[life] = None
            if not self._is_left:
                here.step = self._steps[life] = recording.begin_step(nested=False)
            if here.step is None:
                self._end_thread(life)

    def _end_thread(self, life: ref[ThreadLife]) -> None:
        step = self._steps.pop(life, None)
        # a forked process has no lock for it yet, and no other threads to count
        if step is not None and os.getpid() == self._pid:
            step.mode.forget()
        self._close_if_over()

    def _close_if_over(self) -> None:
        if self._is_left and not self._steps:
            marks.listeners = tuple(item for item in marks.listeners if item is not self._listener)


# reasons why calls of modules are not steps
INSIDE, OTHER = "inside a module's call that began before the recording", "of other classes"
MOST_NAMES = 3  # maximum number of module classes that are named for each reason


class _CallingThread(threading.local):
    # True during a call of a module that could be a step
    in_call = False


class ModuleSteps:
    def __init__(self, recording: StepRecording, pattern: str | None) -> None:
        self.recording = recording
        self.passed: dict[str, list[str]] = {}
        self.trains = False
        self._here = _CallingThread()
        self._pattern = pattern
        self._patches = Patches()

    def enter(self) -> None:
        # torch warns about hooks on all modules when it compiles one
        self._patches.replace(nn.Module, "__call__", self._watching)

    def leave(self) -> None:
        self._patches.undo()

    def _watching(self, original: Callable[..., Any]) -> Callable[..., Any]:
        here, recording, is_traced = self._here, self.recording, torch.compiler.is_dynamo_compiling

        def watched(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if is_traced() or here.in_call or recording.done.is_set() or not self._matches(module):
                return original(module, *args, **kwargs)
            step = recording.begin_step(nested=True) if self._is_outermost(module) else None
            self.trains |= step is not None and module.training and torch.is_grad_enabled()
            here.in_call = True
            try:
                return original(module, *args, **kwargs)
            finally:
                here.in_call = False
                if step is not None:
                    recording.end_step(step)

        return functools.wraps(original)(watched)

    def _matches(self, module: nn.Module) -> bool:
        if self._pattern is None:
            return True
        kind = type(module)
        names = kind.__name__, f"{kind.__module__}.{kind.__qualname__}"
        return any(fnmatchcase(name, self._pattern) for name in names) or self._pass(OTHER, module)

    def _is_outermost(self, module: nn.Module) -> bool:
        try:
            return not self._is_inside_module() or self._pass(INSIDE, module)
        except Exception as error:
            raise_if_from_program(error)
            return False

    def _pass(self, reason: str, module: nn.Module) -> bool:
        names, name = self.passed.setdefault(reason, []), type(module).__name__
        if len(names) < MOST_NAMES and name not in names:
            names.append(name)
        return False

    def _is_inside_module(self) -> bool:
        frame: FrameType | None = sys._getframe(3)
        while frame is not None:
            if frame.f_code in MODULE_CALLS:
                if self._pattern is None:
                    return True
                outer = frame.f_locals.get("self")
                if isinstance(outer, nn.Module) and self._matches(outer):
                    return True
            frame = frame.f_back
        return False


class StepDetector:
    def __init__(self, recording: StepRecording, step_module: str | None) -> None:
        self._recording, self._step_module = recording, step_module
        self._modules: ModuleSteps | None = None
        self.source: ProgramSteps | ModuleSteps
        if step_module is None and marks.steps:
            self.source = ProgramSteps(recording)
        else:
            self.source = self._modules = ModuleSteps(recording, step_module)

    def notes(self) -> Iterator[str]:
        if self._modules is not None and self._modules.trains:
            yield (
                "the steps are calls of modules, without backward passes and optimizers: to record these too, call "
                "opgrip.capture.step() after each step"
            )

    def explain(self) -> str:
        if self._recording.refused:
            return f"none could be recorded: {'; '.join(self._recording.refused)}"
        if self._modules is None:
            return "the program has not called opgrip.capture.step() again"
        passed = self._modules.passed
        if self._step_module is not None:
            called = "; ".join(f"{', '.join(names)} {reason}" for reason, names in passed.items())
            return f"no module of a class {self._step_module} was called" + (f", but {called}" if called else "")
        if INSIDE in passed:
            return (
                f"modules ({', '.join(passed[INSIDE])}) are called {INSIDE}: name the class of the modules whose calls "
                "are steps with --step-module"
            )
        return "no module was called: call opgrip.capture.step() after each step"


@dataclass(slots=True)
class ThreadStep:
    mode: ThreadMode
    mark: record_function | None = None


class StepCapture(Capture):
    """A capture that records each thread only during its steps."""

    _by_steps = True

    def __init__(self, path: Path, warmup: bool, **options: Any) -> None:
        # records of kernels begin and end in one thread, and a step may run in any
        super().__init__(path, schedule=Schedule(warmup=1) if warmup else ALWAYS, device_time=EVENTS, **options)
        self.path = path
        self._file = path.absolute()
        self._hooks, self._hooks_lock = ExitStack(), threading.Lock()

    def _make_watches(self, compiled: str) -> list[AbstractContextManager[Any]]:
        watches = super()._make_watches(compiled)
        # until a step begins, compiled code runs as usual
        self._of_compiled = [watch for watch in watches if isinstance(watch, CompiledWatch)]
        return [watch for watch in watches if not isinstance(watch, ThreadWatch | CompiledWatch)]

    def open(self) -> None:
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
        if self._flusher is not None:
            self._flusher.set_learning(learning)

    def leaves_out_step(self) -> bool:
        budget = self._recorder.budget
        return budget is not None and budget.leaves_out_step()

    def pass_step(self) -> None:
        if self._recorder.budget is not None:
            self._recorder.budget.leave_steps()

    def enter_step(self, nested: bool, label: str | None) -> ThreadStep:
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
        """Stop recording this thread at the end of a step; return False if that is not possible yet."""
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
        """Wait until the recording ends; return the same dictionary as `Agent.record`."""
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
            "notes": [*capture.notes(), *capture.remarks(), *self._steps.notes()],
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
    """Import the modules that the first recording needs, and keep the calls of CUDA graphs from now on."""
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
