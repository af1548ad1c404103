"""Critical path and memory use of a trace, computed from its dataflow."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from opgrip.traces.analysis.dataflow import Dataflow, DataflowStep, Storage
from opgrip.traces.table.trace import Trace

PRUNED = 1 << 12  # maximum number of chains that are kept in addition to chains of memory in use


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """Facts about the dataflow graph of a trace.

    time_ns : sum of the times of all calls, on the device for calls that ran on one
    host_ns : sum of the times of all calls on the host
    critical_path : indices of the calls in the slowest chain in which each call depends on the previous one
    critical_ns, critical_host_ns : sums of the calls' `time_ns` and `host_ns` over this chain
    peak_bytes : maximum memory in use at once, except memory allocated before the first call
    peak_at, peak_op : index and operator of the call at which memory use is highest
    outside_bytes : memory allocated before the first call
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
    """All calls, without those made inside another call, and all storages of a trace, by number."""

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
    """Return critical path, memory use and totals of a dataflow graph; this takes 4 bytes of memory per call."""
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
