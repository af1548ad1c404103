"""The calls of a trace by thread, each with the function that made it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from typing import TypeAlias

import pandas as pd

from opgrip.traces.analysis.longtail.operators import Operation
from opgrip.traces.analysis.module_runs import Place, origins
from opgrip.traces.schema.records import Scope
from opgrip.traces.table.profiler_labels import are_marks
from opgrip.traces.table.trace import Trace

LOCALS = ".<locals>."
BACKWARD = "backward"

KEPT_CALLS = 1 << 19
"""Calls of a trace that are kept, some 500 bytes each; those of a longer one are made as often as they are needed."""

Thread: TypeAlias = tuple[int, int]
"""Codes of the process and the thread in a trace's table."""
Function: TypeAlias = tuple[str, str]
"""File and name of a function; empty for what no function of the program did."""


@dataclass(frozen=True, slots=True)
class MadeCall:
    """One call.

    Attributes
    ----------
    number : in the trace's table
    place : the function; None for calls that no function of the program made, and for those with other processes
    module : path of the module that it worked for
    duration_ns : on the host
    host_ns : the same, of a call that the capture perturbed as the trace has it
    perturbed : whether the capture's own work ran right before it, or within it
    device_ns : how long it kept an accelerator busy; None for a call on the host alone
    takes, gives : memory of each tensor among its arguments and results
    """

    number: int
    operation: Operation
    place: Place | None
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
    """The calls that a trace's program made itself; those of a long trace are made whenever they are gone through."""

    def __init__(self, trace: Trace, operations: Mapping[int, Operation]) -> None:
        self._trace = trace
        self._operations = operations
        self._places = _places(trace)
        self._kept: list[tuple[Thread, MadeCall]] | None = None
        self._kept_of: dict[Thread, list[MadeCall]] = {}
        self.threads: list[Thread] = list(dict.fromkeys(thread for thread, _ in self._made()))

    def __iter__(self) -> Iterator[MadeCall]:
        """All, in the order in which they started."""
        return (call for _, call in self._made())

    def of(self, thread: Thread) -> Iterator[MadeCall]:
        """Those of a thread, in their order."""
        if self._kept is not None:
            return iter(self._kept_of.get(thread, ()))
        return (call for own, call in self._made(thread) if own == thread)

    def distinct(self) -> pd.DataFrame:
        """Those of `Trace.distinct_calls` that are made at a place."""
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


def _places(trace: Trace) -> dict[int, Place]:
    """By number of a scope, the function; of a backward pass, that whose calls caused it."""
    origin = origins(trace)
    place_by_scope = {scope.number: _function(origin[scope.number], scope.phase) for scope in trace.scopes}
    return {number: place for number, place in place_by_scope.items() if place is not None}


def _function(scope: Scope, phase: str) -> Place | None:
    """The function that made a scope's calls. Comprehensions and lambdas are part of the function that they are in."""
    file, name = scope.file, scope.function
    within = 0
    while name.endswith(">") and LOCALS in name:
        name, within = name.rpartition(LOCALS)[0], within + 1
    if not name or name.endswith(">"):
        # a script's own lines are in no function
        return None
    return Place(name, phase, file, scope.callers[within:])


def function_of(call: MadeCall) -> Function:
    """The function that made a call."""
    return (call.place.file, call.place.name) if call.place is not None else ("", "")
