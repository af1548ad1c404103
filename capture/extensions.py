"""Functions of extension modules, which the dispatcher never sees: they are wrapped where callers look them up."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from types import BuiltinFunctionType, ModuleType, TracebackType
from typing import Any

from opgrip.capture.recorder import Recorder
from opgrip.traces.records import EXTENSION

KNOWN_EXTENSIONS = ("mmcv._ext",)
"""Extension modules that are watched wherever the program has loaded them."""


class ExtensionWatch:
    """While it is entered, the functions of the named extension modules record their calls.

    The operators that a function runs inside are recorded too, with its name in their scope. A module that the program
    has not loaded by then is passed over.
    """

    def __init__(self, recorder: Recorder, names: Iterable[str] = KNOWN_EXTENSIONS) -> None:
        self.recorder = recorder
        self.names = tuple(names)
        self._originals: list[tuple[ModuleType, str, Any]] = []

    def __enter__(self) -> ExtensionWatch:
        for name in self.names:
            module = sys.modules.get(name)
            if module is not None:
                self._wrap_functions(name, module)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for module, attribute, original in self._originals:
            setattr(module, attribute, original)
        self._originals.clear()

    def _wrap_functions(self, name: str, module: ModuleType) -> None:
        for attribute, original in list(vars(module).items()):
            # unwrapped: another capture may be watching already
            if isinstance(inspect.unwrap(original), BuiltinFunctionType):
                self._originals.append((module, attribute, original))
                setattr(module, attribute, _recording(self.recorder, f"{name}:{attribute}", original))


def _recording(recorder: Recorder, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        if recorder.at_own_work():
            return function(*args, **kwargs)
        return recorder.mode_here().call(name, EXTENSION, lambda: function(*args, **kwargs), args, kwargs)

    return recorded
