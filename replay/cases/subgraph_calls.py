"""Executions of subgraphs (modules or functions) in a trace, and the origin of each tensor that their calls take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from opgrip.replay.cases.flow import can_flow
from opgrip.replay.cases.unused_results import FOR_BACKWARD, packet_of
from opgrip.replay.inputs.filling import CAST
from opgrip.replay.operators.lookup import Unsupported, find_operator, sizes_vary
from opgrip.traces import Trace
from opgrip.traces.analysis.timeline import TimelinePlace, runs_of
from opgrip.traces.schema.arguments import GeneratorSpec, GroupSpec, Opaque, ReductionSpec, TensorSpec, leaves
from opgrip.traces.schema.operator_arguments import Interface, interface_of, written
from opgrip.traces.schema.python_objects import NamedSpec, ObjectSpec
from opgrip.traces.schema.records import NO_STORAGE, OPERATOR, Signature
from opgrip.traces.schema.tensor_specs import STORAGE, plain_name


@dataclass(frozen=True, slots=True)
class Facts:
    signature: Signature
    interface: Interface
    writes: tuple[bool, ...]
    settings: tuple[Any, ...]
    varies: bool
    refusal: str | None

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        return self.interface.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return self.interface.outputs


def facts_of(signature: Signature) -> Facts:
    argument_leaves = list(leaves([signature.args, signature.kwargs]))
    return Facts(
        signature,
        interface_of(signature),
        tuple(written(signature)),
        tuple(filter(is_setting, argument_leaves)),
        _sizes_vary(signature),
        _refusal(signature, argument_leaves),
    )


def is_setting(leaf: object) -> bool:
    return isinstance(leaf, torch.device | GeneratorSpec) or (isinstance(leaf, torch.dtype) and leaf in CAST)


def _refusal(signature: Signature, argument_leaves: list[object]) -> str | None:
    if signature.raised is not None:
        return f"{signature.op} raised when it was captured: {signature.raised}"
    if any(isinstance(value, ObjectSpec) for value in (*signature.args, *signature.kwargs.values())):
        return f"{signature.op} takes packed parameters, which a graph cannot hold"
    for leaf in argument_leaves:
        if isinstance(leaf, TensorSpec) and leaf.cls == STORAGE:
            return f"{signature.op} takes a storage, which a graph cannot hold"
        if isinstance(leaf, Opaque):
            return f"{signature.op} takes an argument of type {leaf.type_name}, which a trace cannot hold"
        if isinstance(leaf, NamedSpec):
            return f"{signature.op} takes {leaf.name}, which a graph cannot hold"
        if isinstance(leaf, GroupSpec | ReductionSpec):
            return f"{signature.op} takes a process group, which a replay does not have"
    return None


def _sizes_vary(signature: Signature) -> bool:
    if signature.kind != OPERATOR:
        return True
    try:
        return sizes_vary(find_operator(signature).function)
    except Unsupported:
        return False


DETACH = "aten.detach.default"
_Result: TypeAlias = tuple[int, int]  # a result, as the number of the call and the index of the tensor


@dataclass(frozen=True, slots=True)
class SubgraphCall:
    signature: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SubgraphRun:
    """The consecutive calls that one thread made in one module or function.

    contexts : for each call, number of the torch settings under which it ran
    first : number of the first call
    storages : the storage of each number that `calls` has
    """

    place: TimelinePlace
    calls: tuple[SubgraphCall, ...]
    stored: frozenset[int]
    time_ns: float
    raw_ns: float
    perturbed: bool
    escaping_results: frozenset[tuple[int, int]]
    contexts: tuple[int | None, ...]
    scope: int
    first: int
    storages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Row:
    number: int
    place: TimelinePlace | None
    signature: int
    scope: int
    time_ns: float
    raw_ns: float
    perturbed: bool
    context: int | None
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def make_runs(
    trace: Trace,
    places: Mapping[int, TimelinePlace],
    facts: Mapping[int, Facts],
    selected: Collection[int],
    using: Collection[int] | None = None,
) -> list[SubgraphRun]:
    threads: dict[tuple[int, int], list[_Row]] = {}
    thread_rows = list(_rows(trace, places, facts, set(selected)))
    for thread, row in thread_rows:
        threads.setdefault(thread, []).append(row)
    uses, stored = _last_uses((row for _, row in thread_rows if using is None or row.scope in using), facts)
    return [_run(rows, place, uses, stored) for thread in threads.values() for place, rows in runs_of(thread)]


def geometry(spec: TensorSpec) -> tuple[object, ...]:
    return (spec.shape, spec.stride, spec.offset, spec.dtype, spec.layout, spec.conj, spec.neg)


def _rows(
    trace: Trace, places: Mapping[int, TimelinePlace], facts: Mapping[int, Facts], selected: Collection[int]
) -> Iterator[tuple[tuple[int, int], _Row]]:
    context_of = {scope.number: scope.context for scope in trace.scopes}
    own = trace.own_calls
    threads = zip(own["process"].tolist(), own["thread"].tolist(), strict=True)
    columns = ("signature", "scope", "time_ns", "raw_ns", "perturbed", "tensors", "first_storage")
    memory = trace.storages.tolist()
    for number, thread, *values in zip(
        own.index.tolist(), threads, *(own[name].tolist() for name in columns), strict=True
    ):
        signature, scope, time, raw, perturbed, count, first = values
        signature_facts = facts.get(signature)
        if signature_facts is None:
            # the trace is damaged
            continue
        inputs, outputs = signature_facts.interface.memory_of(tuple(memory[first : first + count]))
        place = places.get(scope) if number in selected else None
        yield (
            thread,
            _Row(number, place, signature, scope, time, raw, perturbed, context_of.get(scope), inputs, outputs),
        )


def _last_uses(rows: Iterable[_Row], facts: Mapping[int, Facts]) -> tuple[dict[_Result, int], set[int]]:
    shapes: dict[tuple[object, ...], int] = {}
    number = lambda spec: shapes.setdefault(geometry(spec), len(shapes))  # noqa: E731
    argument_shapes = {
        item: [number(spec) for spec in signature_facts.inputs] for item, signature_facts in facts.items()
    }
    result_shapes = {
        item: [number(spec) for spec in signature_facts.outputs] for item, signature_facts in facts.items()
    }
    giver: dict[tuple[int, int], _Result] = {}
    last_in: dict[int, _Result | None] = {}
    detaching = {item for item, signature_facts in facts.items() if signature_facts.signature.op == DETACH}
    uses: dict[_Result, int] = {}
    for row in rows:
        for memory, shape in zip(row.inputs, argument_shapes[row.signature], strict=False):
            # if no result has the argument's layout, the last one in its storage counts as used; storages from before
            # the first call have none
            result = giver.get((memory, shape)) or last_in.setdefault(memory, None)
            if result is not None:
                uses[result] = row.number
        for index, (memory, shape) in enumerate(zip(row.outputs, result_shapes[row.signature], strict=False)):
            if memory == NO_STORAGE or row.signature in detaching:
                # a use of a detached tensor counts as a use of the result that was detached
                continue
            giver[memory, shape] = (row.number, index)
            if last_in.get(memory, giver) is not None:
                last_in[memory] = (row.number, index)
    return uses, {memory for memory, result in last_in.items() if result is None}


def _run(
    rows: list[_Row], place: TimelinePlace, uses: Mapping[_Result, int], all_stored: Collection[int]
) -> SubgraphRun:
    numbers = {NO_STORAGE: NO_STORAGE}

    def counted(memory: tuple[int, ...]) -> tuple[int, ...]:
        return tuple([numbers.setdefault(item, len(numbers) - 1) for item in memory])

    calls = tuple([SubgraphCall(row.signature, counted(row.inputs), counted(row.outputs)) for row in rows])
    stored = frozenset(number for memory, number in numbers.items() if memory in all_stored)
    results = ((index, result) for index, row in enumerate(rows) for result in range(len(row.outputs)))
    end = rows[-1].number
    escaping_results = frozenset(item for item in results if uses.get((rows[item[0]].number, item[1]), -1) > end)
    times = sum(row.time_ns for row in rows), sum(row.raw_ns for row in rows)
    perturbed = any(row.perturbed for row in rows)
    contexts = tuple(row.context for row in rows)
    first, storages = rows[0], tuple(numbers)[1:]
    return SubgraphRun(
        place, calls, stored, *times, perturbed, escaping_results, contexts, first.scope, first.number, storages
    )


@dataclass(frozen=True, slots=True)
class Outside:
    place: int


@dataclass(frozen=True, slots=True)
class ResultOf:
    call: int
    place: int


@dataclass(frozen=True, slots=True)
class ViewOf:
    base: ResultOf
    spec: TensorSpec


Source: TypeAlias = Outside | ResultOf | ViewOf


@dataclass(frozen=True, slots=True)
class Links:
    """The calls of a subgraph, and where each tensor that they take comes from.

    outside : distinct tensors that come from outside the subgraph
    memory : the number of each one's storage in the calls of the subgraph
    stored : for each tensor in `outside`, True if it existed before the first recorded call, such as a parameter
    """

    calls: tuple[Facts, ...]
    outside: tuple[TensorSpec, ...]
    memory: tuple[int, ...]
    stored: tuple[bool, ...]
    settings: tuple[Any, ...]
    sources: tuple[tuple[Source, ...], ...]
    outputs: tuple[ResultOf, ...]
    mutates: bool
    reason: str | None = None

    @property
    def results(self) -> tuple[TensorSpec, ...]:
        return tuple(self.calls[output.call].outputs[output.place] for output in self.outputs)


def link(
    calls: Sequence[SubgraphCall],
    facts: Mapping[int, Facts],
    escaping_results: Sequence[tuple[int, int]],
    stored: Collection[int],
) -> Links:
    """Return the calls of a subgraph with the origin of each tensor that they take.

    escaping_results : (index of the call, index of the result) of results that calls outside the subgraph use
    """
    own = tuple(facts[call.signature] for call in calls)
    linker = _Linker()
    sources = tuple(linker.add(call, item) for call, item in zip(calls, own, strict=True))
    settings = dict.fromkeys(leaf for item in own for leaf in item.settings)
    reason = next((call.refusal for call in own if call.refusal is not None), linker.reason)
    outputs = tuple(ResultOf(*index) for index in sorted(escaping_results)) or _last(own)
    memory = linker.memory
    are_stored = tuple(number in stored for number in memory)
    return Links(own, linker.outside, memory, are_stored, tuple(settings), sources, outputs, linker.mutates, reason)


def _last(calls: Sequence[Facts]) -> tuple[ResultOf, ...]:
    for index in reversed(range(len(calls))):
        if outputs := calls[index].outputs:
            only_for_backward = FOR_BACKWARD.get(packet_of(calls[index].signature), ())
            return tuple(ResultOf(index, place) for place in range(len(outputs)) if place not in only_for_backward)
    return ()


class _Linker:
    def __init__(self) -> None:
        self.mutates = False
        self.reason: str | None = None
        self._outside: list[tuple[int, TensorSpec]] = []
        self._calls = 0
        self._source_of_tensor: dict[tuple[int, tuple[object, ...]], Source] = {}
        self._detached: dict[tuple[int, tuple[object, ...]], Source] = {}
        self._base_of_memory: dict[int, tuple[ResultOf, TensorSpec, str] | None] = {}
        self._varying: dict[int, list[tuple[ResultOf, TensorSpec]]] = {}
        self._came: set[int] = set()

    @property
    def outside(self) -> tuple[TensorSpec, ...]:
        # tensors that share a storage keep their storage number
        times = Counter(number for number, _ in self._outside if number != NO_STORAGE)
        return tuple(replace(spec, storage=number if times[number] > 1 else None) for number, spec in self._outside)

    @property
    def memory(self) -> tuple[int, ...]:
        return tuple(number for number, _ in self._outside)

    def add(self, call: SubgraphCall, facts: Facts) -> tuple[Source, ...]:
        sources = tuple(map(self._source, call.inputs, facts.inputs))
        for memory, writes in zip(call.inputs, facts.writes, strict=True):
            self.mutates |= writes and memory not in self._base_of_memory
        for index, memory in enumerate(call.outputs):
            if index < len(facts.outputs):
                self._give(memory, facts.outputs[index], ResultOf(self._calls, index), facts)
            elif memory not in self._came:
                # outputs of such a call are not recorded
                self._base_of_memory.setdefault(memory, None)
        self._calls += 1
        return sources

    def _give(self, memory: int, spec: TensorSpec, result: ResultOf, facts: Facts) -> None:
        if memory == NO_STORAGE:
            return
        if memory not in self._came:
            self._base_of_memory[memory] = (result, spec, facts.signature.op)
        if facts.varies:
            self._varying.setdefault(memory, []).append((result, spec))
        key = (memory, geometry(spec))
        if facts.signature.op == DETACH:
            # autograd also detaches results that it keeps, so a tensor that is taken later and requires a gradient is
            # another one
            self._detached[key] = result
        else:
            self._source_of_tensor[key] = result

    def _source(self, memory: int, spec: TensorSpec) -> Source:
        if memory == NO_STORAGE:
            return self._from_outside(memory, spec)
        key = (memory, geometry(spec))
        source = None if spec.requires_grad else self._detached.get(key)
        source = source or self._source_of_tensor.get(key)
        if source is None and memory in self._base_of_memory:
            try:
                # a result whose sizes depend on input values may differ from the argument in them
                varied = (
                    result
                    for result, result_spec in self._varying.get(memory, ())
                    if _alike(result_spec, spec) and len(result_spec.shape) == len(spec.shape)
                )
                source = next(varied, None) or _view(self._base_of_memory[memory], spec)
                self._source_of_tensor[key] = source
            except Unsupported as error:
                self.reason = self.reason or str(error)
        if source is None:
            source = self._source_of_tensor[key] = self._from_outside(memory, spec)
        return source

    def _from_outside(self, memory: int, spec: TensorSpec) -> Source:
        self._came.add(memory)
        self._outside.append((memory, spec))
        return Outside(len(self._outside) - 1)


def _view(base: tuple[ResultOf, TensorSpec, str] | None, spec: TensorSpec) -> Source:
    if base is None:
        raise Unsupported("the trace lacks the result of a call that a later call uses")
    result, result_spec, op = base
    if not (_alike(result_spec, spec) and can_flow(result_spec) and can_flow(spec)):
        raise Unsupported(
            f"a later call reads the memory of a result of {op} as a tensor of another dtype, device or layout "
            f"({plain_name(spec.dtype)}), but no recorded call made that tensor"
        )
    return ViewOf(result, spec)


def _alike(one: TensorSpec, other: TensorSpec) -> bool:
    kinds = [(spec.dtype, spec.conj, spec.neg, spec.device) for spec in (one, other)]
    return kinds[0] == kinds[1]
