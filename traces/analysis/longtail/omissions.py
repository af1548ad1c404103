"""Long-tail functions that no kernel needs to replace, such as constructors, and commands that record the others."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from opgrip.traces.analysis.longtail.thread_calls import BACKWARD, Function, MadeCall, function_of
from opgrip.traces.table.trace import Trace

CONSTRUCTORS = ("__init__", "__new__", "__post_init__")
INITIALIZERS = ("reset_parameters", "init_weights", "_init_weights")
# pattern of the names of functions that load data
LOADING = re.compile(r"(Dataset|Loader)\w*\.|collate", re.IGNORECASE)
# Limits for a function that contains the program: it is called once, lasts at least the share WHOLE of the program's
# time, and makes at most the share OWN of its calls itself.
WHOLE, OWN = 0.8, 0.5


@dataclass(slots=True)
class _Span:
    first_ns: int
    last_ns: int
    calls: int = 0
    last_forward_ns: int = -1


class Spans:
    """For each function of one thread, the period from its first operator to its last."""

    def __init__(self) -> None:
        self._spans: dict[Function, _Span] = {}
        self._first_backward_ns: int | None = None

    def note(self, call: MadeCall) -> None:
        end = call.start_ns + call.duration_ns
        span = self._spans.setdefault(function_of(call), _Span(call.start_ns, end))
        span.first_ns, span.last_ns = min(span.first_ns, call.start_ns), max(span.last_ns, end)
        span.calls += 1
        if call.place is None or call.place.phase != BACKWARD:
            span.last_forward_ns = call.start_ns
        elif self._first_backward_ns is None:
            self._first_backward_ns = call.start_ns

    def containing(self, counts: Mapping[Function, int]) -> set[Function]:
        """Return the functions within which almost all work of the thread ran, such as the program's main loop.

        Each was called once, lasted at least the share `WHOLE` of the time, and made at most the share `OWN` of the
        calls itself; `counts` are the numbers of calls of each function.
        """
        spans = self._spans.values()
        calls = sum(span.calls for span in spans)
        whole = max((span.last_ns for span in spans), default=0) - min((span.first_ns for span in spans), default=0)
        return {
            function
            for function, span in self._spans.items()
            if counts.get(function) == 1
            and span.last_ns - span.first_ns >= WHOLE * whole
            and span.calls <= OWN * calls
            # calls in a backward pass belong to functions that have returned
            and span.last_forward_ns >= (self._first_backward_ns or 0)
        }


def models_forward(trace: Trace) -> set[Function]:
    """Return the `forward` functions of the modules that no other module calls."""
    return {
        (scope.file, scope.function)
        for scope in trace.scopes
        if not scope.module and scope.module_type and scope.function.endswith(f"{scope.module_type}.forward")
    }


def constructors(trace: Trace, counts: Mapping[Function, int]) -> set[Function]:
    """Return the constructors of modules, and other constructors that the program calls once."""
    module_types = {scope.module_type for scope in trace.scopes}
    # a module whose submodules make all its calls has no scope
    module_types |= {name.split(".")[-2] for _, name in counts if name.endswith(".forward")}
    return {
        (file, name)
        for (file, name), count in counts.items()
        if name.rpartition(".")[2] in CONSTRUCTORS and (count == 1 or name.split(".")[-2:][0] in module_types)
    }


def reason_to_omit(
    header: Mapping[str, Any], function: Function, building: Container[Function], containing: Container[Function]
) -> str | None:
    """Return why a function is not listed as long-tail, such as "loads data", or None if it is listed."""
    file, name = function
    if function in building or name.rpartition(".")[2] in INITIALIZERS:
        return "builds the model"
    if LOADING.search(name):
        return "loads data"
    if function in containing or (name == "main" and is_script(file, header)):
        return "the program or a step"
    # a script may have the same name as one of Python's modules
    is_library = file.partition("/")[0].removesuffix(".py") in sys.stdlib_module_names
    return "Python's library" if is_library and not is_script(file, header) else None


ALONE = ("-f", "--force", "--find-longtail")
# options in the recorded command that do not affect which program runs: without a value, and with a value
VALUED = ("-o", "--output", "--top", "--bandwidth", "--max-calls", "--max-bytes")


def pattern_of(header: Mapping[str, Any], file: str, function: str) -> str:
    """Return the pattern `module:qualname` by which `opcapture --grip` selects a function."""
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".").strip(".")
    if is_script(file, header):
        module = "__main__"
    return f"{module}:{function.replace('.<locals>', '')}"


def grip_command(header: Mapping[str, Any], pattern: str) -> str:
    """Return an `opcapture` command that runs a trace's program again and records the functions of a pattern."""
    own, program = _parts(header)
    return shlex.join(["opcapture", *_run_options(own), "--grip", pattern, *(["--", *program] if program else [])])


def _parts(header: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    command = header.get("command")
    words = [str(word) for word in command] if isinstance(command, list) else []
    if not words or words[0] != "opcapture":
        return [], words
    place = words.index("--") if "--" in words else len(words)
    return words[1:place], words[place + 1 :]


def is_script(file: str, header: Mapping[str, Any]) -> bool:
    """Return True if a file is the script of the trace's command, which Python runs as `__main__`."""
    own, program = _parts(header)
    match program:
        case ["-m", module, *_]:
            return PurePath(file).as_posix().endswith(f"{module.replace('.', '/')}.py")
        case [script, *_]:
            # the command of a script that captured itself holds only the script's name
            return PurePath(file) == PurePath(script) or (not own and PurePath(file).name == script)
    return False


def _run_options(options: Sequence[str]) -> list[str]:
    run_options: list[str] = []
    pending = iter(options)
    for word in pending:
        name, value, _ = word.partition("=")
        if name in VALUED and not value:
            next(pending, None)
        elif name not in (*ALONE, *VALUED):
            run_options.append(word)
    return run_options
