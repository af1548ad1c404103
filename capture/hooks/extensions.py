"""Functions that the dispatcher does not see: functions of extension modules, and launches of Triton kernels."""

from __future__ import annotations

import ctypes
import functools
import inspect
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from types import FrameType, FunctionType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from opgrip.capture.program.capture_choices import KNOWN_EXTENSIONS
from opgrip.capture.program.patches import LateModules, Patches
from opgrip.capture.recording.recorder import Recorder
from opgrip.capture.recording.thread_mode import ThreadMode
from opgrip.capture.torch_compat.compiler_private import is_higher_order
from opgrip.traces.schema.arguments import Opaque
from opgrip.traces.schema.operator_arguments import TYPES, launch_keywords
from opgrip.traces.schema.python_objects import NamedSpec
from opgrip.traces.schema.records import EXTENSION, TRIED

_FUNCTION_POINTER: type = type(ctypes.pythonapi.Py_IsInitialized).__mro__[1]


class ModuleWatch(ABC):
    def __init__(self, recorder: Recorder, names: Iterable[str]) -> None:
        self.recorder = recorder
        self.names = tuple(names)
        self._patches = Patches()
        self._late = LateModules(self.names.__contains__, self._loaded)

    def __enter__(self) -> ModuleWatch:
        for name in self.names:
            if sys.modules.get(name) is not None:
                # another thread may still be loading it, and fail
                with suppress(ImportError):
                    self._loaded(import_module(name))
        self._late.__enter__()
        return self

    def __exit__(self, *ignored: object) -> None:
        self._late.__exit__()
        self._patches.undo()

    def _loaded(self, module: ModuleType) -> None:
        try:
            self._watch_module(module)
        except Exception as error:
            self.recorder.lost.drop(f"extension {module.__name__}", error)

    @abstractmethod
    def _watch_module(self, module: ModuleType) -> None: ...


class ExtensionWatch(ModuleWatch):
    """A context in which the calls of functions of the named extension modules are recorded."""

    def __init__(self, recorder: Recorder, names: Iterable[str] = KNOWN_EXTENSIONS) -> None:
        super().__init__(recorder, names)
        self._has_begun = False
        self._watched_names: set[str] = set()
        self._libraries: list[tuple[ctypes.CDLL, type]] = []

    def __enter__(self) -> ModuleWatch:
        self._has_begun = True
        return super().__enter__()

    def __exit__(self, *ignored: object) -> None:
        super().__exit__()
        for library, original in self._libraries:
            library.__class__ = original
        self._libraries.clear()

    def refused(self) -> dict[str, str]:
        if not self._has_begun:
            return {}
        reasons = {}
        for name in self.names:
            module = sys.modules.get(name)
            if module is None and name not in KNOWN_EXTENSIONS:
                reasons[name] = "the program did not load it"
            elif module is not None and module.__name__ not in self._watched_names:
                reasons[name] = "it has no compiled functions"
        return reasons

    def _watch_module(self, module: ModuleType) -> None:
        for attribute, value in list(vars(module).items()):
            if isinstance(value, ctypes.CDLL):
                self._watch_library(f"{module.__name__}:{attribute}", value)
            elif _is_compiled_function(value):
                name = f"{module.__name__}:{attribute}"
                self._patches.replace(module, attribute, functools.partial(self._recording, name))
            else:
                continue
            self._watched_names.add(module.__name__)

    def _watch_library(self, name: str, library: ctypes.CDLL) -> None:
        original = type(library)
        # a function that was not accessed before is wrapped at its first access
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
    if isinstance(value, type | FunctionType | ModuleType) and not hasattr(value, "_opgrip_patch"):
        return False
    return callable(value) and type(value).__module__ in ("builtins", "_ctypes", "ctypes", "nanobind")


# classes of kernels whose `run` method launches the kernel, by module
LAUNCHING = {"triton.runtime.jit": ("JITFunction",), "triton.runtime.interpreter": ("InterpretedFunction",)}
TUNING = {"triton.runtime.autotuner": ("Autotuner",)}  # classes whose `_bench` method tries a configuration, by module

_PLAIN = (bool, int, float, str, type(None))
_DTYPES = {name: dtype for dtype, name in TYPES.items()}
_tuning = threading.local()


