"""Functions of extension modules, which the dispatcher never sees: they are wrapped where callers look them up."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Iterable
from types import FunctionType, ModuleType
from typing import Any

from opgrip.capture.program.capture_choices import KNOWN_EXTENSIONS
from opgrip.capture.program.patches import LateModules, Patches
from opgrip.capture.recording.recorder import Recorder
from opgrip.traces.schema.records import EXTENSION

_FUNCTION_POINTER: type = type(ctypes.pythonapi.Py_IsInitialized).__mro__[1]


class ExtensionWatch:
    """While it is entered, the functions of the named extension modules record their calls.

    The operators that a function runs inside are recorded too, with its name in their scope. A module that the program
    loads later is watched from then on. Of a module that uses ctypes, the functions of its libraries are watched.
    """

    def __init__(self, recorder: Recorder, names: Iterable[str] = KNOWN_EXTENSIONS) -> None:
        self.recorder = recorder
        self.names = tuple(names)
        self._patches = Patches()
        self._has_begun = False
        self._watched_names: set[str] = set()
        self._libraries: list[tuple[ctypes.CDLL, type]] = []
        self._late = LateModules(lambda name: name in self.names, self._watch_module)

    def __enter__(self) -> ExtensionWatch:
        self._has_begun = True
        for name in self.names:
            module = sys.modules.get(name)
            if module is not None:
                self._watch_module(module)
        self._late.__enter__()
        return self

    def __exit__(self, *ignored: object) -> None:
        self._late.__exit__()
        self._patches.undo()
        for library, original in self._libraries:
            library.__class__ = original
        self._libraries.clear()

    def refused(self) -> dict[str, str]:
        """Why of a module that was asked for nothing could be recorded, by its name."""
        if not self._has_begun:
            return {}
        reasons = {}
        for name in self.names:
            module = sys.modules.get(name)
            if module is None and name not in KNOWN_EXTENSIONS:
                reasons[name] = "the program did not load it"
            elif module is not None and module.__name__ not in self._watched_names:
                reasons[name] = "it has no function that is not Python's"
        return reasons

    def _watch_module(self, module: ModuleType) -> None:
        try:
            for attribute, value in list(vars(module).items()):
                if isinstance(value, ctypes.CDLL):
                    self._watch_library(f"{module.__name__}:{attribute}", value)
                elif _is_compiled_function(value):
                    name = f"{module.__name__}:{attribute}"
                    self._patches.replace(module, attribute, functools.partial(self._recording, name))
                else:
                    continue
                self._watched_names.add(module.__name__)
        except Exception as error:
            self.recorder.lost.drop(f"extension {module.__name__}", error)

    def _watch_library(self, name: str, library: ctypes.CDLL) -> None:
        """Watch the functions that a library has been asked for, and those that it will be."""
        original = type(library)
        patches, recording = self._patches, self._recording

        class Watched(original):  # type: ignore[misc, valid-type]
            def __getattr__(self, attribute: str) -> Any:
                super().__getattr__(attribute)
                patches.replace(self, attribute, functools.partial(recording, f"{name}.{attribute}"))
                return vars(self)[attribute]

        for attribute, value in list(vars(library).items()):
            if isinstance(value, _FUNCTION_POINTER):
                patches.replace(library, attribute, functools.partial(recording, f"{name}.{attribute}"))
        library.__class__ = Watched
        self._libraries.append((library, original))

    def _recording(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        recorder = self.recorder

        def recorded(*args: Any, **kwargs: Any) -> Any:
            if recorder.at_own_work():
                return function(*args, **kwargs)
            return recorder.threads.here().call(name, EXTENSION, lambda: function(*args, **kwargs), args, kwargs)

        if isinstance(function, _FUNCTION_POINTER):
            return _Pointer(function, recorded)
        return functools.wraps(function)(recorded)


class _Pointer:
    """A function of a library with its calls recorded; its types can be read and set as before."""

    def __init__(self, function: Any, recorded: Callable[..., Any]) -> None:
        self.__dict__.update(_function=function, _recorded=recorded)

    def __call__(self, *args: Any) -> Any:
        return self._recorded(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_opgrip"):
            self.__dict__[name] = value
        else:
            setattr(self._function, name, value)


def _is_compiled_function(value: Any) -> bool:
    """Whether it is a function that is not Python's, as pybind and ctypes make them."""
    if isinstance(value, type | FunctionType | ModuleType) and not hasattr(value, "_opgrip_patch"):
        return False
    return callable(value) and type(value).__module__ in ("builtins", "_ctypes", "ctypes", "nanobind")
