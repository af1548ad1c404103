"""Detection of a program's steps: where each step begins and ends, and the reason if none begins."""

from __future__ import annotations

import functools
import gc
import os
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from fnmatch import fnmatchcase
from types import FrameType
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from opgrip.capture.on_demand.recorded_steps import StepRecording, ThreadLife
from opgrip.capture.on_demand.recorded_steps import here as this_thread
from opgrip.capture.on_demand.trigger import marks
from opgrip.capture.program.patches import Patches
from opgrip.capture.torch_compat.torch_private import MODULE_CALLS
from opgrip.errors import raise_if_from_program

if TYPE_CHECKING:
    from opgrip.capture.on_demand.session import ThreadStep

PROGRAM, MODULE, OPTIMIZER = "the program's own", "calls of modules that do not train", "steps of an optimizer"


class StepSource(ABC):
    """Context manager that detects the program's steps in one way; `name` describes these steps to the user."""

    name: str

    def __init__(self, recording: StepRecording) -> None:
        self.recording = recording
        self._hooks = ExitStack()

    @abstractmethod
    def enter(self) -> None: ...

    def leave(self) -> None:
        self._hooks.close()


class ThreadState(threading.local):
    """State of a thread with respect to its steps.

    step : the step that the thread is in, or None
    left_on : an ended step whose dispatch mode could not be removed yet, because a mode of the program is on top of it
    call_is_wide : value of `ModuleSteps.is_wide` when the current outermost call of a module began; None outside of
        calls
    """

    step: ThreadStep | None = None
    left_on: ThreadStep | None = None
    call_is_wide: bool | None = None


class Boundaries(StepSource):
    """Detects steps that last from one event of a thread, the boundary, to the next.

    After `leave`, it continues until each thread has passed a boundary, because only a thread itself can remove its
    dispatch mode.
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
        """End this thread's step and begin the next one. Never raises an error."""
        here, recording = self.here, self.recording
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
        if self._is_left and not self._steps and self._closing.acquire(blocking=False):
            self._hooks.close()


class ProgramSteps(Boundaries):
    """Detects steps that last from one call of `opgrip.capture.step()` to the next."""

    name = PROGRAM

    def enter(self) -> None:
        # keep one object: each access to a bound method creates a new one
        self._listener = self.pass_boundary
        marks.listeners += (self._listener,)
        self._hooks.callback(self._forget)

    def _forget(self) -> None:
        marks.listeners = tuple(item for item in marks.listeners if item is not self._listener)


class OptimizerSteps(Boundaries):
    """Detects steps that last from the end of one optimizer step to the end of the next."""

    name = OPTIMIZER

    def enter(self) -> None:
        """Watch all optimizers; the first one that makes a step determines the steps."""
        self._optimizer: ref[Any] | None = None
        self._hooks.callback(register_optimizer_step_post_hook(self._stepped).remove)

    def _stepped(self, optimizer: Any, *ignored: object) -> None:
        if torch.compiler.is_dynamo_compiling():
            return
        if self._optimizer is None or self._optimizer() is None:
            self._optimizer = ref(optimizer)
        if self._optimizer() is optimizer:
            self.pass_boundary()


# reasons why calls of modules are not steps
TRAINING, INSIDE, OTHER = "in training mode", "inside a call that began before", "of other classes"
MOST_NAMES = 3  # maximum number of module classes that are named for each reason


