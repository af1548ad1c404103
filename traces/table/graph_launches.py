"""Launches of CUDA or HIP graphs: a table of calls has the calls that a launch runs in place of the launch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from opgrip.traces.codec.call_blocks import CallBlock, Integers, perturbed_flags
from opgrip.traces.schema.accelerator_records import Graph, GraphTimes
from opgrip.traces.schema.arguments import tensors
from opgrip.traces.schema.records import Signature

Weights = NDArray[np.float64]

BY_KERNELS = "by the records of their kernels"
BY_ESTIMATE = "by an estimate: times of the same signatures outside of graphs, else bytes of their tensors"


def doubt_of_graphs(share: float) -> str:
    """Return the reason to doubt a trace that lacks the calls of CUDA graphs; `share` is of the device's time."""
    return (
        f"{share:.0%} of the device's time is in launches of graphs whose capture the trace does not have, so that "
        "their operators are missing: start the capture before the program captures its graphs"
    )


@dataclass(slots=True)
class GraphCalls:
    """The calls of a CUDA or HIP graph as columns, and the share of each in the time of a launch.

    kernel_ns : time of each call's kernels, (N,); None if the kernels were not recorded
    weights : share of a launch's time that each call gets, (N,)
    """

    signature: Integers
    scope: Integers
    tensors: Integers
    storages: Integers
    kernel_ns: Integers | None = None
    weights: Weights | None = None

    @property
    def split(self) -> str:
        """How the time of launches is divided among the calls: `BY_KERNELS` or `BY_ESTIMATE`."""
        return BY_ESTIMATE if self.kernel_ns is None else BY_KERNELS

    def __len__(self) -> int:
        return len(self.signature)


