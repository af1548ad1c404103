"""Device time of the calls in a CUDA graph, from an accelerator's records of the kernels that a launch of the
graph runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from opgrip.capture.timing.kernel_windows import Window, WrittenCalls, innermost_calls, nodes_in
from opgrip.platform.activity_records import LaunchedWork
from opgrip.traces.schema.accelerator_records import Graph, GraphTimes
from opgrip.traces.schema.records import Record

# signature of a launch, its thread, and its position among the thread's calls
GraphLaunch: TypeAlias = tuple[int, int, int]
# by signature and name of a kernel: number of runs and their total time in ns
KernelCounts: TypeAlias = dict[int, dict[str, list[int]]]


def add_kernel(kernels: KernelCounts, signature: int, item: LaunchedWork) -> None:
    """Count a kernel that a call of a signature launched, in `kernels`."""
    count = kernels.setdefault(signature, {}).setdefault(item.name, [0, 0])
    count[0] += 1
    count[1] += item.duration_ns


@dataclass(frozen=True, slots=True)
class _Nodes:
    """The nodes of one CUDA graph.

    signatures : signature of each call in the graph
    added : for each node, the time at which it was added, and the index of its call
    """

    signatures: Sequence[int]
    added: list[tuple[int, int]] = field(default_factory=list)


class GraphNodes:
    """The CUDA graphs that the program captured; for each node of a graph, which call added it."""

    def __init__(self) -> None:
        self._graphs: dict[int, _Nodes] = {}
        self._calls: list[tuple[int, WrittenCalls]] = []

    def __contains__(self, signature: int) -> bool:
        return signature in self._graphs

    def note(self, graph: Graph, parts: Iterable[WrittenCalls]) -> None:
        """Remember a captured graph.

        parts : calls in the graph by thread, with the index of each call in the graph in place of its signature
        """
        self._graphs[graph.signature] = _Nodes(graph.calls)
        self._calls += ((graph.signature, part) for part in parts)

    def find(self, windows: Sequence[Window]) -> None:
        """Find the nodes of the graphs that were captured in these windows, and the call that added each.

        windows : periods for which torch's profiler collected records
        """
        nodes = [item for window in windows for item in nodes_in(window.events, window.distance_ns)]
        for signature, calls in self._calls:
            own = (item for item in nodes if item.thread in calls.idents)
            added = [(item.at_ns, calls.signatures[place]) for _, place, item in innermost_calls([calls], own)]
            self._graphs[signature].added.extend(added)
        self._calls = [(number, calls) for number, calls in self._calls if max(calls.ends) > windows[-1].ended_ns]

    def divide(
        self, of_launches: Mapping[GraphLaunch, Sequence[LaunchedWork]], kernels: KernelCounts
    ) -> Iterator[Record]:
        """Yield a record of the time of each call's kernels in a graph, and count the kernels for the calls'
        signatures.

        The kernels of a launch are in the order in which the nodes were added. If there are more or fewer kernels than
        nodes, the kernels count for the signature of the launch.

        of_launches : kernels of each launch
        """
        times: dict[int, list[int]] = {}
        for (number, *_), items in of_launches.items():
            graph = self._graphs[number]
            places = [place for _, place in sorted(graph.added)]
            if len(places) != len(items):
                for item in items:
                    add_kernel(kernels, number, item)
                continue
            own = times.setdefault(number, [0] * len(graph.signatures))
            for place, item in zip(places, items, strict=True):
                own[place] += item.duration_ns
                add_kernel(kernels, graph.signatures[place], item)
        for number, own in times.items():
            yield GraphTimes(number, own)
