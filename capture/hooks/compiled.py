"""Recording of programs with compiled regions: as original operators, or as one call per region."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import ModuleType
from typing import Any

import torch

from opgrip.capture.hooks.extensions import ModuleWatch
from opgrip.capture.program.capture_choices import OPERATORS
from opgrip.capture.program.patches import Patches
from opgrip.capture.recording.recorder import Recorder
from opgrip.capture.recording.thread_mode import ThreadMode
from opgrip.capture.torch_compat.compiler_private import (
    OrderlyMode,
    compiling_as_unwatched,
    leave_compiled,
    place_of_compiling,
    stance_here,
)
from opgrip.capture.torch_compat.torch_private import innermost_mode
from opgrip.traces.schema.records import COMPILED, TRACED

_COMPILER, _REGIONS = "torch._dynamo", "torch._inductor.output_code"
_KERNEL = re.compile(r"^(\w+) = async_compile\.\w+\(|\b(extern_kernels\.\w+|torch\.ops(?:\.\w+)+)\(", re.MULTILINE)


class OpaqueMode(ThreadMode):
    """Dispatch mode that leaves compiled code as it is, and records the operators that this code calls."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


leave_compiled(OpaqueMode)


class CompiledWatch(ModuleWatch):
    """A context in which compiled regions are recorded, as their operators or as single calls."""

    def __init__(self, recorder: Recorder, compiled: str) -> None:
        # a program that does not use the compiler does not wait a second for its import
        super().__init__(recorder, (_COMPILER if compiled == OPERATORS else _REGIONS,))
        self._stance = ExitStack()

    def __exit__(self, *ignored: object) -> None:
        super().__exit__()
        self._stance.close()

    def _watch_module(self, module: ModuleType) -> None:
        if module.__name__ == _REGIONS:
            self._patches.replace(module.CompiledFxGraph, "__call__", self._recording)
            return
        # otherwise torch permanently marks code that it meets under a mode as not to be compiled
        self._stance.enter_context(_eager)
        place = place_of_compiling()
        if place is not None:
            self._patches.replace(*place, lambda entered: compiling_as_unwatched(entered, lambda: _eager.before))

    def _recording(self, original: Callable[[Any, Sequence[Any]], Any]) -> Callable[[Any, Sequence[Any]], Any]:
        @functools.wraps(original)
        def recorded(graph: Any, inputs: Sequence[Any]) -> Any:
            mode = None
            try:
                name = f"torch.compile:{region_name(graph)}"
                mode = self.recorder.threads.here()
            except Exception as error:
                self.recorder.lost.drop("compiled region", error)
            if mode is None:
                return original(graph, inputs)
            return mode.call(name, COMPILED, lambda: original(graph, inputs), tuple(inputs), {})

        return recorded


class TracingWatch:
    """A context in which dispatch modes are off while TorchScript traces: under a mode, some results are constants."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._patches = Patches()

    def __enter__(self) -> TracingWatch:
        for owner in (torch._C, torch._C.ScriptModule, torch.jit._trace):
            for name in _TRACERS & vars(owner).keys():
                self._patches.replace(owner, name, self._stepping_aside)
        return self

    def __exit__(self, *ignored: object) -> None:
        self._patches.undo()

    def _stepping_aside(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def trace(*args: Any, **kwargs: Any) -> Any:
            modes: list[OrderlyMode] = []
            try:
                while isinstance(mode := innermost_mode(), OrderlyMode):
                    mode.__exit__(None, None, None)
                    modes.append(mode)
                if modes and not self._recorder.threads.idle:
                    self._recorder.lost.count("torch.jit.trace", TRACED)
                return original(*args, **kwargs)
            finally:
                for mode in reversed(modes):
                    mode.__enter__()

        return trace


# functions that run a program's function and make a graph of it, or compare the graph with the function
_TRACERS = {
    "_check_trace",
    "_create_function_from_trace",
    "_create_function_from_trace_with_dict",
    "_create_graph_by_tracing",
    "_create_method_from_trace",
    "_create_method_from_trace_with_dict",
}


class _Eager:
    # stance `force_eager` from the start of the first capture to the end of the last one

    before = "default"  # stance that the program had set

    def __init__(self) -> None:
        self._captures = 0
        self._stance: AbstractContextManager[Any] = nullcontext()
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            if self._captures == 0:
                self.before = stance_here()
                self._stance = torch.compiler.set_stance("force_eager")
                self._stance.__enter__()
            self._captures += 1

    def __exit__(self, *ignored: object) -> None:
        with self._lock:
            self._captures -= 1
            if self._captures == 0:
                self._stance.__exit__(None, None, None)


_eager = _Eager()


def region_name(graph: Any) -> str:
    region: str | None = getattr(graph, "_opgrip_name", None)
    if region is None:
        launches = (kernel or call for kernel, call in _KERNEL.findall(graph.source_code or ""))
        region = "+".join(dict.fromkeys(name for name in launches if not name.endswith(_NOT_KERNELS))) or "region"
        graph._opgrip_name = region
    return region


_NOT_KERNELS = ("_reinterpret_tensor", "empty_strided_cpu", "empty_strided_cuda", "assert_size_stride")
