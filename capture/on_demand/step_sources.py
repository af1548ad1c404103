"""What a step of a program is, and how its beginning and end are noticed while somebody records."""

from __future__ import annotations

import functools
import os
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from fnmatch import fnmatchcase
from types import FrameType
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from opgrip.capture.on_demand.recording import Life, Recording, life_here
from opgrip.capture.on_demand.step_capture import ThreadStep
from opgrip.capture.on_demand.trigger import marks
from opgrip.capture.program.patches import Patches
from opgrip.capture.torch_compat.torch_private import MODULE_CALLS
from opgrip.errors import raise_if_from_program

PROGRAM, MODULE, OPTIMIZER = "the program's own", "calls of modules that do not train", "steps of an optimizer"


class StepSource(ABC):
    """Tells a recording of steps while it is entered.

    Attributes
    ----------
    name : what the steps are
    """

    name: str

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self._hooks = ExitStack()

    @abstractmethod
    def enter(self) -> None:
        """Notice steps from now on."""

    def leave(self) -> None:
        """Notice none any more."""
        self._hooks.close()


class Thread(threading.local):
    """What a thread is in.

    Attributes
    ----------
    step : that it is in, None in none
    left_on : a step that is over, above whose mode one of the program was on then
    """

    step: ThreadStep | None = None
    left_on: ThreadStep | None = None


class Boundaries(StepSource):
    """Steps from one place that each thread comes by to the next.

    It goes on to notice them until each thread has come by, as a mode can be taken off by its own thread alone.
    """

    def __init__(self, recording: Recording, here: Thread) -> None:
        super().__init__(recording)
        self.here = here
        # without a lock: a fork ends the lives of other threads in the child, before it could have a new one there
        self._steps: dict[ref[Life], ThreadStep | None] = {}
        self._pid = os.getpid()
        self._is_left = False
        self._closing = threading.Lock()

    def leave(self) -> None:
        """Notice none any more once no thread is recorded."""
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
            life = ref(life_here(), self._end_thread)
            # before it is looked whether all is over, so that who leaves last sees it
            self._steps[life] = None
            if not self._is_left:
                here.step = self._steps[life] = recording.begin_step(nested=False)
            if here.step is None:
                self._end_thread(life)

    def _end_thread(self, life: ref[Life]) -> None:
        step = self._steps.pop(life, None)
        # in a forked process there is no lock for it yet, and nothing of other threads to count
        if step is not None and os.getpid() == self._pid:
            step.mode.forget()
        self._close_if_over()

    def _close_if_over(self) -> None:
        if self._is_left and not self._steps and self._closing.acquire(blocking=False):
            self._hooks.close()


class ProgramSteps(Boundaries):
    """From one `opgrip.capture.step()` to the next."""

    name = PROGRAM

    def enter(self) -> None:
        """Listen to the program."""
        # one name: a bound method is another object each time
        self._listener = self.pass_boundary
        marks.listeners += (self._listener,)
        self._hooks.callback(self._forget)

    def _forget(self) -> None:
        marks.listeners = tuple(item for item in marks.listeners if item is not self._listener)


class OptimizerSteps(Boundaries):
    """From the end of an optimizer's step to the end of its next one."""

    name = OPTIMIZER

    def enter(self) -> None:
        """Watch optimizers; the one that steps first tells."""
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
    """Outermost calls of modules.

    Parameters
    ----------
    pattern : of the modules' classes, as shells match names; None for all, but for those that train, whose calls are
        parts of steps
    """

    name = MODULE

    def __init__(self, recording: Recording, here: Thread, pattern: str | None) -> None:
        super().__init__(recording)
        self.here = here
        self._pattern = pattern
        self._patches = Patches()
        self._calls = set(MODULE_CALLS)

    def enter(self) -> None:
        """Watch calls of modules."""
        # torch warns of hooks on all modules where it compiles one
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
        """Whether this thread is in such a call that began before the recording did."""
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


def sources_of(recording: Recording, step_module: str | None) -> list[StepSource]:
    """What tells a recording of steps: what the program says, else calls of modules and steps of optimizers.

    Parameters
    ----------
    step_module : the pattern of the modules whose calls are steps; None where nobody named any
    """
    here = Thread()
    if step_module is not None:
        return [ModuleSteps(recording, here, step_module)]
    if marks.steps:
        return [ProgramSteps(recording, here)]
    return [ModuleSteps(recording, here, None), OptimizerSteps(recording, here)]
