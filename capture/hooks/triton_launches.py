"""Launches of Triton kernels, which the dispatcher never sees: each is a call of its own, however it is written.

`kernel[grid](...)`, `wrap_triton(kernel)[grid](...)` and kernels under `triton.autotune` or `triton.heuristics` all end
in the `run` of a kernel that Triton compiles, or of one that it interprets on the CPU; this is what is watched.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from opgrip.capture.hooks.dispatch import RecordingMode
from opgrip.capture.program.patches import LateModules, Patches
from opgrip.capture.recording.recorder import Recorder
from opgrip.capture.recording.thread_mode import ThreadMode
from opgrip.capture.torch_compat.compiler_private import is_higher_order
from opgrip.traces.schema.arguments import Opaque
from opgrip.traces.schema.operator_arguments import TYPES, launch_keywords
from opgrip.traces.schema.python_objects import NamedSpec
from opgrip.traces.schema.records import EXTENSION

LAUNCHING = {"triton.runtime.jit": ("JITFunction",), "triton.runtime.interpreter": ("InterpretedFunction",)}
"""Classes of kernels by the module that they are in; their `run` launches."""
TUNING = {"triton.runtime.autotuner": ("Autotuner",)}
"""Those whose `_bench` tries a configuration."""
TRIED = "launched by Triton's autotuner, to try a configuration"

_PLAIN = (bool, int, float, str, type(None))
_DTYPES = {name: dtype for dtype, name in TYPES.items()}
_tuning = threading.local()


class TritonWatch:
    """While it is entered, launches of Triton kernels are recorded, also where the program loads Triton later.

    A launch has the place of the line that makes it. One that an operator makes, such as a `triton_op`, is inside that
    operator, whose replay makes it too. Of an autotuned kernel the launch with the chosen configuration is recorded;
    those that try configurations are counted.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._patches = Patches()
        self._names = {*LAUNCHING, *TUNING}
        self._late = LateModules(self._names.__contains__, self._watch_module)

    def __enter__(self) -> TritonWatch:
        for name in self._names:
            module = sys.modules.get(name)
            if module is not None:
                self._watch_module(module)
        self._late.__enter__()
        return self

    def __exit__(self, *ignored: object) -> None:
        self._late.__exit__()
        self._patches.undo()

    def _watch_module(self, module: ModuleType) -> None:
        try:
            for name in LAUNCHING.get(module.__name__, ()):
                self._patches.replace(getattr(module, name), "run", self._recording)
            for name in TUNING.get(module.__name__, ()):
                self._patches.replace(getattr(module, name), "_bench", self._passing_over)
        except Exception as error:
            self.recorder.lost.drop(f"kernels of {module.__name__}", error)

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
            with _inside_operator(recorder, mode):
                return mode.call(
                    *(launch.name, EXTENSION, lambda: run(kernel, *args, **kwargs), launch.args, launch.kwargs),
                    # the compiled kernel is nothing that a program uses
                    lambda result: None,
                )

        return recorded

    def _describe(self, kernel: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Launch | None:
        """A launch; None for one that is not recorded, which is counted."""
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
                with self._inside_kernel(tuner):
                    return bench(tuner, *args, **kwargs)
            finally:
                _tuning.depth -= 1

        return passed

    @contextmanager
    def _inside_kernel(self, tuner: Any) -> Iterator[None]:
        """Calls of the block, which prepare launches and run between them, are inside the kernel that is tuned."""
        recorder, token = self.recorder, object()
        mode = recorder.threads.here()
        mode.enter(token, recorder.places.inside(mode.place, name_of(innermost_kernel(tuner))))
        try:
            yield
        finally:
            mode.leave(token)


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch as a trace holds it.

    Attributes
    ----------
    args : what the kernel takes when it runs, in the order of its parameters
    kwargs : its grid, constants and options
    repeat_grid : gives Triton the grid where the program has a function for that, which has run then
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    repeat_grid: Callable[[Any], Any] | None = None


def innermost_kernel(kernel: Any) -> Any:
    """The kernel that an autotuned one, or one with heuristics, launches."""
    while hasattr(kernel.fn, "fn"):
        kernel = kernel.fn
    return kernel


def name_of(kernel: Any) -> str:
    """`module:function` of a kernel."""
    return f"{kernel.fn.__module__}:{kernel.fn.__qualname__}"


def describe_launch(kernel: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Launch:
    """A call of a kernel's `run`.

    Raises
    ------
    Exception : whatever the program's function of the grid raises; Triton is to call it then, and to raise it
    """
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


_known: WeakKeyDictionary[Any, _Parameters] = WeakKeyDictionary()


def _parameters_of(kernel: Any) -> _Parameters:
    known = _known.get(kernel.fn)
    if known is None:
        parameters = inspect.signature(kernel.fn).parameters
        known = _known[kernel.fn] = _Parameters(
            tuple(parameters),
            tuple(name for name, item in parameters.items() if "constexpr" in str(item.annotation)),
            {name: item.default for name, item in parameters.items() if item.default is not item.empty},
        )
    return known


def _constant(value: Any) -> Any:
    """What is fixed when a kernel is compiled, as a trace holds it."""
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
def _inside_operator(recorder: Recorder, mode: ThreadMode) -> Iterator[None]:
    """Calls of the block are inside the operator that runs in this thread, where one does."""
    operator = _running_operator() if mode.place.inside is None or mode.place.gripped else None
    if operator is None:
        yield
        return
    token = object()
    mode.enter(token, recorder.places.inside(mode.place, operator))
    try:
        yield
    finally:
        mode.leave(token)


_HANDLER = RecordingMode.__torch_dispatch__.__code__


def _running_operator() -> str | None:
    """The name of the operator that this thread is in, by the frame that runs it.

    None outside all, and where it takes functions: what these call is recorded for itself.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _HANDLER:
            variables = frame.f_locals
            name = None if is_higher_order(variables["func"]) else str(variables["func"])
            if sys.version_info < (3, 13):
                # a copy that would keep the variables' values alive
                variables.clear()
            return name
        frame = frame.f_back
    return None
