"""The dataflow of a trace: which call made what another one took, its critical path, and the memory that is alive."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from opgrip.traces.arguments import TensorSpec, leaves, tensors
from opgrip.traces.records import NO_STORAGE, OPERATOR, Signature
from opgrip.traces.trace import Trace


@dataclass(slots=True)
class Step:
    """One call of a graph.

    Attributes
    ----------
    number : place of the call in the trace's table
    duration_ns : on the host
    device_ns : how long it kept an accelerator busy; None for a call on the host alone
    time_ns : on the device where the call worked on one, else on the host; of a call that the capture perturbed there,
        as the trace has it
    host_ns : the same on the host, of all calls
    after : the calls that made or last wrote the memory that this one takes
    takes, gives : storages of its arguments and of its results
    writes : storages of arguments that it writes into
    """

    number: int
    op: str
    module: str
    phase: str
    thread: str
    start_ns: int
    duration_ns: int
    device_ns: int | None
    time_ns: int
    host_ns: int
    takes: list[int]
    gives: list[int]
    writes: list[int]
    after: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Storage:
    """Memory that tensors live in.

    Attributes
    ----------
    bytes : from its start to the end of the last tensor that a call took in it; of those given, where none was taken
    made_by : the call that gave it first; None for what was there before, such as parameters
    first, last : the calls that mention it first and last
    """

    number: int
    bytes: int
    made_by: int | None
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Graph:
    """Calls, storages, and what follows from them.

    Attributes
    ----------
    steps : by number; calls that were made inside another one belong to that
    critical_path : the chain of calls, each after the one before it, that takes longest
    critical_ns : sum of their times, of the device for calls that worked on one
    critical_host_ns : the same on the host
    peak_bytes : the most memory that is mentioned before and after a call at once, without what was there before
    peak_at : that call
    outside_bytes : memory that was there before
    """

    steps: dict[int, Step]
    storages: dict[int, Storage]
    critical_path: list[int]
    critical_ns: int
    critical_host_ns: int
    peak_bytes: int
    peak_at: int | None
    outside_bytes: int


class _Extents:
    """How far the tensors in each storage reach, in bytes.

    What a signature tells of results is of its first call, and other calls may give others; arguments are told by all.
    """

    def __init__(self) -> None:
        self._argument_extents: dict[int, int] = {}
        self._result_extents: dict[int, int] = {}

    def note(self, storages: list[int], specs: list[TensorSpec | None], argument_count: int) -> None:
        """Take note of a call's tensors, of which the first so many are arguments."""
        for place, (storage, spec) in enumerate(zip(storages, specs, strict=True)):
            if spec is not None:
                extents = self._argument_extents if place < argument_count else self._result_extents
                extents[storage] = max(extents.get(storage, 0), spec.extent)

    def of(self, storage: int) -> int:
        """Of one storage, 0 where nothing is known of it."""
        return self._argument_extents.get(storage, self._result_extents.get(storage, 0))


def make_graph(trace: Trace) -> Graph:
    """The dataflow of a trace's calls."""
    steps: dict[int, Step] = {}
    storages: dict[int, Storage] = {}
    writer: dict[int, int] = {}
    extents = _Extents()
    for step in _steps(trace, extents):
        steps[step.number] = step
        step.after = sorted({writer[number] for number in step.takes if number in writer})
        for number in (*step.takes, *step.gives):
            storage = storages.get(number)
            if storage is None:
                made_by = None if number in step.takes else step.number
                storages[number] = Storage(number, 0, made_by, step.number, step.number)
                if made_by is not None:
                    writer[number] = step.number
            else:
                storage.last = step.number
        writer.update(dict.fromkeys(step.writes, step.number))
    for storage in storages.values():
        storage.bytes = extents.of(storage.number)
    path = _critical_path(steps)
    peak, at = _peak(steps, storages)
    outside = sum(storage.bytes for storage in storages.values() if storage.made_by is None)
    critical = [steps[number] for number in path]
    times = sum(step.time_ns for step in critical), sum(step.host_ns for step in critical)
    return Graph(steps, storages, path, *times, peak, at, outside)


