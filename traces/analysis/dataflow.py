"""Dataflow of a trace: which earlier calls wrote the memory of each call's arguments, critical path, and memory use."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from opgrip.traces.codec.call_blocks import Integers
from opgrip.traces.schema.arguments import TensorSpec, leaves, tensors
from opgrip.traces.schema.operator_arguments import written
from opgrip.traces.schema.records import NO_STORAGE, Signature
from opgrip.traces.table.profiler_labels import own_calls
from opgrip.traces.table.trace import Trace

UNKNOWN = -1


class MemoryNumbers:
    def __init__(self) -> None:
        self._near = array("i")
        self._far: dict[int, int] = {}
        self._count = 0

    def get(self, storage: int) -> int:
        number = self._near[storage] if 0 <= storage < len(self._near) else UNKNOWN
        return number if number != UNKNOWN or not self._far else self._far.get(storage, UNKNOWN)

    def set(self, storage: int, number: int) -> None:
        self._count += 1
        # damaged traces can have any numbers
        if storage in self._far or not 0 <= storage < self._end:
            self._far[storage] = number
            return
        self._reach(storage)
        self._near[storage] = number

    def raise_to(self, storages: Integers, numbers: Integers) -> None:
        self._count += len(storages)
        far = (storages < 0) | (storages >= self._end)
        if self._far:
            far |= np.isin(storages, np.array(list(self._far), dtype=np.int64))
        for storage, number in zip(storages[far].tolist(), numbers[far].tolist(), strict=True):
            self._far[storage] = max(self._far.get(storage, UNKNOWN), number)
        near = storages[~far]
        if len(near):
            self._reach(int(near.max()))
            np.maximum.at(np.frombuffer(self._near, dtype=np.intc), near, numbers[~far].astype(np.intc))

    @property
    def _end(self) -> int:
        return max(len(self._near), 2 * self._count + 4096)

    def _reach(self, storage: int) -> None:
        if storage >= len(self._near):
            self._near.extend(array("i", [UNKNOWN]) * (storage + 1 - len(self._near)))


COLUMNS = (
    *("signature", "op", "module", "phase", "thread", "start_ns", "duration_ns", "device_ns", "time_ns", "host_ns"),
    *("tensors", "first_storage"),
)


@dataclass(slots=True)
class DataflowStep:
    """A call, the storages that it uses, and the earlier calls that it depends on.

    number : index of the call in the trace's call table
    after : numbers of the earlier calls that created or last wrote the memory of its arguments
    inputs, outputs, writes : numbers of the storages of its arguments, of its results, and of arguments that it writes
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
    inputs: list[int]
    outputs: list[int]
    writes: list[int]
    after: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Storage:
    """Memory that holds tensors.

    made_by : index of the call that created it; None if no call in the trace created it
    first, last : indices of the first and the last call that use it
    """

    number: int
    bytes: int
    made_by: int | None
    first: int
    last: int


