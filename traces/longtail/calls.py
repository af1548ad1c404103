"""The calls of a trace by thread, each with the function that made it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isnan
from typing import TypeAlias

from opgrip.traces.labels import are_marks
from opgrip.traces.longtail.operators import Operation
from opgrip.traces.records import Scope
from opgrip.traces.runs import Place, origins
from opgrip.traces.trace import Trace

LOCALS = ".<locals>."
BACKWARD = "backward"

Function: TypeAlias = tuple[str, str]
"""File and name of a function; empty for what no function of the program did."""


@dataclass(frozen=True, slots=True)
class MadeCall:
    """One call.

    Attributes
    ----------
    number : in the trace's table
    place : the function; None for calls that no function of the program made
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


def threads_of(trace: Trace, operations: Mapping[int, Operation]) -> list[list[MadeCall]]:
    """The calls that the program made itself, those of each thread in their order."""
    places = _places(trace)
    calls_by_thread: dict[tuple[int, int], list[MadeCall]] = {}
    for thread, call in _calls(trace, operations, places):
        calls_by_thread.setdefault(thread, []).append(call)
    return list(calls_by_thread.values())


def _calls(
    trace: Trace, operations: Mapping[int, Operation], places: Mapping[int, Place]
) -> Iterator[tuple[tuple[int, int], MadeCall]]:
    calls = trace.calls
    own = calls[calls["inside"].isna() & ~are_marks(calls)]
    threads = zip(own["process"].cat.codes.tolist(), own["thread"].cat.codes.tolist(), strict=True)
    names = (
        *("signature", "module", "scope", "line", "start_ns", "duration_ns", "host_ns", "perturbed", "device_ns"),
        *("tensors", "first_storage"),
    )
    columns = (own[name].tolist() for name in names)
    memory: list[int] = trace.storages.tolist()
    for number, thread, *values in zip(own.index.tolist(), threads, *columns, strict=True):
        signature, module, scope, line, start, duration, host, perturbed, device, count, first = values
        operation = operations.get(signature)
        if operation is None:
            # the trace is damaged
            continue
        takes, gives = operation.interface.memory_of(tuple(memory[first : first + count]))
        device_ns = None if isnan(device) else device
        yield (
            thread,
            MadeCall(
                *(number, operation, places.get(scope), str(module), scope, line, signature),
                *(start, duration, host, perturbed, device_ns, takes, gives),
            ),
        )


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