def _steps(trace: Trace, extents: _Extents) -> Iterator[Step]:
    """The calls of a trace in the order in which they started; `extents` is told of their tensors."""
    signatures = {signature.number: signature for signature in trace.signatures}
    own = trace.own_calls
    columns = (
        *("signature", "op", "module", "phase", "thread", "start_ns", "duration_ns", "device_ns", "time_ns", "host_ns"),
        *("tensors", "first_storage"),
    )
    for number, *values in zip(own.index, *(own[name] for name in columns), strict=True):
        signature, op, module, phase, thread, start, duration, device, time, host, count, first = values
        mentioned = [int(item) for item in trace.storages[first : first + count]]
        shape = _shape_of(signatures.get(int(signature)), len(mentioned))
        extents.note(mentioned, shape.specs, shape.argument_count)
        takes, gives = mentioned[: shape.argument_count], mentioned[shape.argument_count :]
        writes = [storage for storage, written in zip(takes, shape.written, strict=True) if written]
        yield Step(
            *(int(number), str(op), str(module), str(phase), str(thread), int(start), int(duration)),
            device_ns=None if np.isnan(device) else round(device),
            time_ns=round(time),
            host_ns=round(host),
            takes=_distinct_storages(takes),
            gives=_distinct_storages(gives),
            writes=_distinct_storages(writes),
        )


@dataclass(frozen=True, slots=True)
class _Shape:
    """What a signature says of its tensors: how many it takes, the spec of each, which of its arguments are written."""

    argument_count: int
    specs: list[TensorSpec | None]
    written: list[bool]


def _shape_of(signature: Signature | None, count: int) -> _Shape:
    if signature is None:
        return _Shape(0, [None] * count, [])
    argument_specs = list(tensors([signature.args, signature.kwargs]))
    result_specs = [leaf for leaf in leaves(signature.outputs) if isinstance(leaf, TensorSpec)]
    number = min(len(argument_specs), count)
    specs: list[TensorSpec | None] = [*argument_specs[:number]]
    specs += result_specs[: count - number]
    specs += [None] * (count - len(specs))
    return _Shape(number, specs, written(signature)[:number])


def written(signature: Signature) -> list[bool]:
    """Whether a call may write into each of the tensors among its arguments, in their order."""
    places = _written_places(signature)
    arguments = [*enumerate(signature.args), *signature.kwargs.items()]
    return [place in places for place, value in arguments for _ in tensors(value)]


def _written_places(signature: Signature) -> set[int | str]:
    """The places of the arguments that a call may write into."""
    everything: set[int | str] = {*range(len(signature.args)), *signature.kwargs}
    schema = schema_of(signature)
    if schema is None:
        return everything
    arguments = list(enumerate(schema.arguments))
    pairs = [(index, item.name) for index, item in arguments if item.alias_info and item.alias_info.is_write]
    return {place for pair in pairs for place in pair}


def schema_of(signature: Signature) -> Any:
    """What torch says of a signature's operator; None where it knows none of that name."""
    if signature.kind != OPERATOR or not signature.op.isascii():
        # torch cannot be asked for every text that a file may hold
        return None
    namespace, _, rest = signature.op.partition(".")
    name, _, overload = rest.rpartition(".")
    schema: Any = None
    for candidate in torch._C._jit_get_schemas_for_operator(f"{namespace}::{name}"):
        if candidate.overload_name == ("" if overload == "default" else overload):
            schema = candidate
    return schema


def _distinct_storages(numbers: list[int]) -> list[int]:
    return list(dict.fromkeys(number for number in numbers if number != NO_STORAGE))


def _critical_path(steps: dict[int, Step]) -> list[int]:
    """The chain of calls with the longest sum of times; calls come after those that they depend on."""
    longest: dict[int, int] = {}
    before: dict[int, int | None] = {}
    for number, step in steps.items():
        previous = max(step.after, key=lambda other: longest.get(other, 0), default=None)
        before[number] = previous
        longest[number] = step.time_ns + (0 if previous is None else longest.get(previous, 0))
    last = max(longest, key=lambda number: longest[number], default=None)
    path: list[int] = []
    while last is not None:
        path.append(last)
        last = before[last]
    return path[::-1]


def _peak(steps: dict[int, Step], storages: dict[int, Storage]) -> tuple[int, int | None]:
    begins: dict[int, int] = {}
    ends: dict[int, int] = {}
    for storage in storages.values():
        if storage.made_by is not None:
            begins[storage.first] = begins.get(storage.first, 0) + storage.bytes
            ends[storage.last] = ends.get(storage.last, 0) + storage.bytes
    alive = peak = 0
    at: int | None = None
    for number in steps:
        alive += begins.get(number, 0)
        if alive > peak:
            peak, at = alive, number
        alive -= ends.get(number, 0)
    return peak, at
