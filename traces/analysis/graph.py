"""What follows from the dataflow of a trace: its critical path, and the memory that is alive."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from opgrip.traces.analysis.dataflow import Dataflow, DataflowStep, Storage
from opgrip.traces.table.trace import Trace

PRUNED = 1 << 12
"""Chains beyond those of memory that is alive, before they are forgotten."""


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """What there is to say of a graph as a whole.

    Attributes
    ----------
    calls, dependencies, storages : how many
    time_ns, host_ns : sums over all calls, of the device for those that worked on one and on the host
    has_device : whether some worked on one
    critical_path : the chain of calls, each after the one before it, that takes longest
    critical_ns : sum of their times, of the device for calls that worked on one
    critical_host_ns : the same on the host
    peak_bytes : the most memory that is mentioned before and after a call at once, without what was there before
    peak_at, peak_op : that call and its operator
    outside_bytes : memory that was there before
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
class Graph:
    """All calls and storages in memory, and what follows from them.

    Attributes
    ----------
    steps : by number; calls that were made inside another one belong to that
    storages : by number
    """

    steps: dict[int, DataflowStep]
    storages: dict[int, Storage]
    facts: GraphFacts


def make_graph(trace: Trace) -> Graph:
    """The dataflow of a trace's calls, all at once."""
    flow, watch = Dataflow(trace), _Watch()
    steps: dict[int, DataflowStep] = {}
    storages: dict[int, Storage] = {}
    for step, new in flow:
        steps[step.number] = step
        storages.update((storage.number, storage) for storage in new)
        watch.add(step, new, flow.writers)
    return Graph(steps, storages, watch.facts())


def graph_facts(flow: Dataflow) -> GraphFacts:
    """What a graph amounts to, in memory that grows with its calls by 4 bytes each."""
    watch = _Watch()
    for step, new in flow:
        watch.add(step, new, flow.writers)
    return watch.facts()


class _Watch:
    """Sums a graph up as its calls come."""

    def __init__(self) -> None:
        self._path, self._memory = _CriticalPath(), _LiveMemory()
        self._calls = self._dependencies = self._storages = self._time_ns = self._host_ns = 0
        self._has_device = False

    def add(self, step: DataflowStep, new: Iterable[Storage], writers: dict[int, int]) -> None:
        """Add a call with the memory that it mentions first."""
        self._path.add(step, writers)
        self._calls += 1
        self._dependencies += len(step.after)
        self._storages += self._memory.add(step, new)
        self._time_ns += step.time_ns
        self._host_ns += step.host_ns
        self._has_device |= step.device_ns is not None

    def facts(self) -> GraphFacts:
        """What came of it."""
        path, memory = self._path, self._memory
        return GraphFacts(
            *(self._calls, self._dependencies, self._storages, self._time_ns, self._host_ns, self._has_device),
            critical_path=path.calls(),
            critical_ns=path.time_ns,
            critical_host_ns=path.host_ns,
            peak_bytes=memory.peak_bytes,
            peak_at=memory.peak_at,
            peak_op=memory.peak_op,
            outside_bytes=memory.outside_bytes,
        )


class _CriticalPath:
    """The chain of calls with the longest sum of times; calls come after those that they depend on."""

    def __init__(self) -> None:
        self.time_ns = self.host_ns = 0
        self._last: int | None = None
        # of each call, the one before it in the longest chain that ends with it; -1 without one
        self._before = array("i")
        # by the call that a chain ends with, its times; a call without memory that is alive has none after it
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
        """The calls of the chain, in their order."""
        path, last = array("i"), -1 if self._last is None else self._last
        while last >= 0:
            path.append(last)
            last = self._before[last]
        path.reverse()
        return path


class _LiveMemory:
    """The memory that is mentioned before and after a call."""

    def __init__(self) -> None:
        self.peak_bytes = self.outside_bytes = 0
        self.peak_at: int | None = None
        self.peak_op = ""
        self._alive = 0
        # by call, what ends with it
        self._ends: dict[int, int] = {}

    def add(self, step: DataflowStep, new: Iterable[Storage]) -> int:
        """Add a call with the memory that it mentions first; gives how many pieces these are."""
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
