"""CUDA or HIP graphs in a profile: the device time of their launches, and the calls recorded when they were captured.

A launch of a graph (`cudaGraphLaunch`, `hipGraphLaunch`) runs kernels that were captured before. A profile of the
launch shows the kernels without operators. A profile of the graph's capture shows the operators and their kernel
launches, in the same order, but no kernels.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from opgrip.traces.formats.profiler_events import (
    EventTable,
    OperatorKernels,
    ProfiledCall,
    ProfilerEvent,
    Slice,
    calls_of,
)

MOSTLY = 0.5  # share of device time in graph launches from which on the other calls do not represent the program


def graph_share(table: EventTable) -> float:
    """Return the share of the device time in a profile that is spent in launches of CUDA or HIP graphs, 0 to 1."""
    durations = table.kernels["duration"]
    in_graphs = np.isin(table.kernels["correlation"], list(table.graph_launches))
    return float(durations[in_graphs].sum() / max(durations.sum(), 1))


def doubts_of(share: float) -> list[str]:
    """Return a list with a warning if graph launches take a large share of the device time, else an empty list."""
    if share < MOSTLY:
        return []
    return [
        f"{100 * share:.0f} % of the device's time is in graph launches, whose operators this file does not have: "
        "add the capture-phase profile with --capture"
    ]


@dataclass(slots=True)
class CapturedGraph:
    """The calls that a program made while it captured a CUDA or HIP graph.

    launches : names of the launched kernels in order, empty names if the profile does not have them
    calls : calls, each with the indices of its kernels in `launches`
    """

    launches: list[str] = field(default_factory=list)
    calls: list[tuple[ProfiledCall, list[int]]] = field(default_factory=list)

    def launches_these(self, kernels: Sequence[str]) -> bool:
        """Return True if kernels with these names, run by one launch, can be the kernels of this graph."""
        if not kernels or len(kernels) != len(self.launches):
            return False
        return not all(self.launches) or Counter(self.launches) == Counter(kernels)


def captured_graphs(table: EventTable, skip: Callable[[str, str], None]) -> list[CapturedGraph]:
    """Return the CUDA or HIP graphs whose capture a profile shows, in order.

    skip : called with each operator that is left out, and the reason
    """
    ends = [*sorted(table.capture_ends), 1 << 62]
    spans = [(begin, ends[bisect_right(ends, begin)]) for begin in sorted(table.capture_begins)]
    graphs = [CapturedGraph() for _ in spans]

    def graph_at(time_ns: int) -> CapturedGraph | None:
        place = bisect_right(spans, (time_ns, 1 << 62)) - 1
        return graphs[place] if place >= 0 and time_ns < spans[place][1] else None

    work: dict[int, OperatorKernels] = {}
    names = table.kernel_names
    launches = (table.launches[name].tolist() for name in ("start", "external", "name"))
    for start_ns, external, name in sorted(zip(*launches, strict=True)):
        graph = graph_at(start_ns)
        if graph is not None:
            if external >= 0:
                own = work.setdefault(external, OperatorKernels(Counter(), Counter()))
                own.launches[str(len(graph.launches))] += 1
            graph.launches.append(names[name] if name >= 0 else "")
    for _, events in table.threads():
        inside = (event for event in events if _meets(event, spans, table.first_ns))
        for call in calls_of(inside, work, skip):
            graph = graph_at(call.event.start_ns + table.first_ns)
            if graph is not None:
                graph.calls.append((call, sorted(map(int, call.work.launches))))
    for graph in graphs:
        graph.calls.sort(key=lambda item: item[0].event.start_ns)
    return graphs


def _meets(event: ProfilerEvent, spans: Sequence[tuple[int, int]], first_ns: int) -> bool:
    """Return True if an event overlaps one of the time spans."""
    place = bisect_right(spans, (event.end_ns + first_ns, 0)) - 1
    return place >= 0 and spans[place][1] > event.start_ns + first_ns


@dataclass(frozen=True, slots=True)
class _Launch:
    """A launch of a captured CUDA or HIP graph.

    start_ns, thread : start of the launch, and thread that launched it
    kernels : name and duration in ns of each kernel, in the order of the capture
    """

    start_ns: int
    thread: str
    graph: CapturedGraph
    kernels: Sequence[tuple[str, int]]


class GraphLaunchCalls:
    """The calls that the launches of CUDA or HIP graphs in a profile represent, found in a profile of the graphs'
    capture.

    table : events of the profile with the launches
    graphs : captured graphs
    skip : called with each launch that is left out, and the reason
    """

    def __init__(self, table: EventTable, graphs: Sequence[CapturedGraph], skip: Callable[[str, str], None]) -> None:
        self._first_ns = table.first_ns
        self._launches: list[_Launch] = []
        joined_ns = matched_ns = device_ns = 0
        by_launch = _kernels_by_launch(table)
        turns: Counter[tuple[Slice, ...]] = Counter()
        for correlation, (start_ns, thread) in sorted(table.graph_launches.items(), key=lambda item: item[1][0]):
            kernels = by_launch.get(correlation, [])
            device_ns += sum(duration for _, duration in kernels)
            names = [name for name, _ in kernels]
            fitting = [graph for graph in graphs if graph.launches_these(names)]
            contents = {tuple(call.event.slice for call, _ in graph.calls) for graph in fitting}
            if len(contents) != 1:
                fit = f"{len(contents)} different" if contents else "none"
                skip("graph launch", f"its {len(names)} kernels match {fit} of the captured graphs")
                continue
            # layers of a model are often graphs of equal calls, and are launched in the order of their captures
            (content,) = contents
            graph = fitting[turns[content] % len(fitting)]
            turns[content] += 1
            ordered = [kernels[place] for place in _paired(graph.launches, names)]
            matched_ns += sum(duration for _, duration in kernels)
            joined_ns += sum(ordered[place][1] for _, launches in graph.calls for place in launches)
            self._launches.append(_Launch(start_ns - table.first_ns, table.thread_name(thread), graph, ordered))
        self.share = joined_ns / max(device_ns, 1)
        """share of the device's time in launches that belongs to these calls"""
        self.matched = matched_ns / max(device_ns, 1)
        """share of the device's time in launches that is spent in launches of the captured graphs"""

    def __iter__(self) -> Iterator[tuple[str, ProfiledCall]]:
        """Yield each call of each launch, after the name of its thread, with the times of its kernels in the launch."""
        for launch in self._launches:
            for place, (call, launches) in enumerate(launch.graph.calls):
                work = OperatorKernels(Counter(), Counter())
                for name, duration in (launch.kernels[number] for number in launches):
                    work.add(OperatorKernels(Counter({name: 1}), Counter({name: duration})))
                at = launch.start_ns + place
                event = replace(call.event, start_ns=at, end_ns=at, external=-1, sequence=-1)
                yield f"graphs of {launch.thread}", replace(call, event=event, forward=-1, work=work)


def _kernels_by_launch(table: EventTable) -> dict[int, list[tuple[str, int]]]:
    """Return name and duration in ns of the kernels of each graph launch, in start order, by correlation number."""
    kernels: dict[int, list[tuple[str, int]]] = defaultdict(list)
    names = table.kernel_names
    order = np.argsort(table.kernels["start"], kind="stable")
    columns = (table.kernels[name][order].tolist() for name in ("correlation", "name", "duration"))
    for correlation, name, duration in zip(*columns, strict=True):
        if correlation in table.graph_launches:
            kernels[correlation].append((names[name], duration))
    return kernels


def _paired(captured: Sequence[str], launched: Sequence[str]) -> list[int]:
    """Return, for each kernel of a graph's capture, the index of the same kernel in a launch of the graph.

    Kernels of equal name keep their order.
    """
    if not all(captured):
        return list(range(len(captured)))
    order = [0] * len(captured)
    by_name = [sorted(range(len(names)), key=names.__getitem__) for names in (captured, launched)]
    for place, kernel in zip(*by_name, strict=True):
        order[place] = kernel
    return order
