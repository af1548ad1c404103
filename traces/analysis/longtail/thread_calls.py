"""Calls of operators by thread, with the Python functions that made them; and estimates of how often functions ran."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isnan, prod
from typing import TypeAlias

import pandas as pd

from opgrip.traces.analysis.ranks.collectives import namespace_of
from opgrip.traces.analysis.timeline import TimelinePlace, origins
from opgrip.traces.schema.arguments import TensorSpec
from opgrip.traces.schema.operator_arguments import Interface, interface_of, schema_of, written
from opgrip.traces.schema.records import OPERATOR, Scope, Signature
from opgrip.traces.table.profiler_labels import are_marks
from opgrip.traces.table.trace import Trace

# names of operators that multiply matrices and vectors
PRODUCTS = frozenset(
    {"mm", "addmm", "addmm_activation", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "linear", "int_mm"}
)
# parts of the names of other operators whose kernels do much work, including backward operators
DENSE_PARTS = (
    *("convolution", "conv_depthwise", "thnn_conv", "attention", "lstm", "gru", "rnn_", "embedding", "fft_"),
    *("batch_norm", "layer_norm", "group_norm", "rms_norm"),
    *("max_pool", "avg_pool", "upsample_", "grid_sampler"),
)


@dataclass(frozen=True, slots=True)
class Operation:
    """Properties of a signature that the analysis of long-tail functions needs.

    moves : True if the operator reads or writes elements, unlike a view
    """

    op: str
    interface: Interface
    argument_bytes: tuple[int, ...]
    result_bytes: tuple[int, ...]
    writes: tuple[bool, ...]
    shapes: tuple[tuple[object, ...], ...]
    extents: tuple[int, ...]
    moves: bool
    dense: bool
    exchanges: bool


def operation_of(signature: Signature) -> Operation:
    interface = interface_of(signature)
    inputs = interface.inputs
    return Operation(
        signature.op,
        interface,
        tuple(map(bytes_of, inputs)),
        tuple(map(bytes_of, interface.outputs)),
        tuple(written(signature)),
        tuple((spec.shape, spec.stride, spec.offset, spec.dtype) for spec in inputs),
        tuple(spec.extent for spec in inputs),
        not _is_view(signature),
        is_dense(signature),
        namespace_of(signature) is not None,
    )


def is_dense(signature: Signature) -> bool:
    if signature.kind != OPERATOR:
        return True
    name = signature.op.partition(".")[2].rpartition(".")[0].lstrip("_")
    return name in PRODUCTS or any(part in name for part in DENSE_PARTS)


def bytes_of(spec: TensorSpec) -> int:
    if spec.stride is None:
        return sum(map(bytes_of, spec.parts))
    sizes = (size for size, step in zip(spec.shape, spec.stride, strict=True) if step or not size)
    return prod(sizes) * spec.dtype.itemsize


def _is_view(signature: Signature) -> bool:
    schema = schema_of(signature)
    if schema is None or any(written(signature)):
        return False
    return any(item.alias_info is not None for item in schema.returns)


LOCALS = ".<locals>."
BACKWARD = "backward"

# maximum number of calls that are kept in memory, at about 500 bytes each; for longer traces they are created again
# when needed
KEPT_CALLS = 1 << 19

Thread: TypeAlias = tuple[int | None, str]  # process and name
Function: TypeAlias = tuple[str, str]  # file and name of a function; empty for calls outside the program's functions


@dataclass(frozen=True, slots=True)
class MadeCall:
    """A call of an operator, with the Python function that called it.

    number : index in the trace's call table
    inputs, outputs : numbers of the storages of its arguments and of its results
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
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class MadeCalls:
    def __init__(self, trace: Trace, operations: Mapping[int, Operation]) -> None:
        self._trace = trace
        self._operations = operations
        self._places = _places(trace)
        self._kept: list[tuple[Thread, MadeCall]] | None = None
        self._kept_of: dict[Thread, list[MadeCall]] = {}
        self.threads: list[Thread] = list(dict.fromkeys(thread for thread, _ in self._made()))

    def __iter__(self) -> Iterator[MadeCall]:
        return (call for _, call in self._made())

    def of(self, thread: Thread) -> Iterator[MadeCall]:
        if self._kept is not None:
            return iter(self._kept_of.get(thread, ()))
        return (call for own, call in self._made(thread) if own == thread)

    def distinct(self) -> pd.DataFrame:
        calls = _own_calls(self._trace.distinct_calls)
        return calls[calls["signature"].isin(list(self._operations)) & calls["scope"].isin(list(self._places))]

    def _made(self, thread: Thread | None = None) -> Iterator[tuple[Thread, MadeCall]]:
        if self._kept is not None:
            yield from self._kept
            return
        if self._trace.call_count <= KEPT_CALLS:
            self._kept = [item for calls, memory in self._parts() for item in self._calls(_own_calls(calls), memory)]
            for own_thread, call in self._kept:
                self._kept_of.setdefault(own_thread, []).append(call)
            yield from self._kept
            return
        for calls, memory in self._parts():
            own = _own_calls(calls)
            if thread is not None:
                own = own[[made == thread for made in zip(own["process"], own["thread"], strict=True)]]
            yield from self._calls(own, memory)

    def _parts(self) -> Iterator[tuple[pd.DataFrame, list[int]]]:
        return ((calls, storages.tolist()) for calls, storages in self._trace.call_parts())

    def _calls(self, own: pd.DataFrame, memory: Sequence[int]) -> Iterator[tuple[Thread, MadeCall]]:
        threads = zip(own["process"].tolist(), own["thread"].tolist(), strict=True)
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
            inputs, outputs = operation.interface.memory_of(tuple(memory[first : first + count]))
            device_ns = None if isnan(device) else device
            place = None if operation.exchanges else self._places.get(scope)
            yield (
                thread,
                MadeCall(
                    number,
                    operation,
                    place,
                    str(module),
                    scope,
                    line,
                    signature,
                    start_ns=start,
                    duration_ns=duration,
                    host_ns=host,
                    perturbed=perturbed,
                    device_ns=device_ns,
                    inputs=inputs,
                    outputs=outputs,
                ),
            )


