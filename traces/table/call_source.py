"""The calls of a trace, kept in memory or read again from the file, with the calls of launched CUDA graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from opgrip.errors import UserError
from opgrip.traces.codec.call_blocks import CallBlock, Integers, perturbed_flags
from opgrip.traces.schema.arguments import tensors
from opgrip.traces.schema.records import DeviceTimes, Graph, GraphTimes, Signature


class NumberSet:
    def __init__(self) -> None:
        self._numbers: set[int] = set()
        self._array: Integers | None = None

    def put(self, number: int, is_in: bool = True) -> None:
        (self._numbers.add if is_in else self._numbers.discard)(number)
        self._array = None

    def __contains__(self, number: int) -> bool:
        return number in self._numbers

    def flags(self, column: Integers) -> NDArray[np.bool_]:
        if self._array is None:
            self._array = np.array(sorted(self._numbers), dtype=np.int64)
        return np.isin(column, self._array)


# maximum number of calls kept in memory, about 80 bytes each; calls of longer traces are read again each time
KEPT_CALLS = 1 << 19
MOST_IN_LAUNCHES = 1 << 26  # maximum number of calls that the launches of graphs in one trace run
UNREPORTED = np.iinfo(np.int64).min  # placeholder for the device time of a call that no later record reports

Select = Callable[[CallBlock], CallBlock]


class CallSource:
    """The calls of a trace, or a selection of them, as arrays."""

    def __init__(self, read: Callable[[], Iterable[CallBlock]], select: Select | None = None) -> None:
        self._read = read
        self._select = select
        self._kept: list[CallBlock] | None = []
        self._all_by_thread: Counter[int] = Counter()
        self._later: list[tuple[int, int, Integers]] = []
        self._later_by_thread: dict[int, Integers] | None = None
        self._blocks = 0
        self._calls = 0
        self._calls_with_graphs: int | None = None
        self.graphs = GraphLaunches()

    def add(self, block: CallBlock) -> None:
        self._all_by_thread[block.thread] += len(block)
        self._blocks += 1
        if self._select is not None:
            block = self._select(block)
        self._calls += len(block)
        if self._kept is not None and len(block):
            self._kept.append(block)
            if self._calls > KEPT_CALLS:
                self._kept = None

    def add_times(self, record: DeviceTimes) -> None:
        self._later.append((record.thread, record.first, np.asarray(record.device_ns, dtype=np.int64)))

    def weigh_graphs(self, signatures: Iterable[Signature]) -> None:
        if self.graphs.graphs:
            calls = sum(
                launches * len(self.graphs.graphs.get(number, ())) for number, (launches, _) in self.launches().items()
            )
            if calls > MOST_IN_LAUNCHES:
                raise UserError(
                    f"the graph launches in the trace run {calls:,} calls, more than {MOST_IN_LAUNCHES:,}",
                    "shorten the trace: opgrip trace trim --steps",
                )
            self.graphs.weigh(signatures, self._usual_ns)

    def _usual_ns(self) -> dict[int, float]:
        totals, counts = self._outside_graphs()
        return {number: totals[number] / count for number, count in counts.items()}

    def _outside_graphs(self) -> tuple[Counter[int], Counter[int]]:
        totals, counts = Counter[int](), Counter[int]()
        for block in self._recorded():
            timed = block.device_ns >= 0
            for number, time in zip(block.signature[timed].tolist(), block.device_ns[timed].tolist(), strict=True):
                totals[number] += time
                counts[number] += 1
        return totals, counts

    def changes_by(self, times_ns: Mapping[int, float], signatures: Iterable[Signature]) -> dict[int, float]:
        """Divide the time of CUDA graphs among their calls; return each signature's ratio of new to old time."""
        if not self.graphs.graphs:
            return {}
        before, _ = self._outside_graphs()
        changes: dict[int, float] = {}
        launches = self.launches()
        weights = self.graphs.weights_by(times_ns, signatures)
        for number, graph in self.graphs.graphs.items():
            if graph.weights is not None:
                _, device_ns = launches[number]
                for call, old, new in zip(
                    graph.signature.tolist(), graph.weights, weights.get(number, graph.weights), strict=True
                ):
                    before[call] += device_ns * old
                    if number in weights:
                        changes[call] = changes.get(call, 0.0) + device_ns * (new - old)
        return {call: 1 + change / before[call] for call, change in changes.items() if before[call] > 0}

    def launches(self) -> dict[int, tuple[int, int]]:
        counts = dict.fromkeys((*self.graphs.graphs, *self.graphs.unknown), (0, 0))
        for block in self._recorded() if counts else ():
            times = block.device_ns if len(block.device_ns) else np.zeros(len(block), dtype=np.int64)
            for number in counts.keys() & set(block.signature.tolist()):
                own = block.signature == number
                launches, device_ns = counts[number]
                counts[number] = launches + int(own.sum()), device_ns + int(np.maximum(times[own], 0).sum())
        return counts

    @property
    def calls(self) -> int:
        """Number of selected calls; calls in a CUDA graph are counted at each launch of the graph."""
        if not self.graphs.graphs:
            return self._calls
        if self._calls_with_graphs is None:
            self._calls_with_graphs = sum(map(len, self._selected_again()))
        return self._calls_with_graphs

    @property
    def has_later_times(self) -> bool:
        return bool(self._later)

    @property
    def is_kept(self) -> bool:
        return self._kept is not None and self.calls <= KEPT_CALLS

    def __iter__(self) -> Iterator[CallBlock]:
        if self._kept is not None and not self._later and not self.graphs.graphs:
            yield from self._kept
        else:
            yield from self._selected_again()

    def _selected_again(self) -> Iterator[CallBlock]:
        for recorded in self._recorded():
            block = self.graphs.expand(recorded) if self.graphs.graphs else recorded
            block = block if self._select is None else self._select(block)
            if len(block):
                yield block

    def _recorded(self) -> Iterator[CallBlock]:
        if self._kept is not None and self._select is None:
            yield from self._with_later_times(self._kept)
            return
        calls = 0
        for block in self._with_later_times(islice(self._read(), self._blocks)):
            calls += len(block)
            yield block
        if calls != self._all_by_thread.total():
            raise UserError("the trace was changed while it was read", "read it after the capture has ended")

    def _with_later_times(self, blocks: Iterable[CallBlock]) -> Iterator[CallBlock]:
        if not self._later:
            yield from blocks
            return
        times_by_thread = self._times_by_thread()
        places: Counter[int] = Counter()
        for block in blocks:
            first = places[block.thread]
            places[block.thread] += len(block)
            later = times_by_thread.get(block.thread)
            if later is not None and len(block):
                own = later[first : first + len(block)]
                before = block.device_ns if len(block.device_ns) else np.full(len(block), -1, dtype=np.int64)
                block = replace(block, device_ns=np.where(own == UNREPORTED, before, own))
            yield block

    def _times_by_thread(self) -> dict[int, Integers]:
        if self._later_by_thread is None:
            self._later_by_thread = {}
            for thread, first, times in self._later:
                calls = self._all_by_thread[thread]
                own = self._later_by_thread.setdefault(thread, np.full(calls, UNREPORTED, dtype=np.int64))
                # times of calls that the trace does not contain are ignored
                own[first : first + len(times)] = times[: max(calls - first, 0)]
        return self._later_by_thread