@dataclass(slots=True)
class GraphLaunches:
    """The CUDA or HIP graphs of a trace, by the signature of their launches.

    graphs : graphs whose capture was recorded
    unknown : signatures of the launches of other graphs
    """

    graphs: dict[int, GraphCalls] = field(default_factory=dict)
    unknown: set[int] = field(default_factory=set)
    _times: dict[int, Integers] = field(default_factory=dict)

    def add(self, record: Graph | GraphTimes) -> None:
        if isinstance(record, GraphTimes):
            times, before = np.asarray(record.device_ns, dtype=np.int64), self._times.get(record.signature)
            if before is None or len(before) == len(times):
                self._times[record.signature] = times if before is None else before + times
        elif not record.calls:
            if not record.captured:
                self.unknown.add(record.signature)
        else:
            named = (record.calls, record.scope, record.tensors, record.storages)
            calls, scope, counts, storages = (np.asarray(numbers, dtype=np.int64) for numbers in named)
            self.graphs[record.signature] = GraphCalls(calls, scope, counts, storages)

    @property
    def estimated(self) -> set[int]:
        """Signatures of calls in graphs for which the division of a launch's time is an estimate."""
        graphs = (graph for graph in self.graphs.values() if graph.kernel_ns is None)
        return {number for graph in graphs for number in graph.signature.tolist()}

    def weigh(self, signatures: Iterable[Signature], usual_ns: Callable[[], Mapping[int, float]]) -> None:
        """Determine which share of a launch's time each call of a graph gets.

        usual_ns : returns the mean device time in ns of each signature's calls outside of graphs
        """
        for number, times in self._times.items():
            graph = self.graphs.get(number)
            if graph is not None and len(graph) == len(times) and times.any():
                graph.kernel_ns, graph.weights = times, times / times.sum()
        others = [graph for graph in self.graphs.values() if graph.weights is None]
        if others:
            times_ns, by_number = usual_ns(), {item.number: item for item in signatures}
            used = {number for graph in others for number in graph.signature.tolist()}
            sizes = {number: _bytes_of(by_number.get(number)) for number in used}
            both = [number for number in used if times_ns.get(number, 0) > 0 and sizes[number]]
            # nanoseconds per byte of the calls whose time is known
            pace = sum(times_ns[number] for number in both) / sum(sizes[number] for number in both) if both else 1.0
            for graph in others:
                cost = [times_ns.get(number, pace * sizes[number]) for number in graph.signature.tolist()]
                graph.weights = np.where(_are_views(graph, by_number), 0.0, cost)
                total = graph.weights.sum()
                graph.weights = graph.weights / total if total > 0 else np.full(len(graph), 1 / len(graph))

    def weights_by(self, times_ns: Mapping[int, float], signatures: Iterable[Signature]) -> dict[int, Weights]:
        """Return, by the signature of a graph's launches, the share of each of its calls in the sum of `times_ns`.

        Graphs whose kernels were recorded, or that contain a call without a time, are left out.
        """
        by_number = {item.number: item for item in signatures}
        weights = {}
        for number, graph in self.graphs.items():
            views = _are_views(graph, by_number)
            cost = np.where(views, 0.0, [times_ns.get(call, np.nan) for call in graph.signature.tolist()])
            # false if a time is missing
            if graph.kernel_ns is None and cost.sum() > 0:
                weights[number] = cost / cost.sum()
        return weights

    def expand(self, block: CallBlock) -> CallBlock:
        """Return a block of calls with the calls of each graph launch in place of the launch."""
        is_launch = np.isin(block.signature, list(self.graphs))
        if not is_launch.any():
            return block
        launched = {place: self.graphs[int(block.signature[place])] for place in np.flatnonzero(is_launch).tolist()}
        sizes = np.ones(len(block), dtype=np.int64)
        sizes[list(launched)] = [len(graph) for graph in launched.values()]
        firsts = np.cumsum(sizes) - sizes
        index = np.repeat(np.arange(len(block)), sizes)
        inner = np.arange(len(index)) - np.repeat(firsts, sizes)
        counts = block.tensors if len(block.tensors) else np.zeros(len(block), dtype=np.int64)
        columns = {"signature": block.signature[index], "scope": block.scope[index], "tensors": counts[index]}
        device_ns = block.device_ns[index] if len(block.device_ns) else block.device_ns
        flows = np.split(block.storages, np.cumsum(counts)[:-1])
        for place, graph in launched.items():
            own = slice(firsts[place], firsts[place] + sizes[place])
            for name, column in columns.items():
                column[own] = getattr(graph, name)
            flows[place] = graph.storages
            if len(device_ns) and block.device_ns[place] > 0 and graph.weights is not None:
                ends = np.rint(np.cumsum(graph.weights) * block.device_ns[place]).astype(np.int64)
                device_ns[own] = np.diff(ends, prepend=0)
        # the calls follow each other within the launch, and take no time on the host
        is_inner = is_launch[index]
        after = inner * block.duration_ns[index] // sizes[index]
        perturbed = np.flatnonzero(perturbed_flags(block.perturbed, len(block))[index] & ~is_inner)
        return replace(
            block,
            signature=columns["signature"],
            scope=columns["scope"],
            tensors=columns["tensors"],
            start_ns=block.start_ns[index] + np.where(is_inner, after, 0),
            duration_ns=np.where(is_inner, 0, block.duration_ns[index]),
            storages=np.concatenate(flows),
            device_ns=device_ns,
            streams=block.streams[index] if len(block.streams) else block.streams,
            page_faults=[(int(firsts[place]), pages) for place, pages in block.page_faults if place not in launched],
            slow_memory=[(int(firsts[place]), excess) for place, excess in block.slow_memory if place not in launched],
            perturbed=[(place, 1) for place in perturbed.tolist()],
        )


def _bytes_of(signature: Signature | None) -> int:
    return 0 if signature is None else sum(spec.extent for spec in tensors([signature.args, signature.outputs]))


def _are_views(graph: GraphCalls, signatures: Mapping[int, Signature]) -> NDArray[np.bool_]:
    flows = np.split(graph.storages, np.cumsum(graph.tensors)[:-1])
    calls = zip(graph.signature.tolist(), flows, strict=True)
    return np.array([_is_view(signatures.get(number), storages) for number, storages in calls])


def _is_view(signature: Signature | None, storages: Integers) -> bool:
    if signature is None or "out" in signature.kwargs or signature.op.partition(".")[2].split(".")[0].endswith("_"):
        return False
    inputs = sum(1 for _ in tensors([signature.args, signature.kwargs]))
    outputs = storages[inputs:]
    return inputs > 0 and len(outputs) > 0 and bool(np.isin(outputs, storages[:inputs]).all())
