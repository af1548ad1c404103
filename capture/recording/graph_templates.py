"""CUDA and HIP graphs of a recording: calls made while a graph is captured belong to the graph."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from opgrip.capture.recording.thread_mode import ThreadCalls, ThreadMode
from opgrip.capture.timing.kernel_times import FOREVER_NS, WrittenCalls
from opgrip.platform import perf_counter_ns
from opgrip.traces.schema.records import Graph, Record

ENGINE = "autograd"  # name of the threads in which autograd runs the backward pass that another thread captures

Columns = NDArray[np.int64]


@dataclass(slots=True, eq=False)
class GraphCapture:
    """The calls that the program made while it captured a CUDA or HIP graph."""

    signature: int
    mode: ThreadMode
    started_ns: int
    ended_ns: int = FOREVER_NS
    parts: list[ThreadCalls] = field(default_factory=list)

    def contains(self, mode: ThreadMode, starts: Columns) -> NDArray[np.bool_]:
        """Return True for each of a thread's calls, given by their starts in ns, that belongs to the graph."""
        if mode is not self.mode and mode.thread_name != ENGINE:
            return np.zeros(len(starts), dtype=np.bool_)
        mask: NDArray[np.bool_] = (starts >= self.started_ns) & (starts < self.ended_ns)
        return mask

    def record(self, describe: Callable[[Columns], tuple[Sequence[int], Sequence[int]]]) -> Graph:
        if not self.parts:
            return Graph(self.signature)
        calls = np.concatenate([part.calls for part in self.parts])
        tensors = np.concatenate([part.tensors for part in self.parts])
        pieces = np.split(np.concatenate([part.flows for part in self.parts]), np.cumsum(tensors)[:-1])
        order = np.argsort(calls[:, 1], kind="stable")
        storages = np.concatenate([pieces[place] for place in order.tolist()])
        signature, scope = describe(calls[order])
        return Graph(self.signature, list(signature), list(scope), tensors[order].tolist(), storages.tolist())

    def written(self) -> Iterator[WrittenCalls]:
        starts = np.concatenate([part.calls[:, 1] for part in self.parts])
        places = np.argsort(np.argsort(starts, kind="stable"), kind="stable")
        ends = np.cumsum([len(part.calls) for part in self.parts])
        for part, own in zip(self.parts, np.split(places, ends[:-1]), strict=True):
            begins, stops = part.calls[:, 1:3].T.tolist()
            yield WrittenCalls(0, part.mode.idents, 0, own.tolist(), begins, stops, [0] * len(own))


@dataclass(frozen=True, slots=True)
class KeptGraph:
    """The calls of a CUDA or HIP graph, kept so that recordings that begin later can contain them.

    keys : by signature number, the key of the signature (see `call_key`)
    """

    graph: Graph
    records: Mapping[tuple[type, int | None], Record]
    keys: Mapping[int, Hashable]


# graphs of this process whose capture was seen while nothing was recorded
kept_graphs: WeakKeyDictionary[Any, KeptGraph] = WeakKeyDictionary()


class GraphTemplates:
    def __init__(self, add_signature: Callable[[str, torch.device, int], int]) -> None:
        self._add_signature = add_signature
        self.signatures: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self.all_signatures: set[int] = set()
        self.captures: list[GraphCapture] = []

    def add(self, graph: Any, device: torch.device) -> int:
        name = f"torch.{device.type}:{type(graph).__qualname__}.replay"
        number = self._add_signature(name, device, len(self.all_signatures) + 1)
        self.all_signatures.add(number)
        self.signatures[graph] = number
        return number

    def begin(self, graph: Any, device: torch.device, mode: ThreadMode) -> GraphCapture:
        capture = GraphCapture(self.add(graph, device), mode, perf_counter_ns())
        self.captures.append(capture)
        return capture
