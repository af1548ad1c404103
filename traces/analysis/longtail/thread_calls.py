"""Calls of a trace by thread, with the function that made each call, and functions that are not worth gripping."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from pathlib import PurePath
from typing import Any, TypeAlias

import pandas as pd

from opgrip.traces.analysis.longtail.operators import Operation
from opgrip.traces.analysis.timeline import TimelinePlace, origins
from opgrip.traces.schema.records import Scope
from opgrip.traces.table.profiler_labels import are_marks
from opgrip.traces.table.trace import Trace

LOCALS = ".<locals>."
BACKWARD = "backward"

KEPT_CALLS = 1 << 19
"""maximum number of calls for which all are kept in memory, some 500 bytes each; otherwise they are created when needed
"""

Thread: TypeAlias = tuple[int, int]
"""codes of process and thread in a trace's table"""
Function: TypeAlias = tuple[str, str]
"""file and name of a function; empty for calls outside the program's functions"""


@dataclass(frozen=True, slots=True)
class MadeCall:
    """Call of an operator, with the function that made it.

    Attributes
    ----------
    number : index in the trace's table
    place : the function; None outside functions of the program, and for exchanges with other processes
    module : path of the module in which the call ran
    duration_ns, host_ns : times on the host; for a perturbed call, `host_ns` is the value in the trace
    perturbed : True if the capture's own work ran right before or within it
    device_ns : time that the call kept an accelerator busy; None for a call on the host only
    takes, gives : memory of each argument and result
    """

    number: int
    operation: Operation
    place: TimelinePlace | None
    module: str
    scope: int
    line: int
    signature: int
    start_ns: int
    duration_ns: int
    host_ns: float
    perturbed: bool
    device_ns: float | None
    takes: tuple[int, ...]
    gives: tuple[int, ...]


class MadeCalls:
    """Calls that a trace's program made itself, not inside other calls; a long trace makes them at each iteration."""

    def __init__(self, trace: Trace, operations: Mapping[int, Operation]) -> None:
        self._trace = trace
        self._operations = operations
        self._places = _places(trace)
        self._kept: list[tuple[Thread, MadeCall]] | None = None
        self._kept_of: dict[Thread, list[MadeCall]] = {}
        self.threads: list[Thread] = list(dict.fromkeys(thread for thread, _ in self._made()))

    def __iter__(self) -> Iterator[MadeCall]:
        """Yield all calls in start order."""
        return (call for _, call in self._made())

    def of(self, thread: Thread) -> Iterator[MadeCall]:
        """Yield the calls of a thread in order."""
        if self._kept is not None:
            return iter(self._kept_of.get(thread, ()))
        return (call for own, call in self._made(thread) if own == thread)

    def distinct(self) -> pd.DataFrame:
        """Return the calls of `Trace.distinct_calls` that functions made."""
        calls = _own(self._trace.distinct_calls)
        return calls[calls["signature"].isin(list(self._operations)) & calls["scope"].isin(list(self._places))]

    def _made(self, thread: Thread | None = None) -> Iterator[tuple[Thread, MadeCall]]:
        if self._kept is not None:
            yield from self._kept
            return
        if self._trace.call_count <= KEPT_CALLS:
            self._kept = [item for calls, memory in self._parts() for item in self._calls(_own(calls), memory)]
            for own_thread, call in self._kept:
                self._kept_of.setdefault(own_thread, []).append(call)
            yield from self._kept
            return
        for calls, memory in self._parts():
            own = _own(calls)
            if thread is not None:
                own = own[(own["process"].cat.codes == thread[0]) & (own["thread"].cat.codes == thread[1])]
            yield from self._calls(own, memory)

    def _parts(self) -> Iterator[tuple[pd.DataFrame, list[int]]]:
        return ((calls, storages.tolist()) for calls, storages in self._trace.call_parts())

    def _calls(self, own: pd.DataFrame, memory: Sequence[int]) -> Iterator[tuple[Thread, MadeCall]]:
        threads = zip(own["process"].cat.codes.tolist(), own["thread"].cat.codes.tolist(), strict=True)
        names = (
            *("signature", "module", "scope", "line", "start_ns", "duration_ns", "host_ns", "perturbed", "device_ns"),
            *("tensors", "first_storage"),
        )
        columns = (own[name].tolist() for name in names)
        for number, thread, *values in zip(own.index.tolist(), threads, *columns, strict=True):
            signature, module, scope, line, start, duration, host, perturbed, device, count, first = values
            operation = self._operations.get(signature)
            if operation is None:
                # the trace is damaged
                continue
            takes, gives = operation.interface.memory_of(tuple(memory[first : first + count]))
            device_ns = None if isnan(device) else device
            place = None if operation.exchanges else self._places.get(scope)
            yield (
                thread,
                MadeCall(
                    *(number, operation, place, str(module), scope, line, signature),
                    *(start, duration, host, perturbed, device_ns, takes, gives),
                ),
            )


def _own(calls: pd.DataFrame) -> pd.DataFrame:
    return calls[calls["inside"].isna() & ~are_marks(calls)]


def _places(trace: Trace) -> dict[int, TimelinePlace]:
    """Return the function of each scope; for a backward pass, the function of the forward calls."""
    origin = origins(trace)
    place_by_scope = {scope.number: _function(origin[scope.number], scope.phase) for scope in trace.scopes}
    return {number: place for number, place in place_by_scope.items() if place is not None}