def selected(block: CallBlock, flags: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> CallBlock:
    if flags.all():
        return block
    places = np.flatnonzero(flags)
    storages = block.storages[np.repeat(flags, block.tensors)] if len(block.tensors) else block.storages[:0]
    perturbed = np.flatnonzero(perturbed_flags(block.perturbed, len(block))[places])
    runs = np.split(perturbed, np.flatnonzero(np.diff(perturbed) != 1) + 1)
    has_pairs = block.page_faults or block.slow_memory
    place_of = {place: index for index, place in enumerate(places.tolist())} if has_pairs else {}
    return replace(
        block,
        signature=block.signature[places],
        scope=block.scope[places],
        start_ns=block.start_ns[places],
        duration_ns=block.duration_ns[places],
        tensors=block.tensors[places] if len(block.tensors) else block.tensors,
        storages=storages,
        device_ns=block.device_ns[places] if len(block.device_ns) else block.device_ns,
        streams=block.streams[places] if len(block.streams) else block.streams,
        page_faults=[(place_of[place], count) for place, count in block.page_faults if place in place_of],
        perturbed=[(int(run[0]), len(run)) for run in runs if len(run)],
        slow_memory=[(place_of[place], excess) for place, excess in block.slow_memory if place in place_of],
    )


def by_call(pairs: Sequence[tuple[int, int]], calls: int) -> Integers:
    numbers = np.zeros(calls, dtype=np.int64)
    for place, number in pairs:
        numbers[place] = number
    return numbers


def or_all(column: Integers, calls: int, value: int) -> Integers:
    return column if len(column) else np.full(calls, value, dtype=np.int64)


def concatenated(pieces: Sequence[Integers]) -> Integers:
    return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64)


Weights = NDArray[np.float64]

BY_KERNELS = "by the records of their kernels"
BY_ESTIMATE = "by an estimate: times of the same signatures outside of graphs, else bytes of their tensors"


def doubt_of_graphs(share: float) -> str:
    return (
        f"{share:.0%} of the device's time is in launches of graphs whose capture the trace does not have, so that "
        "their operators are missing: start the capture before the program captures its graphs"
    )


@dataclass(slots=True)
class GraphCalls:
    """The calls of a CUDA or HIP graph as columns.

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
        return BY_ESTIMATE if self.kernel_ns is None else BY_KERNELS

    def __len__(self) -> int:
        return len(self.signature)


@dataclass(slots=True)
class GraphLaunches:
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
        graphs = (graph for graph in self.graphs.values() if graph.kernel_ns is None)
        return {number for graph in graphs for number in graph.signature.tolist()}

    def weigh(self, signatures: Iterable[Signature], usual_ns: Callable[[], Mapping[int, float]]) -> None:
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
