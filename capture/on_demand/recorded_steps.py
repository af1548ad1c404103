"""Steps of a program: detection of their begin and end, and selection of the steps to record."""

from __future__ import annotations

import functools
import os
import sys
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatchcase
from time import monotonic, perf_counter_ns
from types import FrameType
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from opgrip.capture.on_demand.trigger import marks
from opgrip.capture.program.patches import Patches
from opgrip.capture.torch_compat.torch_private import MODULE_CALLS
from opgrip.cli.command import STEP
from opgrip.errors import one_line, raise_if_from_program

if TYPE_CHECKING:
    from opgrip.capture.on_demand.session import StepCapture, ThreadStep


@dataclass(frozen=True, slots=True)
class Extent:
    """Extent of a recording.

    Attributes
    ----------
    steps : number of recorded steps; None for all that begin within `seconds`
    seconds : time after the begin of the first step in which further steps may begin
    warmup : number of preceding steps in which the capture learns
    begins_at : position of the program from which the first step may begin; None for the next step
    """

    steps: int | None = 3
    seconds: float | None = None
    warmup: int = 1
    begins_at: int | None = None


class ThreadLife:
    """Object that lives as long as its thread, since the thread's number may be reused soon after."""

    __slots__ = ("__weakref__",)


class _Here(threading.local):
    def __init__(self) -> None:
        self.life = ThreadLife()


_here = _Here()


class StepRecording:
    """Recording of steps: decides which to record, and records each in its own thread.

    Attributes
    ----------
    steps : number of recorded steps that have ended
    cut : number of steps that were unfinished when the recording or their thread ended
    refused : number of steps that could not be recorded, by reason
    done : set when nothing more will be recorded
    began_at : position at which the first step began
    first_call_ns : begin of the first recorded step, by `perf_counter_ns`
    """

    def __init__(self, capture: StepCapture, extent: Extent, position: Callable[[], int | None]) -> None:
        self.capture = capture
        self.extent = extent
        self.steps = self.cut = 0
        self.refused: Counter[str] = Counter()
        self.done = threading.Event()
        self.began_at: int | None = None
        self.first_call_ns: int | None = None
        self._position = position
        self._lock = threading.Lock()
        self._learned = self._begun = 0
        self._running: dict[int, tuple[ThreadStep, ref[ThreadLife]]] = {}
        self._learning = extent.warmup > 0
        self._until: float | None = None

    @property
    def has_begun(self) -> bool:
        return bool(self._learned or self._begun or self._running)

    def begin_step(self, nested: bool) -> ThreadStep | None:
        """Record this thread until `end_step`; return None if this step is not recorded. Never raises.

        `nested` as in `enter_step`.
        """
        try:
            with self._lock:
                if not self._is_wanted():
                    self.capture.pass_step()
                    return None
                if self.capture.leaves_out_step():
                    return None
                if not self.has_begun:
                    self.began_at = self._position()
                label = None if self._learning else f"{STEP} {self._begun + 1}"
                step = self.capture.enter_step(nested, label)
                self._running[id(step)] = step, ref(_here.life)
                if not self._learning:
                    self._note_begin()
                return step
        except Exception as error:
            raise_if_from_program(error)
            self.refused[one_line(error)] += 1
            return None

    def end_step(self, step: ThreadStep) -> bool:
        """Stop recording this thread; return False if the caller must try again later. Never raises."""
        try:
            is_left = self.capture.leave_step(step)
        except Exception as error:
            raise_if_from_program(error)
            self.refused[one_line(error)] += 1
            is_left = True
        finally:
            with self._lock:
                if self._running.pop(id(step), None) is not None and not self.done.is_set():
                    self._count_end()
        return is_left

    def end(self) -> None:
        """Prevent further steps, and cut unfinished ones."""
        with self._lock:
            if not self.done.is_set() and not self._learning:
                self.cut += len(self._running)
            self.done.set()

    def end_when_idle(self) -> None:
        """Prevent further steps, and end the recording when unfinished ones have ended."""
        with self._lock:
            self._until = monotonic()
            self._check_end()

    def look(self) -> None:
        """Check for the end: time is over and no step unfinished; cut the steps of threads that have ended."""
        with self._lock:
            for number in [number for number, (_, life) in self._running.items() if life() is None]:
                del self._running[number]
                if self._learning:
                    self._learned += 1
                else:
                    self.cut += 1
            self._check_end()

    def abandon(self) -> None:
        """Stop in a forked process, where vanished threads may hold any lock."""
        self._lock = threading.Lock()
        self.done = threading.Event()
        self.done.set()

    def _is_wanted(self) -> bool:
        if self.done.is_set():
            return False
        if not self.has_begun and self.extent.begins_at is not None:
            position = self._position()
            if position is not None and position < self.extent.begins_at:
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

    def _note_begin(self) -> None:
        self._begun += 1
        if self.first_call_ns is None:
            self.first_call_ns = perf_counter_ns()
        if self._until is None and self.extent.seconds is not None:
            self._until = monotonic() + self.extent.seconds

    def _count_end(self) -> None:
        if self._learning:
            self._learned += 1
        else:
            self.steps += 1
        self._check_end()

    def _check_end(self) -> None:
        """End the recording if it is complete. The caller holds the lock."""
        enough = self.extent.steps is not None and self.steps + self.cut >= self.extent.steps
        over = self._until is not None and monotonic() >= self._until
        if (enough or over) and not self._running:
            self.done.set()


PROGRAM, MODULE, OPTIMIZER = "the program's own", "calls of modules that do not train", "steps of an optimizer"