def _own_calls(calls: pd.DataFrame) -> pd.DataFrame:
    return calls[calls["inside"].isna() & ~are_marks(calls)]


def _places(trace: Trace) -> dict[int, TimelinePlace]:
    origin = origins(trace)
    place_by_scope = {scope.number: _function(origin[scope.number], scope.phase) for scope in trace.scopes}
    return {number: place for number, place in place_by_scope.items() if place is not None}


def _function(scope: Scope, phase: str) -> TimelinePlace | None:
    # a comprehension or lambda belongs to the function around it
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


@dataclass(slots=True)
class _Open:
    line: int
    op: str
    moved: bool
    last: int


class Invocations:
    """Estimates how often a thread called each Python function."""

    def __init__(self) -> None:
        self.counts: dict[Function, int] = {}
        self._opened: dict[tuple[Function, str], _Open] = {}
        self._index = -1

    def note(self, call: MadeCall) -> None:
        self._index += 1
        if call.place is None:
            return
        function = function_of(call)
        self.counts.setdefault(function, 0)
        if call.place.phase == BACKWARD:
            return
        open_call = self._opened.get((function, call.module))
        if open_call is None or _begins(open_call, call, self._index):
            self.counts[function] += 1
            self._opened[function, call.module] = _Open(call.line, call.operation.op, False, self._index)
        else:
            open_call.moved = call.line != open_call.line
            open_call.last = self._index


def _begins(open_call: _Open, call: MadeCall, index: int) -> bool:
    came_back = index != open_call.last + 1
    if call.line == open_call.line and call.operation.op == open_call.op:
        return open_call.moved or came_back
    return came_back and call.line < open_call.line
