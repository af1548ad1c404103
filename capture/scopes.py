"""Tells each thread's mode where the program is: the module that runs, whether an optimizer does, autocast."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from opgrip.capture.contexts import describe_autocast
from opgrip.capture.places import OPTIMIZER
from opgrip.capture.recorder import Recorder


class ModulePaths:
    """The paths of the modules that were met, by identity: modules may compare as they like.

    Parameters
    ----------
    model : the module that paths begin at; else each outermost module that is called begins its own
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._known: dict[int, tuple[ref[nn.Module], str]] = {}
        if model is not None:
            self._name_all(model)

    def of(self, module: nn.Module) -> str | None:
        """The path of a module; None where none is known."""
        known = self._known.get(id(module))
        return known[1] if known is not None and known[0]() is module else None

    def called(self, module: nn.Module, above: str | None) -> str:
        """The path of a module that is called.

        Parameters
        ----------
        above : path of the module that calls it; None outside all modules
        """
        path = self.of(module)
        if path is None and above is None:
            self._name_all(module)
            path = ""
        elif path is None:
            # called, but not registered, by the module above it
            path = ".".join(filter(None, (above, f"({type(module).__name__})")))
            self._known[id(module)] = (ref(module), path)
        return path

    def _name_all(self, root: nn.Module) -> None:
        for path, module in root.named_modules():
            if self.of(module) is None:
                self._known[id(module)] = (ref(module), path)


class ScopeWatch:
    """While it is entered, keeps the places of all threads' modes up to date."""

    def __init__(self, recorder: Recorder, model: nn.Module | None = None) -> None:
        self.recorder = recorder
        self._paths = ModulePaths(model)
        self._hooks = ExitStack()
        recorder.path_of = self._paths.of

    def __enter__(self) -> ScopeWatch:
        hooks = (
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
            register_optimizer_step_pre_hook(self._enter_optimizer),
            register_optimizer_step_post_hook(self._leave_optimizer),
        )
        for hook in hooks:
            self._hooks.callback(hook.remove)
        for name in ("__enter__", "__exit__"):
            original = getattr(torch.autocast, name)
            setattr(torch.autocast, name, self._watching_autocast(original))
            self._hooks.callback(setattr, torch.autocast, name, original)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._hooks.close()

    def _enter_module(self, module: nn.Module, inputs: Any) -> None:
        try:
            mode = self.recorder.mode_here()
            mode.settle()
            place = mode.place
            path = self._paths.called(module, place.module if place.module_type else None)
            mode.enter(module, self.recorder.places.module(place, path, type(module).__name__))
        except Exception as error:
            self.recorder.drop("module scope", error)

    def _leave_module(self, module: nn.Module, inputs: Any, result: Any) -> None:
        try:
            self.recorder.mode_here().leave(module)
        except Exception as error:
            self.recorder.drop("module scope", error)

    def _enter_optimizer(self, optimizer: Any, *ignored: Any) -> None:
        try:
            mode = self.recorder.mode_here()
            mode.settle()
            # the frame that runs the step: if that fails, no hook tells
            mode.enter(optimizer, self.recorder.places.phase(mode.place, OPTIMIZER), sys._getframe(1))
        except Exception as error:
            self.recorder.drop("optimizer scope", error)

    def _leave_optimizer(self, optimizer: Any, *ignored: Any) -> None:
        try:
            self.recorder.mode_here().leave(optimizer)
        except Exception as error:
            self.recorder.drop("optimizer scope", error)

    def _watching_autocast(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            try:
                self.recorder.mode_here().set_autocast(describe_autocast())
            except Exception as error:
                self.recorder.drop("autocast scope", error)
            return result

        return watched