class ModuleSteps(StepSource):
    """Detects calls of modules as steps: calls of modules whose class matches a pattern or, without a pattern, that are
    not in training mode. Calls inside such a call are not steps.

    passed : names of classes of modules whose calls were not steps, by reason
    is_wide : True to count more calls as steps: those in training mode, and those inside a call that began before the
        recording
    """

    name = MODULE

    def __init__(self, recording: StepRecording, here: ThreadState, pattern: str | None) -> None:
        super().__init__(recording)
        self.here = here
        self.passed: dict[str, list[str]] = {}
        self.is_wide = False
        self._pattern = pattern
        self._patches = Patches()

    def enter(self) -> None:
        # torch warns about hooks on all modules when it compiles one
        self._patches.replace(nn.Module, "__call__", self._watching)
        self._hooks.callback(self._patches.undo)

    def _watching(self, original: Callable[..., Any]) -> Callable[..., Any]:
        here, recording, is_traced = self.here, self.recording, torch.compiler.is_dynamo_compiling

        def watched(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if is_traced() or here.step is not None or here.call_is_wide is self.is_wide or recording.done.is_set():
                return original(module, *args, **kwargs)
            if not self._matches(module):
                return original(module, *args, **kwargs)
            step = recording.begin_step(nested=True) if self._begins_step(module) else None
            outer = here.call_is_wide
            try:
                here.call_is_wide = self.is_wide
                if step is not None:
                    here.step = step
                return original(module, *args, **kwargs)
            finally:
                here.call_is_wide = outer
                if step is not None:
                    here.step = None
                    recording.end_step(step)

        return functools.wraps(original)(watched)

    def _begins_step(self, module: nn.Module) -> bool:
        try:
            if self.is_wide:
                return True
            if self._pattern is None and module.training and torch.is_grad_enabled():
                return self._pass(TRAINING, module)
            return not self._is_inside_module() or self._pass(INSIDE, module)
        except Exception as error:
            raise_if_from_program(error)
            return False

    def _matches(self, module: nn.Module) -> bool:
        if self._pattern is None:
            return True
        kind = type(module)
        names = kind.__name__, f"{kind.__module__}.{kind.__qualname__}"
        return any(fnmatchcase(name, self._pattern) for name in names) or self._pass(OTHER, module)

    def _pass(self, reason: str, module: nn.Module) -> bool:
        """Note the reason why a call of a module is not a step, and return False."""
        names, name = self.passed.setdefault(reason, []), type(module).__name__
        if len(names) < MOST_NAMES and name not in names:
            names.append(name)
        return False

    def _is_inside_module(self) -> bool:
        """Return True if this thread is inside a call of a matching module that began before the recording."""
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


class StepSources:
    """All ways in which the steps of a recording are detected.

    With `step_module`, only calls of matching modules are steps. Otherwise the program's calls of `opgrip.capture.step`
    separate the steps; if it makes none, calls of modules and steps of optimizers are detected.
    """

    def __init__(self, recording: StepRecording, step_module: str | None) -> None:
        here = ThreadState()
        self._recording, self._step_module = recording, step_module
        self._modules: ModuleSteps | None = ModuleSteps(recording, here, step_module)
        self._optimizers: OptimizerSteps | None = None
        self._has_optimizer: bool | None = None
        self._all: list[StepSource] = [self._modules]
        if step_module is None and marks.steps:
            self._modules, self._all = None, [ProgramSteps(recording, here)]
        elif step_module is None:
            self._optimizers = OptimizerSteps(recording, here)
            self._all.append(self._optimizers)

    @property
    def names(self) -> list[str]:
        return [source.name for source in self._all]

    def enter(self) -> None:
        for source in self._all:
            source.enter()

    def leave(self) -> None:
        for source in self._all:
            source.leave()

    def widen(self, is_late: bool) -> None:
        """Count more calls of modules as steps, if modules were called and no optimizer is expected to make a step.

        is_late : True to stop waiting for an optimizer that exists but has not made a step
        """
        modules, optimizers = self._modules, self._optimizers
        if modules is None or optimizers is None or modules.is_wide or not modules.passed:
            return
        if self._has_optimizer is None:
            self._has_optimizer = _has_optimizer()
        if is_late or not self._has_optimizer:
            optimizers.leave()
            modules.is_wide = True

    def explain(self) -> str:
        """Return the reason why no step has begun, as a text for the user."""
        if self._recording.refused:
            return f"none could be recorded: {'; '.join(self._recording.refused)}"
        if self._modules is None:
            return "the program has not called opgrip.capture.step() again"
        passed = self._modules.passed
        if self._step_module is not None:
            called = "; ".join(f"{', '.join(names)} {reason}" for reason, names in passed.items())
            return f"no module of a class {self._step_module} was called" + (f", but {called}" if called else "")
        for reason in (INSIDE, TRAINING):
            if reason in passed:
                names = ", ".join(passed[reason])
                if self._modules.is_wide:
                    return f"modules ({names}) are called {reason}, and no optimizer steps: such calls are steps now"
                return (
                    f"modules ({names}) are called {reason}, and no optimizer has stepped yet: wait for it, or name "
                    f"the class of the modules whose calls are steps with --step-module"
                )
        return "no module was called, and no optimizer made a step: call opgrip.capture.step() after each step"


def _has_optimizer() -> bool:
    # use `type`: `isinstance` can run code of the program's objects
    return any(issubclass(type(item), Optimizer) for item in gc.get_objects())
