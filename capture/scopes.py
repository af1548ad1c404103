"""Where a program is: the module that runs, and whether an optimizer does."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from opgrip.capture.recorder import Place, Recorder

OUTSIDE: Place = ("", "")


class ScopeWatch:
    """While it is entered, keeps the recorder's `place` and `optimizing` up to date for the thread that entered it.

    Parameters
    ----------
    model : the module that paths begin at; else each outermost module that is called begins its own
    """

    def __init__(self, recorder: Recorder, model: nn.Module | None = None) -> None:
        self.recorder = recorder
        self._paths: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        self._running: list[tuple[nn.Module, Place]] = []
        self._thread = threading.get_ident()
        self._hooks = ExitStack()
        if model is not None:
            self._name_all(model)

    def __enter__(self) -> ScopeWatch:
        self._thread = threading.get_ident()
        hooks = (
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
            register_optimizer_step_pre_hook(self._enter_optimizer),
            register_optimizer_step_post_hook(self._leave_optimizer),
        )
        for hook in hooks:
            self._hooks.callback(hook.remove)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._hooks.close()

    def _name_all(self, root: nn.Module) -> None:
        for path, module in root.named_modules():
            self._paths.setdefault(module, path)

    def _enter_module(self, module: nn.Module, inputs: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        try:
            if module not in self._paths:
                self._name(module)
            place = (self._paths[module], type(module).__name__)
            self._running.append((module, place))
            self.recorder.place = place
        except Exception as error:
            self.recorder.drop("module scope", error)

    def _leave_module(self, module: nn.Module, inputs: Any, result: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        # a module whose own hook failed may have left others above it
        while any(running is module for running, _ in self._running):
            if self._running.pop()[0] is module:
                break
        self.recorder.place = self._running[-1][1] if self._running else OUTSIDE

    def _name(self, module: nn.Module) -> None:
        if self._running:
            # called, but not registered, by the module above it
            above = self._running[-1][1][0]
            self._paths[module] = ".".join(filter(None, (above, f"({type(module).__name__})")))
        else:
            self._name_all(module)

    def _enter_optimizer(self, *ignored: Any) -> None:
        self.recorder.optimizing += 1

    def _leave_optimizer(self, *ignored: Any) -> None:
        self.recorder.optimizing -= 1
