"""Hooks that inform each thread's dispatch mode about the running module, the optimizer step and autocast."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from types import FunctionType, ModuleType
from typing import Any, cast
from weakref import ref

import torch
from torch import nn
from torch.fx import GraphModule
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from opgrip.capture.hooks.extensions import ModuleWatch
from opgrip.capture.program.environment import describe_autocast
from opgrip.capture.program.patches import Patches
from opgrip.capture.program.places import FORWARD, OPTIMIZER, Location
from opgrip.capture.recording.recorder import Recorder
from opgrip.capture.recording.thread_mode import ThreadMode
from opgrip.capture.torch_compat.compiler_private import hide_from_compiler
from opgrip.capture.torch_compat.torch_private import HAS_FAST_LABELS
from opgrip.errors import is_from_program
from opgrip.traces.schema.records import HIGHER_ORDER, UNSEEN_RPC, UNSEEN_THREAD
from opgrip.traces.table.profiler_labels import MARK_ENTER, MARK_EXIT


class _FastLabel:
    """A label of torch's faster `record_function`, whose class in C++ cannot be watched or extended."""

    def __init__(self, label: Any, name: str, note: Callable[[str, _FastLabel], None]) -> None:
        self._label, self.name, self._note = label, name, note

    def __enter__(self) -> Any:
        result = self._label.__enter__()
        self._note(MARK_ENTER, self)
        return result

    def __exit__(self, *error: Any) -> Any:
        self._note(MARK_EXIT, self)
        return self._label.__exit__(*error)


def _is_closure(value: Any) -> bool:
    return callable(value) and not isinstance(value, type | nn.Module)