class Dataflow:
    """The calls in `Trace.own_calls`, each with the earlier calls that it depends on."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._shapes = _Shapes(trace.signatures)
        self._last, self._extents = MemoryNumbers(), MemoryNumbers()
        self.has_memory = False
        self.writers: dict[int, int] = {}
        for calls, memory in trace.call_parts():
            self.has_memory |= len(memory) > 0
            self._note(own_calls(calls), memory)

    def __iter__(self) -> Iterator[tuple[DataflowStep, list[Storage]]]:
        """Yield each call in start order, and the storages that no earlier call used."""
        writers: dict[int, int] = {}
        self.writers = writers
        last_of_alive: dict[int, int] = {}
        for step in self._steps():
            step.after = sorted({writers[number] for number in step.inputs if number in writers})
            new: list[Storage] = []
            mentioned, argument_storages = dict.fromkeys((*step.inputs, *step.outputs)), {*step.inputs}
            for number in mentioned:
                if number in last_of_alive:
                    continue
                made_by = None if number in argument_storages else step.number
                last = last_of_alive[number] = self._last.get(number)
                new.append(Storage(number, self._shapes.extent(self._extents.get(number)), made_by, step.number, last))
                if made_by is not None:
                    writers[number] = step.number
            writers.update(dict.fromkeys(step.writes, step.number))
            yield step, new
            for number in mentioned:
                if last_of_alive[number] == step.number:
                    del last_of_alive[number]
                    writers.pop(number, None)

    def _note(self, own: pd.DataFrame, memory: Integers) -> None:
        counts = own["tensors"].to_numpy(dtype=np.int64)
        before = np.cumsum(counts) - counts
        place = np.arange(counts.sum()) - np.repeat(before, counts)
        storages = memory[np.repeat(own["first_storage"].to_numpy(dtype=np.int64), counts) + place]
        numbers = np.repeat(own.index.to_numpy(dtype=np.int64), counts)
        extents = self._shapes.extents(own["signature"].to_numpy(dtype=np.int64), counts, place)
        self._last.raise_to(storages[storages != NO_STORAGE], numbers[storages != NO_STORAGE])
        is_known = (storages != NO_STORAGE) & (extents != UNKNOWN)
        self._extents.raise_to(storages[is_known], extents[is_known])

    def _steps(self) -> Iterator[DataflowStep]:
        for calls, memory in self._trace.call_parts():
            own, numbers = own_calls(calls), memory.tolist()
            for number, *values in zip(own.index.tolist(), *(own[name].tolist() for name in COLUMNS), strict=True):
                signature, op, module, phase, thread, start, duration, device, time, host, count, first = values
                shape = self._shapes.of(signature, count)
                inputs = numbers[first : first + shape.argument_count]
                yield DataflowStep(
                    number,
                    str(op),
                    str(module),
                    str(phase),
                    str(thread),
                    start_ns=start,
                    duration_ns=duration,
                    device_ns=None if device != device else round(device),
                    time_ns=round(time),
                    host_ns=round(host),
                    inputs=_distinct_storages(inputs),
                    outputs=_distinct_storages(numbers[first + shape.argument_count : first + count]),
                    writes=_distinct_storages([inputs[place] for place in shape.written]),
                )


@dataclass(frozen=True, slots=True)
class _Shape:
    argument_count: int
    extents: list[int]
    written: list[int]


class _Shapes:
    def __init__(self, signatures: Sequence[Signature]) -> None:
        self._signatures = {signature.number: signature for signature in signatures}
        specs = {number: _specs(item) for number, item in self._signatures.items()}
        self._sizes = sorted({spec.extent for both in specs.values() for side in both for spec in side})
        place = {size: number for number, size in enumerate(self._sizes)}
        self._numbers = {
            number: ([place[spec.extent] + len(place) for spec in arguments], [place[spec.extent] for spec in results])
            for number, (arguments, results) in specs.items()
        }
        self._shapes: dict[tuple[int, int], _Shape] = {}
        self._written: dict[int, list[int]] = {}

    def of(self, signature: int, count: int) -> _Shape:
        shape = self._shapes.get((signature, count))
        if shape is None:
            shape = self._shapes[signature, count] = self._make(signature, count)
        return shape

    def _make(self, signature: int, count: int) -> _Shape:
        record = self._signatures.get(signature)
        if record is None:
            return _Shape(0, [UNKNOWN] * count, [])
        argument_numbers, result_numbers = self._numbers[signature]
        extents = [*argument_numbers[:count], *result_numbers[: max(count - len(argument_numbers), 0)]]
        number = min(len(argument_numbers), count)
        places = [place for place in self._written_in(record) if place < number]
        return _Shape(number, extents + [UNKNOWN] * (count - len(extents)), places)

    def _written_in(self, record: Signature) -> list[int]:
        places = self._written.get(record.number)
        if places is None:
            places = [place for place, is_written in enumerate(written(record)) if is_written]
            self._written[record.number] = places
        return places

    def extents(self, signatures: Integers, counts: Integers, place: Integers) -> Integers:
        pairs, of_call = np.unique(np.column_stack([signatures, counts]), axis=0, return_inverse=True)
        pieces = [self.of(signature, count).extents for signature, count in pairs.tolist()]
        table = np.array([number for piece in pieces for number in piece], dtype=np.int64)
        firsts = np.cumsum([0, *map(len, pieces)])[of_call.reshape(-1)]
        numbers: Integers = table[np.repeat(firsts, counts) + place]
        return numbers

    def extent(self, number: int) -> int:
        return 0 if number == UNKNOWN else self._sizes[number % len(self._sizes)]


def _specs(signature: Signature) -> tuple[list[TensorSpec], list[TensorSpec]]:
    results = [leaf for leaf in leaves(signature.outputs) if isinstance(leaf, TensorSpec)]
    return list(tensors([signature.args, signature.kwargs])), results


def _distinct_storages(numbers: Iterable[int]) -> list[int]:
    return [number for number in dict.fromkeys(numbers) if number != NO_STORAGE]


PRUNED = 1 << 12  # maximum number of chains that are kept in addition to chains of memory in use


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """Facts about the dataflow graph of a trace.

    critical_path : indices of the calls in the slowest chain in which each call depends on the previous one
    peak_at, peak_op : index and operator of the call at which memory use is highest
    outside_bytes : bytes of memory that calls use, but that no call in the trace created
    """

    calls: int
    dependencies: int
    storages: int
    time_ns: int
    host_ns: int
    has_device: bool
    critical_path: array[int]
    critical_ns: int
    critical_host_ns: int
    peak_bytes: int
    peak_at: int | None
    peak_op: str
    outside_bytes: int


@dataclass(frozen=True, slots=True)
class TraceGraph:
    steps: dict[int, DataflowStep]
    storages: dict[int, Storage]
    facts: GraphFacts


def make_graph(trace: Trace) -> TraceGraph:
    flow, watch = Dataflow(trace), _Watch()
    steps: dict[int, DataflowStep] = {}
    storages: dict[int, Storage] = {}
    for step, new in flow:
        steps[step.number] = step
        storages.update((storage.number, storage) for storage in new)
        watch.add(step, new, flow.writers)
    return TraceGraph(steps, storages, watch.facts())


def graph_facts(flow: Dataflow) -> GraphFacts:
    watch = _Watch()
    for step, new in flow:
        watch.add(step, new, flow.writers)
    return watch.facts()


class _Watch:
    def __init__(self) -> None:
        self._path, self._memory = _CriticalPath(), _LiveMemory()
        self._calls = self._dependencies = self._storages = self._time_ns = self._host_ns = 0
        self._has_device = False

    def add(self, step: DataflowStep, new: Iterable[Storage], writers: dict[int, int]) -> None:
        self._path.add(step, writers)
        self._calls += 1
        self._dependencies += len(step.after)
        self._storages += self._memory.add(step, new)
        self._time_ns += step.time_ns
        self._host_ns += step.host_ns
        self._has_device |= step.device_ns is not None

    def facts(self) -> GraphFacts:
        path, memory = self._path, self._memory
        return GraphFacts(
            calls=self._calls,
            dependencies=self._dependencies,
            storages=self._storages,
            time_ns=self._time_ns,
            host_ns=self._host_ns,
            has_device=self._has_device,
            critical_path=path.calls(),
            critical_ns=path.time_ns,
            critical_host_ns=path.host_ns,
            peak_bytes=memory.peak_bytes,
            peak_at=memory.peak_at,
            peak_op=memory.peak_op,
            outside_bytes=memory.outside_bytes,
        )


class _CriticalPath:
    def __init__(self) -> None:
        self.time_ns = self.host_ns = 0
        self._last: int | None = None
        # for each call, its predecessor in the longest chain that ends with it, or -1
        self._before = array("i")
        # times of chains by their last call; no chain continues from a call without live memory
        self._chains: dict[int, tuple[int, int]] = {}

    def add(self, step: DataflowStep, writers: dict[int, int]) -> None:
        chains = self._chains
        before = max(step.after, key=lambda number: chains[number][0], default=-1)
        time_ns, host_ns = chains[before] if before >= 0 else (0, 0)
        own = chains[step.number] = time_ns + step.time_ns, host_ns + step.host_ns
        if self._last is None or own[0] > self.time_ns:
            (self.time_ns, self.host_ns), self._last = own, step.number
        self._before.extend([-1] * (step.number + 1 - len(self._before)))
        self._before[step.number] = before
        if len(chains) > 2 * len(writers) + PRUNED:
            self._chains = {number: chains[number] for number in {*writers.values()}}

    def calls(self) -> array[int]:
        path, last = array("i"), -1 if self._last is None else self._last
        while last >= 0:
            path.append(last)
            last = self._before[last]
        path.reverse()
        return path


class _LiveMemory:
    def __init__(self) -> None:
        self.peak_bytes = self.outside_bytes = 0
        self.peak_at: int | None = None
        self.peak_op = ""
        self._alive = 0
        # storages by their last call
        self._ends: dict[int, int] = {}

    def add(self, step: DataflowStep, new: Iterable[Storage]) -> int:
        count = 0
        for storage in new:
            count += 1
            if storage.made_by is None:
                self.outside_bytes += storage.bytes
            else:
                self._alive += storage.bytes
                self._ends[storage.last] = self._ends.get(storage.last, 0) + storage.bytes
        if self._alive > self.peak_bytes:
            self.peak_bytes, self.peak_at, self.peak_op = self._alive, step.number, step.op
        self._alive -= self._ends.pop(step.number, 0)
        return count
