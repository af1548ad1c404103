"""A trace's calls in order, with the storages and the newly mapped memory that each call uses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import torch

from opgrip.platform.machine import page_size
from opgrip.replay.operators.equivalents import Equivalent, equivalent_on
from opgrip.replay.operators.lookup import Unsupported
from opgrip.replay.operators.memory import LARGE, bytes_of, mostly_fresh
from opgrip.traces.analysis.dataflow import TraceGraph, make_graph
from opgrip.traces.schema.arguments import TensorSpec
from opgrip.traces.schema.operator_arguments import Interface, interface_of
from opgrip.traces.schema.records import NO_STORAGE, OPERATOR, Signature
from opgrip.traces.schema.tensor_specs import STORAGE
from opgrip.traces.table.call_table import COUNT
from opgrip.traces.table.trace import Trace


@dataclass(frozen=True, slots=True)
class FlowingCall:
    """A call and the storages that its tensors use.

    inputs, outputs : storage number of each tensor argument, and of each tensor result; `NO_STORAGE` if unknown
    over : numbers of the storages that this call is the last to use
    """

    signature: int
    op: str
    captured_ns: float
    captured_host_ns: float
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    over: tuple[int, ...]
    settings: Mapping[str, Any]


@dataclass(slots=True)
class StorageNeed:
    device: str
    bytes: int = 0
    views: list[TensorSpec] = field(default_factory=list)
    _low: int = 0

    def take(self, spec: TensorSpec) -> None:
        start = spec.offset * spec.dtype.itemsize
        if not self.views:
            self._low, self.bytes = start, 0
        if not self.views or start < self._low or spec.extent > self.bytes:
            self.views.append(spec)
            self._low, self.bytes = min(start, self._low), max(spec.extent, self.bytes)

    def give(self, spec: TensorSpec) -> None:
        if not self.views:
            self.bytes = max(spec.extent, self.bytes)


@dataclass(frozen=True, slots=True)
class ProgramFlow:
    """A trace's calls and the storages that they use.

    outside : numbers of storages that existed before the first call
    critical_path : indices into `calls` of the slowest chain of calls in which each depends on the one before
    """

    calls: list[FlowingCall]
    signatures: dict[int, Signature]
    interfaces: dict[int, Interface]
    needs: dict[int, StorageNeed]
    outside: list[int]
    outside_bytes: int
    peak_bytes: int
    wall_ns: int
    critical_path: list[int]


def make_flow(trace: Trace, device: str | None = None) -> ProgramFlow:
    """Return the calls that a program made itself, without those inside extension functions and compiled regions.

    device : device of the replay; operators that it lacks are replaced by equivalent ones. None to replace none
    """
    graph = make_graph(trace)
    recorded = {signature.number: signature for signature in trace.signatures}
    equivalents = {} if device is None else dict(_equivalents(recorded, device))
    signatures = {**recorded, **{number: item.signature for number, item in equivalents.items()}}
    interfaces = {number: interface_of(signature) for number, signature in signatures.items()}
    needs: dict[int, StorageNeed] = {}
    own_interfaces = {number: interface_of(recorded[number]) for number in equivalents}
    calls = list(_calls(trace, graph, interfaces, needs, equivalents, own_interfaces))
    own = trace.own_calls
    ends = own["start_ns"] + own["duration_ns"]
    wall = int(ends.max() - own["start_ns"].min()) if len(own) else 0
    outside = [number for number, storage in graph.storages.items() if storage.made_by is None and number in needs]
    outside_bytes = sum(needs[number].bytes for number in outside)
    place_of = {number: index for index, number in enumerate(graph.steps)}
    critical = [place_of[number] for number in graph.facts.critical_path]
    return ProgramFlow(
        calls, signatures, interfaces, needs, outside, outside_bytes, graph.facts.peak_bytes, wall, critical
    )


def _equivalents(signatures: Mapping[int, Signature], device: str) -> Iterator[tuple[int, Equivalent]]:
    for number, signature in signatures.items():
        with suppress(Unsupported, MemoryError, torch.OutOfMemoryError):
            equivalent = equivalent_on(signature, device) if signature.kind == OPERATOR else None
            if equivalent is not None:
                yield number, equivalent


def can_flow(spec: TensorSpec) -> bool:
    odd = str(spec.dtype).startswith(("torch.q", "torch.bits")) or spec.device == "meta"
    return spec.cls in (None, STORAGE) and spec.layout is torch.strided and spec.stride is not None and not odd


def _calls(
    trace: Trace,
    graph: TraceGraph,
    interfaces: Mapping[int, Interface],
    needs: dict[int, StorageNeed],
    equivalents: Mapping[int, Equivalent],
    own_interfaces: Mapping[int, Interface],
) -> Iterator[FlowingCall]:
    context_of = {scope.number: scope.context for scope in trace.scopes}
    settings = _settings(trace)
    over: dict[int, list[int]] = {}
    for storage in graph.storages.values():
        over.setdefault(storage.last, []).append(storage.number)
    nothing = Interface((), ())
    own = trace.own_calls
    columns = ("signature", "op", "scope", "time_ns", "host_ns", "tensors", "first_storage")
    for row, *values in zip(own.index, *(own[name].tolist() for name in columns), strict=True):
        signature, op, scope, time, host, count, first = values
        interface = interfaces.get(signature, nothing)
        storages = tuple(trace.storages[first : first + count].tolist())
        inputs, outputs = own_interfaces.get(signature, interface).memory_of(storages)
        if signature in equivalents:
            inputs, outputs = equivalents[signature].memory_of(inputs, outputs)
        _note(needs, interface, inputs, outputs)
        yield FlowingCall(
            signature,
            str(op),
            captured_ns=time,
            captured_host_ns=host,
            inputs=inputs,
            outputs=outputs,
            over=tuple(over.get(row, ())),
            settings=settings.get(context_of.get(scope), settings[None]),
        )


def _note(
    needs: dict[int, StorageNeed], interface: Interface, inputs: tuple[int, ...], outputs: tuple[int, ...]
) -> None:
    for number, spec in zip(inputs, interface.inputs, strict=True):
        if number != NO_STORAGE and can_flow(spec):
            needs.setdefault(number, StorageNeed(spec.device)).take(spec)
    for number, spec in zip(outputs, interface.outputs, strict=False):
        if number != NO_STORAGE and can_flow(spec):
            needs.setdefault(number, StorageNeed(spec.device)).give(spec)


def _settings(trace: Trace) -> dict[int | None, Mapping[str, Any]]:
    distinct: dict[str, Mapping[str, Any]] = {}
    settings_of_context: dict[int | None, Mapping[str, Any]] = {None: {}}
    for number, settings in trace.contexts.items():
        # a replay runs with gradients off
        settings_without_grad = {name: value for name, value in settings.items() if name != "grad"}
        settings_of_context[number] = distinct.setdefault(
            repr(sorted(settings_without_grad.items())), settings_without_grad
        )
    return settings_of_context


# operators that do not write their results: the first call that takes such a result causes the page faults
UNWRITTEN = ("aten.empty", "aten.new_empty")


@dataclass(frozen=True, slots=True)
class NewMemory:
    sizes: tuple[int, ...]
    fresh_bytes: int


def new_memory(trace: Trace, flow: ProgramFlow) -> dict[int, NewMemory]:
    page = page_size(trace.header)
    if page is None:
        return {}
    own = trace.own_calls
    counts = own["page_faults"]
    # limit counts of calls that the capture perturbed to the range of the signature's other calls
    others = counts.where(~own["perturbed"]).groupby(own["signature"])
    counts = counts.clip(others.transform("min"), others.transform("max")).astype("int64")
    fresh_bytes = (counts * page).tolist()
    needs = flow.needs.items()
    large = {number for number, need in needs if need.bytes >= LARGE and need.device.partition(":")[0] == "cpu"}
    memory_by_call: dict[int, NewMemory] = {}
    unwritten: dict[int, tuple[int, int]] = {}
    earlier_storages = {NO_STORAGE, *flow.outside}
    for index, (call, fresh) in enumerate(zip(flow.calls, fresh_bytes, strict=True)):
        numbers = [number for number in dict.fromkeys(call.outputs) if number not in earlier_storages]
        earlier_storages.update(numbers)
        sizes = {number: flow.needs[number].bytes for number in numbers if number in large}
        result_storages = {*call.outputs}
        for number in {*call.inputs} & unwritten.keys():
            # a call that only makes a view of it touches no page
            if fresh or number not in result_storages:
                maker, size = unwritten.pop(number)
                memory_by_call[maker] = NewMemory((size,), max(min(fresh - sum(sizes.values()), size), 0))
        if call.op.startswith(UNWRITTEN):
            unwritten |= {number: (index, size) for number, size in sizes.items()}
        elif sizes:
            memory_by_call[index] = NewMemory(tuple(sizes.values()), fresh)
    return memory_by_call


def shares_of_fresh(trace: Trace, calls: pd.DataFrame) -> dict[int, float]:
    page = page_size(trace.header)
    if page is None:
        return {}
    size = {signature.number: bytes_of(signature.outputs) for signature in trace.signatures}
    results = calls["signature"].map(size).fillna(0)
    large = calls[results >= LARGE]
    fresh = mostly_fresh(large["page_faults"] * float(page), results[large.index])
    counts = large[COUNT]
    shares = (fresh * counts).groupby(large["signature"]).sum() / counts.groupby(large["signature"]).sum()
    return dict(zip(shares.index.tolist(), shares.tolist(), strict=True))