class ScopeWatch:
    """A context that tells each thread's dispatch mode which module or optimizer step runs, and if autocast is on.

    module_raised : called with each exception that leaves an outermost module
    """

    def __init__(self, recorder: Recorder, module_raised: Callable[[BaseException], None] | None = None) -> None:
        self.recorder = recorder
        self._paths = recorder.module_paths
        self._module_raised = module_raised
        self._hooks = ExitStack()
        self._patches = Patches()

    def __enter__(self) -> ScopeWatch:
        self._hooks.callback(register_optimizer_step_pre_hook(self._enter_optimizer).remove)
        self._hooks.callback(register_optimizer_step_post_hook(self._leave_optimizer).remove)
        # torch's own hooks around forward are three times as slow
        self._patches.replace(nn.Module, "__call__", self._watching_call)
        for name in ("__enter__", "__exit__"):
            self._patches.replace(torch.autocast, name, self._watching_autocast)
        if HAS_FAST_LABELS:
            self._patches.replace(torch._C._profiler, "_RecordFunctionFast", self._watching_labels)
        return self

    def __exit__(self, *ignored: object) -> None:
        self._patches.undo()
        self._hooks.close()

    def _watching_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        here, enter, is_traced = self._mode_here, self._enter_module, torch.compiler.is_dynamo_compiling

        def watched(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # the compiler traces this as the module's call, evaluates this condition and keeps only the call
            if is_traced():
                return original(module, *args, **kwargs)
            mode, depth = here()
            if mode is None:
                return original(module, *args, **kwargs)
            try:
                enter(mode, depth, module)
                return original(module, *args, **kwargs)
            except Exception as error:
                if not depth and self._module_raised is not None:
                    self._report(self._module_raised, error)
                raise
            finally:
                try:
                    mode.leave_to(depth)
                except BaseException as error:
                    # `leave_to` was interrupted, or failed after it left the location
                    mode.leave_to(depth)
                    self.recorder.lost.drop("module scope", error)

        return functools.wraps(original)(watched)

    def _mode_here(self) -> tuple[ThreadMode | None, int]:
        try:
            mode = self.recorder.threads.in_step()
            if mode is None:
                return None, 0
            mode.settle()
            return mode, mode.depth()
        except Exception as error:
            self.recorder.lost.drop("module scope", error)
            return None, 0

    def _enter_module(self, mode: ThreadMode, depth: int, module: nn.Module) -> None:
        try:
            place = mode.place
            there = place.modules.get(id(module))
            if there is None or there[0]() is not module:
                there = (ref(module), self._place_in(module, place))
                place.modules[id(module)] = there
            if not place.module_type:
                mode.check_settings()
            mode.enter(module, there[1])
        except Exception as error:
            mode.leave_to(depth)
            self.recorder.lost.drop("module scope", error)

    def _place_in(self, module: nn.Module, place: Location) -> Location:
        if place.gripped and (place.inside or "").startswith(HIGHER_ORDER) and isinstance(module, GraphModule):
            # torch made this module from a function passed to the operator
            return place
        path = self._paths.called(module, place.module if place.module_type else None)
        return self.recorder.places.module(self._outside_optimizer(place), path, type(module).__name__)

    def _outside_optimizer(self, place: Location) -> Location:
        return self.recorder.places.phase(place, FORWARD) if place.phase == OPTIMIZER else place

    def _enter_optimizer(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return None
        try:
            mode = self.recorder.threads.in_step()
            if mode is None:
                return None
            mode.settle()
            mode.check_settings()
            # pass the frame that runs the step, because no hook reports a step that fails
            mode.enter(optimizer, self.recorder.places.phase(mode.place, OPTIMIZER), sys._getframe(1))
            if any(map(_is_closure, (*args[1:], *kwargs.values()))):
                watched = {name: self._watching_closure(value) for name, value in kwargs.items()}
                return (args[0], *map(self._watching_closure, args[1:])), watched
        except Exception as error:
            self.recorder.lost.drop("optimizer scope", error)
        return None

    def _watching_closure(self, closure: Any) -> Any:
        # runs it in the phase in which the program would call it
        if not _is_closure(closure):
            return closure

        @functools.wraps(closure, updated=())
        def run(*args: Any, **kwargs: Any) -> Any:
            mode, depth = self._mode_here()
            try:
                if mode is not None:
                    # pass this frame: an interrupt of the program may prevent that the closure is left below
                    mode.enter(closure, self._outside_optimizer(mode.place), sys._getframe())
            except Exception as error:
                self.recorder.lost.drop("optimizer closure", error)
            try:
                return closure(*args, **kwargs)
            finally:
                try:
                    if mode is not None:
                        mode.settle()
                        mode.leave_to(depth)
                except Exception as error:
                    self.recorder.lost.drop("optimizer closure", error)

        return run

    def _leave_optimizer(self, optimizer: Any, *ignored: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            return
        try:
            mode = self.recorder.threads.in_step()
            if mode is not None:
                mode.leave(optimizer)
                self.recorder.steps.end_optimizer_step(optimizer)
        except Exception as error:
            self.recorder.lost.drop("optimizer scope", error)

    def _report(self, report: Callable[[BaseException], None], error: Exception) -> None:
        try:
            report(error)
        except Exception as fault:
            self.recorder.lost.drop("module that raised", fault)

    def _watching_labels(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def watched(name: str, *args: Any, **kwargs: Any) -> Any:
            label = original(name, *args, **kwargs)
            return label if torch.compiler.is_dynamo_compiling() else _FastLabel(label, name, self._note_label)

        return watched

    def _note_label(self, op: str, label: _FastLabel) -> None:
        try:
            mode = self.recorder.threads.in_step()
            if mode is not None:
                mode.note_label(op, label.name, id(label))
        except Exception as error:
            self.recorder.lost.drop(op, error)

    def _watching_autocast(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            try:
                self._note_autocast()
            except BaseException as error:
                if is_from_program(error):
                    # otherwise later calls would have the wrong scope
                    self._note_autocast()
                self.recorder.lost.drop("autocast scope", error)
            return result

        return watched

    def _note_autocast(self) -> None:
        mode = self.recorder.threads.in_step()
        if mode is not None:
            mode.set_autocast(describe_autocast())


# a compiled step runs these hooks in Python between its regions
for hook in (ScopeWatch._enter_optimizer, ScopeWatch._leave_optimizer):
    hide_from_compiler(cast(FunctionType, hook))


class ThreadWatch(ModuleWatch):
    """A context in which calls of threads that `threading.Thread` starts, and of functions run by RPC, are recorded."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder, (_RPC,))

    def __enter__(self) -> ModuleWatch:
        self._patches.replace(threading.Thread, "start", self._watching)
        return super().__enter__()

    def __exit__(self, *ignored: object) -> None:
        super().__exit__()
        if getattr(sys.modules.get("torch.distributed.rpc"), "_init_counter", 0):
            self.recorder.lost.dropped[REQUESTED, UNSEEN_RPC] += 0
        for mode in tuple(self.recorder.threads.all):
            # it called modules
            if not mode.was_entered:
                self.recorder.lost.dropped[f"thread {mode.thread_name}", UNSEEN_THREAD] += 0

    def _watching(self, start: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
        def watched(thread: threading.Thread) -> None:
            if not self.recorder.at_own_work():
                self._watch(thread)
            start(thread)

        return watched

    def _watch(self, thread: threading.Thread) -> None:
        run = thread.run

        def recorded() -> None:
            # restore the method: a reference from the thread to itself would keep the thread alive
            thread.__dict__.pop("run", None)
            self._record(run, thread.name, True)

        thread.run = recorded  # type: ignore[method-assign]

    def _watch_module(self, module: ModuleType) -> None:
        # threads of C++ run the function that `init_rpc` finds here, also after this context
        watching = lambda run: functools.wraps(run)(lambda call: self._record(lambda: run(call), "rpc", False))  # noqa: E731
        self._patches.replace(module, "_run_function", watching)

    def _record(self, run: Callable[[], Any], name: str, ends: bool) -> Any:
        if not ends and self.recorder.threads.idle:
            return run()
        mode = None
        try:
            mode = self.recorder.threads.here()
            mode.thread_name = name
            mode.__enter__()
        except Exception as error:
            self.recorder.lost.drop(f"thread {name}", error)
            mode = None
        try:
            return run()
        finally:
            if mode is not None:
                mode.__exit__(None, None, None)
                mode.ended = ends


_RPC = "torch.distributed.rpc.internal"
REQUESTED = "operators and backward passes requested by RPC"