def _function(scope: Scope, phase: str) -> TimelinePlace | None:
    """Return the function of a scope; a comprehension or lambda belongs to the function around it."""
    file, name = scope.file, scope.function
    within = 0
    while name.endswith(">") and LOCALS in name:
        name, within = name.rpartition(LOCALS)[0], within + 1
    if not name or name.endswith(">"):
        # lines of a script outside functions
        return None
    return TimelinePlace(name, phase, file, scope.callers[within:])


def function_of(call: MadeCall) -> Function:
    return (call.place.file, call.place.name) if call.place is not None else ("", "")


CONSTRUCTORS = ("__init__", "__new__", "__post_init__")
INITIALIZERS = ("reset_parameters", "init_weights", "_init_weights")
LOADING = re.compile(r"(Dataset|Loader)\w*\.|collate", re.IGNORECASE)
"""names of functions that load data"""
WHOLE, OWN = 0.8, 0.5
"""Limits for a function that contains the program: it is called once, lasts at least for the first share of the
program,
and makes at most the second share of its calls itself.
"""


@dataclass(slots=True)
class _Span:
    """First start, last end and number of a function's calls.

    Attributes
    ----------
    last_forward_ns : start of its last call outside a backward pass, or -1
    """

    first_ns: int
    last_ns: int
    calls: int = 0
    last_forward_ns: int = -1


class Spans:
    """Time spans of the functions of a thread, each from its first operator to its last."""

    def __init__(self) -> None:
        self._spans: dict[Function, _Span] = {}
        self._first_backward_ns: int | None = None

    def note(self, call: MadeCall) -> None:
        """Add the thread's next call."""
        end = call.start_ns + call.duration_ns
        span = self._spans.setdefault(function_of(call), _Span(call.start_ns, end))
        span.first_ns, span.last_ns = min(span.first_ns, call.start_ns), max(span.last_ns, end)
        span.calls += 1
        if call.place is None or call.place.phase != BACKWARD:
            span.last_forward_ns = call.start_ns
        elif self._first_backward_ns is None:
            self._first_backward_ns = call.start_ns

    def containing(self, counts: Mapping[Function, int]) -> set[Function]:
        """Return the functions that contain the thread's other calls: called once, with other functions running within
        them.

        Parameters
        ----------
        counts : number of calls of each function
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
    """Return the `forward` functions of the models that the program calls; each contains a step."""
    return {
        (scope.file, scope.function)
        for scope in trace.scopes
        if not scope.module and scope.module_type and scope.function.endswith(f"{scope.module_type}.forward")
    }


def constructors(trace: Trace, counts: Mapping[Function, int]) -> set[Function]:
    """Return the constructors of modules, and other constructors that the program calls once.

    Parameters
    ----------
    counts : number of calls of each function
    """
    module_types = {scope.module_type for scope in trace.scopes}
    return {
        (file, name)
        for (file, name), count in counts.items()
        if name.rpartition(".")[2] in CONSTRUCTORS and (count == 1 or name.split(".")[-2:][0] in module_types)
    }


def reason_to_omit(
    header: Mapping[str, Any], function: Function, building: Container[Function], containing: Container[Function]
) -> str | None:
    """Return why a function is not worth gripping, or None if it is.

    Parameters
    ----------
    building : constructors that build the model
    containing : functions that contain the program or a step of it
    """
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
VALUED = ("-o", "--output", "--top", "--bandwidth", "--max-calls", "--max-bytes")
"""options of the recorded command that do not affect what it runs: without and with a value"""


def pattern_of(header: Mapping[str, Any], file: str, function: str) -> str:
    """Return the pattern `module:qualname` of a function for `--grip`."""
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".").strip(".")
    if is_script(file, header):
        module = "__main__"
    return f"{module}:{function.replace('.<locals>', '')}"


def grip_command(header: Mapping[str, Any], pattern: str) -> str:
    """Return an `opcapture` command that runs a trace's program again with `--grip` and the pattern."""
    own, program = _parts(header)
    return shlex.join(["opcapture", *_run_options(own), "--grip", pattern, *(["--", *program] if program else [])])


def _parts(header: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the options of `opcapture` in a trace's command, and the script with its arguments."""
    command = header.get("command")
    words = [str(word) for word in command] if isinstance(command, list) else []
    if not words or words[0] != "opcapture":
        return [], words
    place = words.index("--") if "--" in words else len(words)
    return words[1:place], words[place + 1 :]


def is_script(file: str, header: Mapping[str, Any]) -> bool:
    """Return True if a file is the script of the trace's command, which Python imports as `__main__`."""
    own, program = _parts(header)
    match program:
        case ["-m", module, *_]:
            return PurePath(file).as_posix().endswith(f"{module.replace('.', '/')}.py")
        case [script, *_]:
            # the command of a script that captured itself holds only the script's name
            return PurePath(file) == PurePath(script) or (not own and PurePath(file).name == script)
    return False


def _run_options(options: Sequence[str]) -> list[str]:
    """Return the options that select what to run."""
    run_options: list[str] = []
    pending = iter(options)
    for word in pending:
        name, value, _ = word.partition("=")
        if name in VALUED and not value:
            next(pending, None)
        elif name not in (*ALONE, *VALUED):
            run_options.append(word)
    return run_options
