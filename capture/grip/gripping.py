"""Replacement of functions by wrappers that record their calls, in all modules that refer to them."""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from opgrip.capture.grip.gripped import KEEP, GrippedFunction, Keep, own_work
from opgrip.capture.grip.objects import isolate_from_program
from opgrip.capture.grip.patterns import (
    LOCALS,
    CannotDecorate,
    GripTarget,
    Pattern,
    decorated_inside,
    decorated_module,
    find_targets,
    loaded_modules,
    plain_function,
    rebind,
    refusal,
)
from opgrip.capture.program.patches import LateModules
from opgrip.capture.recording.recorder import Recorder
from opgrip.errors import one_line, raise_if_from_program

Compile = Callable[[bytes, str], CodeType]


class Grips:
    """Context manager that grips functions that match patterns, also in modules loaded later.

    refused : by name of a function, pattern or module, the reason why nothing was gripped
    """

    def __init__(
        self,
        patterns: Sequence[Pattern] = (),
        keep: Keep = KEEP,
        to: Path | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.patterns = tuple(patterns)
        self.written: list[Path] = []
        self.refused: dict[str, str] = {}
        self._keep = keep
        # resolve the path now, as the program may change its working directory
        self._to = None if to is None else to.absolute()
        self._recorder = recorder
        self._functions: dict[tuple[int, str | None], GrippedFunction] = {}
        self._codes: dict[FunctionType, Any] = {}
        self._lent: list[tuple[type, str]] = []
        self._matched: set[Pattern] = set()
        self._writing: list[threading.Thread] = []
        self._one_at_a_time = threading.Lock()
        self._pid = os.getpid()
        self._late = LateModules(
            lambda name: any(item.matches_module(name) for item in self.patterns), self._grip_module
        )

    @property
    def functions(self) -> tuple[GrippedFunction, ...]:
        return tuple(self._functions.values())

    def __enter__(self) -> Grips:
        for function in self.functions:
            function.active = True
        if self.patterns:
            self._grip_in(loaded_modules())
            self._late.__enter__()
        return self

    def __exit__(self, *ignored: object) -> None:
        for gripped in self.functions:
            gripped.active = False
        if not self.patterns:
            return
        self._late.__exit__()
        for function, code in self._codes.items():
            function.__code__ = code
        self._codes.clear()
        for owner, name in self._lent:
            type.__delattr__(owner, name)
        self._lent.clear()
        rebind({gripped.wrapper: gripped.wrapped for gripped in self.functions})

    def grip(self, value: Any, entry: str | None = None, owner: type | None = None) -> Any:
        """Return a wrapper that records the calls of a function, or `value` itself if they cannot be recorded."""
        function = plain_function(value)
        candidate = value if function is None else function
        name = entry or str(getattr(candidate, "__qualname__", None) or candidate)
        reason = refusal(candidate)
        if reason is not None or function is None:
            self.refused[name] = str(reason)
            return value
        wrapper = self._function(GripTarget(function, owner, name)).wrapper
        return type(value)(wrapper) if isinstance(value, staticmethod | classmethod) else wrapper

    def finish(self) -> None:
        for thread in self._writing:
            thread.join()
        called = [function for function in self.functions if function.called]
        for function in called:
            self._write(function)
        for pattern in self.patterns:
            if pattern not in self._matched:
                self.refused[str(pattern)] = "it matches no function that the program loaded"
            elif not any(map(pattern.matches, [*(function.entry for function in called), *self.refused])):
                self.refused[str(pattern)] = "no function that it matches was called"

    def script_compiler(self) -> Compile | None:
        patterns = [item for item in self.patterns if item.matches_module("__main__")]
        if not patterns:
            return None

        def is_gripped(qualname: str) -> bool:
            matching_patterns = {item for item in patterns if item.matches(qualname)}
            self._matched |= matching_patterns
            return bool(matching_patterns)

        return lambda source, file: decorated_module(source, file, is_gripped, self.grip)

    def _grip_module(self, module: ModuleType) -> None:
        try:
            with own_work():
                self._grip_in([module])
        except Exception as error:
            raise_if_from_program(error)
            self.refused[module.__name__] = one_line(error)

    def _grip_in(self, modules: Iterable[ModuleType]) -> None:
        modules = list(modules)
        replacements: dict[FunctionType, FunctionType] = {}
        for module in modules:
            for target in find_targets(module, self.patterns):
                self._matched.update(item for item in self.patterns if item.matches(target.qualname))
                if target.inside is not None:
                    self._grip_inside(target, target.inside)
                elif any(target.function is gripped.wrapper for gripped in self.functions):
                    # the function may be imported into other modules
                    continue
                elif (reason := refusal(target.function)) is not None:
                    self.refused[target.qualname] = reason
                elif target.inherited:
                    self._lend(target)
                else:
                    replacements[target.function] = self._function(target).wrapper
        rebind(replacements, modules if len(modules) == 1 else None)

    def _lend(self, target: GripTarget) -> None:
        # the class that inherits the method gets a wrapper, and the base class keeps the original
        name = target.qualname.rpartition(".")[2]
        if (target.owner, name) not in self._lent:
            assert target.owner is not None
            method = inspect.getattr_static(target.owner, name)
            wrapper = self._function(target).wrapper
            kind = type(method)
            type.__setattr__(target.owner, name, kind(wrapper) if kind in (staticmethod, classmethod) else wrapper)
            self._lent.append((target.owner, name))

    def _grip_inside(self, target: GripTarget, around: FunctionType) -> None:
        if around in self._codes:
            return
        outer = around.__qualname__
        code = around.__code__

        def is_gripped(qualname: str) -> bool:
            return any(pattern.matches(qualname) for pattern in self.patterns)

        try:
            around.__code__ = decorated_inside(around, outer, is_gripped, self.grip)
            self._codes[around] = code
        except CannotDecorate as error:
            self.refused[target.qualname] = str(error)

    def _function(self, target: GripTarget) -> GrippedFunction:
        function = target.function
        # an inner function is a new object whenever the outer one runs, but counts as one function
        is_local = LOCALS in target.qualname
        key = (id(function.__code__ if is_local else function), target.qualname if target.inherited else None)
        gripped = self._functions.get(key)
        if gripped is None:
            keep = None if self._to is None else self._keep
            gripped = self._functions[key] = GrippedFunction(target, keep, self._recorder, self._write_beside)
        elif gripped.wrapped is not function:
            gripped.wrap(function)
        return gripped

    def _write_beside(self, function: GrippedFunction) -> None:
        thread = threading.Thread(target=self._write, args=(function,), name="opgrip-gripper", daemon=True)
        self._writing.append(thread)
        with own_work() if self._recorder is None else self._recorder.own_calls.lock:
            thread.start()

    def _write(self, function: GrippedFunction) -> None:
        if self._to is None or os.getpid() != self._pid:
            return
        try:
            with self._one_at_a_time, own_work(), isolate_from_program():
                if not function.written:
                    function.written = True
                    self._write_sample(function, self._to)
        except Exception as error:
            self.refused[function.entry] = str(error) if hasattr(error, "hint") else one_line(error)

    def _write_sample(self, function: GrippedFunction, to: Path) -> None:
        # imported only here because it loads the code that reads syntax trees
        from opgrip.capture.grip.sample_folder import write_folder

        gripped = function.gripped()
        if not gripped.calls:
            self.refused[function.entry] = ", ".join(function.lost) or "none of its calls ended during the recording"
            return
        self.written.append(write_folder(gripped, to))