class TritonWatch(ModuleWatch):
    """A context for recording launches of Triton kernels, even if the program loads Triton later."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder, (*LAUNCHING, *TUNING))

    def _watch_module(self, module: ModuleType) -> None:
        for name in LAUNCHING.get(module.__name__, ()):
            self._patches.replace(getattr(module, name), "run", self._recording)
        for name in TUNING.get(module.__name__, ()):
            self._patches.replace(getattr(module, name), "_bench", self._passing_over)

    def _recording(self, run: Callable[..., Any]) -> Callable[..., Any]:
        recorder = self.recorder

        @functools.wraps(run)
        def recorded(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            if recorder.threads.idle or recorder.at_own_work() or kwargs.get("warmup"):
                return run(kernel, *args, **kwargs)
            launch = self._describe(kernel, args, kwargs)
            if launch is None:
                return run(kernel, *args, **kwargs)
            if launch.repeat_grid is not None:
                kwargs["grid"] = launch.repeat_grid
            mode = recorder.threads.here()
            operator = _running_operator() if mode.place.inside is None or mode.place.gripped else None
            with _inside(recorder, mode, operator):
                return mode.call(
                    launch.name,
                    EXTENSION,
                    run=lambda: run(kernel, *args, **kwargs),
                    args=launch.args,
                    kwargs=launch.kwargs,
                    # programs do not use the compiled kernel that `run` returns
                    shown=lambda result: None,
                )

        return recorded

    def _describe(self, kernel: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Launch | None:
        name = "a Triton kernel"
        try:
            name = name_of(kernel)
            if not getattr(_tuning, "depth", 0):
                return describe_launch(kernel, args, kwargs)
            self.recorder.lost.dropped[name, TRIED] += 1
        except Exception as error:
            self.recorder.lost.drop(name, error)
        return None

    def _passing_over(self, bench: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(bench)
        def passed(tuner: Any, *args: Any, **kwargs: Any) -> Any:
            _tuning.depth = getattr(_tuning, "depth", 0) + 1
            try:
                # these calls prepare and separate trial launches
                with _inside(self.recorder, self.recorder.threads.here(), name_of(innermost_kernel(tuner))):
                    return bench(tuner, *args, **kwargs)
            finally:
                _tuning.depth -= 1

        return passed


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch of a Triton kernel in the form in which a trace records it.

    name : `module:function` of the kernel
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    repeat_grid: Callable[[Any], Any] | None = None


def innermost_kernel(kernel: Any) -> Any:
    while hasattr(kernel.fn, "fn"):
        kernel = kernel.fn
    return kernel


def name_of(kernel: Any) -> str:
    return f"{kernel.fn.__module__}:{kernel.fn.__qualname__}"


def describe_launch(kernel: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Launch:
    parameters = _parameters_of(kernel)
    named = {name: kwargs[name] for name in parameters.names if name in kwargs}
    bound = parameters.defaults | dict(zip(parameters.names, args, strict=False)) | named
    grid, repeat = kwargs["grid"], None
    if callable(grid):
        sizes = grid(bound)
        grid, repeat = sizes, lambda meta: sizes
    constants = {name: _constant(bound[name]) for name in parameters.constants}
    others = {name: _constant(value) for name, value in kwargs.items() if name not in (*bound, "grid", "warmup")}
    options = {name: value for name, value in others.items() if value is not None}
    running = tuple(bound[name] for name in parameters.names if name not in constants)
    return Launch(name_of(kernel), running, launch_keywords(tuple(map(int, grid)), constants, options), repeat)


@dataclass(frozen=True, slots=True)
class _Parameters:
    names: tuple[str, ...]
    constants: tuple[str, ...]
    defaults: dict[str, Any]


_parameters_by_function: WeakKeyDictionary[Any, _Parameters] = WeakKeyDictionary()


def _parameters_of(kernel: Any) -> _Parameters:
    cached = _parameters_by_function.get(kernel.fn)
    if cached is None:
        parameters = inspect.signature(kernel.fn).parameters
        cached = _parameters_by_function[kernel.fn] = _Parameters(
            tuple(parameters),
            tuple(name for name, item in parameters.items() if "constexpr" in str(item.annotation)),
            {name: item.default for name, item in parameters.items() if item.default is not item.empty},
        )
    return cached


def _constant(value: Any) -> Any:
    language = sys.modules.get("triton.language")
    if language is not None and isinstance(value, language.constexpr):
        return _constant(value.value)
    if type(value) in _PLAIN:
        return value
    if isinstance(value, tuple | list):
        return type(value)(map(_constant, value)) if type(value) in (tuple, list) else tuple(map(_constant, value))
    if language is not None and isinstance(value, language.dtype):
        return _DTYPES.get(repr(value).rpartition(".")[2], Opaque(repr(value)))
    if hasattr(value, "fn") and hasattr(value, "run"):
        return NamedSpec(name_of(value))
    return Opaque(f"{type(value).__module__}.{type(value).__qualname__}")


@contextmanager
def _inside(recorder: Recorder, mode: ThreadMode, function: str | None) -> Iterator[None]:
    if function is None:
        yield
        return
    token = object()
    mode.enter(token, recorder.places.inside(mode.place, function))
    try:
        yield
    finally:
        mode.leave(token)


_HANDLER = ThreadMode.__torch_dispatch__.__code__


def _running_operator() -> str | None:
    # None inside a higher-order operator too, because the calls that it makes are recorded separately
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _HANDLER:
            variables = frame.f_locals
            name = None if is_higher_order(variables["func"]) else str(variables["func"])
            if sys.version_info < (3, 13):
                # this copy would keep the variables' values alive
                variables.clear()
            return name
        frame = frame.f_back
    return None