class StepSource(ABC):
    """Context manager that notices steps; `name` describes them."""

    name: str

    def __init__(self, recording: StepRecording) -> None:
        self.recording = recording
        self._hooks = ExitStack()

    @abstractmethod
    def enter(self) -> None: ...

    def leave(self) -> None:
        self._hooks.close()


class ThreadState(threading.local):
    """Step that a thread is in, and an ended step whose mode was below a mode of the program and is still on."""

    step: ThreadStep | None = None
    left_on: ThreadStep | None = None


class Boundaries(StepSource):
    """Source of steps that last from one boundary to the next in each thread.

    It keeps noticing boundaries until each thread has passed one, because only a thread itself can remove its mode.
    """

    def __init__(self, recording: StepRecording, here: ThreadState) -> None:
        super().__init__(recording)
        self.here = here
        # no lock: in a fork, lives of other threads end in the child before it could create a new lock
        self._steps: dict[ref[ThreadLife], ThreadStep | None] = {}
        self._pid = os.getpid()
        self._is_left = False
        self._closing = threading.Lock()

    def leave(self) -> None:
        self._is_left = True
        self._close_if_over()

    def pass_boundary(self) -> None:
        """End this thread's step, and begin another. Never raises."""
        here, recording = self.here, self.recording
        if here.left_on is not None and recording.capture.leave_step(here.left_on):
            here.left_on = None
        if here.step is not None:
            step, here.step = here.step, None
            if not recording.end_step(step):
                here.left_on = step
        if here.left_on is None:
            life = ref(_here.life, self._end_thread)
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
        if self._is_left and not self._steps and self._closing.acquire(blocking=False):
            self._hooks.close()


class ProgramSteps(Boundaries):
    """Steps from one `opgrip.capture.step()` to the next."""

    name = PROGRAM

    def enter(self) -> None:
        # keep one object: each access to a bound method creates a new one
        self._listener = self.pass_boundary
        marks.listeners += (self._listener,)
        self._hooks.callback(self._forget)

    def _forget(self) -> None:
        marks.listeners = tuple(item for item in marks.listeners if item is not self._listener)


class OptimizerSteps(Boundaries):
    """Steps from the end of one optimizer step to the end of the next."""

    name = OPTIMIZER

    def enter(self) -> None:
        """Watch optimizers; the first one that steps defines the steps."""
        self._optimizer: ref[Any] | None = None
        self._hooks.callback(register_optimizer_step_post_hook(self._stepped).remove)

    def _stepped(self, optimizer: Any, *ignored: object) -> None:
        if torch.compiler.is_dynamo_compiling():
            return
        if self._optimizer is None or self._optimizer() is None:
            self._optimizer = ref(optimizer)
        if self._optimizer() is optimizer:
            self.pass_boundary()


class ModuleSteps(StepSource):
    """Steps that are outermost calls of modules: of a class matching a pattern, or not in training mode.

    Other modules' calls count as parts of steps.
    """

    name = MODULE

    def __init__(self, recording: StepRecording, here: ThreadState, pattern: str | None) -> None:
        super().__init__(recording)
        self.here = here
        self._pattern = pattern
        self._patches = Patches()
        self._calls = set(MODULE_CALLS)

    def enter(self) -> None:
        # torch warns about hooks on all modules when it compiles one
        self._patches.replace(nn.Module, "__call__", self._watching)
        self._hooks.callback(self._patches.undo)

    def _watching(self, original: Callable[..., Any]) -> Callable[..., Any]:
        here, recording, is_traced = self.here, self.recording, torch.compiler.is_dynamo_compiling

        def watched(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if is_traced() or here.step is not None or recording.done.is_set() or not self._begins_step(module):
                return original(module, *args, **kwargs)
            step = recording.begin_step(nested=True)
            if step is None:
                return original(module, *args, **kwargs)
            here.step = step
            try:
                return original(module, *args, **kwargs)
            finally:
                here.step = None
                recording.end_step(step)

        self._calls.add(watched.__code__)
        return functools.wraps(original)(watched)

    def _begins_step(self, module: nn.Module) -> bool:
        try:
            if self._pattern is None:
                if module.training and torch.is_grad_enabled():
                    return False
            elif not self._matches(module):
                return False
            return not self._is_inside_module()
        except Exception as error:
            raise_if_from_program(error)
            return False

    def _matches(self, module: nn.Module) -> bool:
        kind, pattern = type(module), self._pattern or "*"
        return fnmatchcase(kind.__name__, pattern) or fnmatchcase(f"{kind.__module__}.{kind.__qualname__}", pattern)

    def _is_inside_module(self) -> bool:
        """Return True if this thread is in such a call that began before the recording."""
        frame: FrameType | None = sys._getframe(3)
        while frame is not None:
            if frame.f_code in self._calls:
                if self._pattern is None:
                    return True
                outer = frame.f_locals.get("self", frame.f_locals.get("module"))
                if isinstance(outer, nn.Module) and self._matches(outer):
                    return True
            frame = frame.f_back
        return False


def sources_of(recording: StepRecording, step_module: str | None) -> list[StepSource]:
    """Return the sources of steps: the program's marks, else calls of modules and optimizers, or only `step_module`."""
    here = ThreadState()
    if step_module is not None:
        return [ModuleSteps(recording, here, step_module)]
    if marks.steps:
        return [ProgramSteps(recording, here)]
    return [ModuleSteps(recording, here, None), OptimizerSteps(recording, here)]
