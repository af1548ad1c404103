"""The calls of a trace in the runs of their subgraph cases, with what flows between them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from opgrip.replay.cases.traits import sizes_vary
from opgrip.replay.inputs.filling import CAST
from opgrip.replay.operators.lookup import Unsupported, find_operator
from opgrip.traces import Trace
from opgrip.traces.analysis.timeline import Place, runs_of
from opgrip.traces.schema.arguments import GeneratorSpec, GroupSpec, Opaque, ReductionSpec, TensorSpec, leaves
from opgrip.traces.schema.operator_arguments import Interface, interface_of, written
from opgrip.traces.schema.python_objects import NamedSpec
from opgrip.traces.schema.records import NO_STORAGE, OPERATOR, Signature


@dataclass(frozen=True, slots=True)
class Facts:
    """A signature, and what follows from it.

    Attributes
    ----------
    writes : whether its calls may write into each of the tensors that they take
    settings : see `is_setting`
    varies : whether what its calls give has a size that depends on values
    refusal : why its calls cannot run, as far as that is told without looking their operator up
    """

    signature: Signature
    interface: Interface
    writes: tuple[bool, ...]
    settings: tuple[Any, ...]
    varies: bool
    refusal: str | None

    @property
    def takes(self) -> tuple[TensorSpec, ...]:
        """The tensors among its arguments."""
        return self.interface.takes

    @property
    def gives(self) -> tuple[TensorSpec, ...]:
        """The tensors among its first call's results."""
        return self.interface.gives


def facts_of(signature: Signature) -> Facts:
    """What follows from a signature."""
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
    """Whether an argument depends on where and in what a call is replayed."""
    return isinstance(leaf, torch.device | GeneratorSpec) or (isinstance(leaf, torch.dtype) and leaf in CAST)


def _refusal(signature: Signature, argument_leaves: list[object]) -> str | None:
    if signature.raised is not None:
        return f"{signature.op} raised when it was captured: {signature.raised}"
    for leaf in argument_leaves:
        if isinstance(leaf, Opaque):
            return f"a trace cannot hold an argument of {signature.op}, of type {leaf.type_name}"
        if isinstance(leaf, NamedSpec):
            return f"{signature.op} takes {leaf.name}, which a graph cannot hold"
        if isinstance(leaf, GroupSpec | ReductionSpec):
            return f"{signature.op} takes a process group, which a replay has none of"
    return None


def _sizes_vary(signature: Signature) -> bool:
    if signature.kind != OPERATOR:
        return True
    try:
        return sizes_vary(find_operator(signature).function)
    except Unsupported:
        return False


DETACH = "aten.detach.default"


_Result: TypeAlias = tuple[int, int]
"""A tensor that a call gives: the call's number, and the tensor's place."""


@dataclass(frozen=True, slots=True)
class UnitCall:
    """One call of a unit.

    Attributes
    ----------
    takes, gives : memory of each tensor among its arguments and results, counted within the unit in the order in which
        its calls mention it; `NO_STORAGE` where it is not known
    """

    signature: int
    takes: tuple[int, ...]
    gives: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """Calls that a thread made one after the other in one unit.

    Attributes
    ----------
    escaping_results : those that calls outside take later, each as the place of its call and its place among that one's
    time_ns, raw_ns : sums over its calls, as the trace has them
    perturbed : whether one of them was
    contexts : numbers of the settings that the calls ran under
    scope : number of its first call's scope
    """

    place: Place
    calls: tuple[UnitCall, ...]
    time_ns: float
    raw_ns: float
    perturbed: bool
    escaping_results: frozenset[tuple[int, int]]
    contexts: tuple[int | None, ...]
    scope: int


@dataclass(frozen=True, slots=True)
class _Row:
    """A call of the trace: `number` in its table, memory as it has it."""

    number: int
    place: Place | None
    signature: int
    scope: int
    time_ns: float
    raw_ns: float
    perturbed: bool
    context: int | None
    takes: tuple[int, ...]
    gives: tuple[int, ...]


def make_runs(
    trace: Trace, places: Mapping[int, Place], facts: Mapping[int, Facts], selected: Collection[int]
) -> list[Run]:
    """The runs of all units, in the order in which each thread made them.

    Parameters
    ----------
    selected : numbers of the calls that units are made of
    """
    threads: dict[tuple[int, int], list[_Row]] = {}
    thread_rows = list(_rows(trace, places, facts, set(selected)))
    for thread, row in thread_rows:
        threads.setdefault(thread, []).append(row)
    uses = _last_uses((row for _, row in thread_rows), facts)
    return [_run(rows, place, uses) for thread in threads.values() for place, rows in runs_of(thread)]


def geometry(spec: TensorSpec) -> tuple[object, ...]:
    """What two tensors in the same memory have in common that are the same."""
    return (spec.shape, spec.stride, spec.offset, spec.dtype, spec.layout, spec.conj, spec.neg)


def _rows(
    trace: Trace, places: Mapping[int, Place], facts: Mapping[int, Facts], selected: Collection[int]
) -> Iterator[tuple[tuple[int, int], _Row]]:
    context_of = {scope.number: scope.context for scope in trace.scopes}
    own = trace.own_calls
    threads = zip(own["process"].cat.codes.tolist(), own["thread"].cat.codes.tolist(), strict=True)
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
        takes, gives = signature_facts.interface.memory_of(tuple(memory[first : first + count]))
        place = places.get(scope) if number in selected else None
        yield thread, _Row(number, place, signature, scope, time, raw, perturbed, context_of.get(scope), takes, gives)


def _last_uses(rows: Iterable[_Row], facts: Mapping[int, Facts]) -> dict[_Result, int]:
    """By result, the call that takes it last.

    Who takes memory that a call made as a tensor that no call gave takes the last result in that memory.
    """
    shapes: dict[tuple[object, ...], int] = {}
    number = lambda spec: shapes.setdefault(geometry(spec), len(shapes))  # noqa: E731
    argument_shapes = {
        item: [number(spec) for spec in signature_facts.takes] for item, signature_facts in facts.items()
    }
    result_shapes = {item: [number(spec) for spec in signature_facts.gives] for item, signature_facts in facts.items()}
    giver: dict[tuple[int, int], _Result] = {}
    last_in: dict[int, _Result | None] = {}
    detaching = {item for item, signature_facts in facts.items() if signature_facts.signature.op == DETACH}
    uses: dict[_Result, int] = {}
    for row in rows:
        for memory, shape in zip(row.takes, argument_shapes[row.signature], strict=False):
            # memory that was there before the first call has no last result
            result = giver.get((memory, shape)) or last_in.setdefault(memory, None)
            if result is not None:
                uses[result] = row.number
        for place, (memory, shape) in enumerate(zip(row.gives, result_shapes[row.signature], strict=False)):
            if memory == NO_STORAGE or row.signature in detaching:
                # what is detached is taken as what it was before
                continue
            giver[memory, shape] = (row.number, place)
            if last_in.get(memory, giver) is not None:
                last_in[memory] = (row.number, place)
    return uses


def _run(rows: list[_Row], place: Place, uses: Mapping[_Result, int]) -> Run:
    numbers = {NO_STORAGE: NO_STORAGE}

    def counted(memory: tuple[int, ...]) -> tuple[int, ...]:
        return tuple([numbers.setdefault(item, len(numbers) - 1) for item in memory])

    calls = tuple([UnitCall(row.signature, counted(row.takes), counted(row.gives)) for row in rows])
    results = ((index, result) for index, row in enumerate(rows) for result in range(len(row.gives)))
    end = rows[-1].number
    escaping_results = frozenset(item for item in results if uses.get((rows[item[0]].number, item[1]), -1) > end)
    times = sum(row.time_ns for row in rows), sum(row.raw_ns for row in rows)
    perturbed = any(row.perturbed for row in rows)
    contexts = tuple(row.context for row in rows)
    return Run(place, calls, *times, perturbed, escaping_results, contexts, rows[0].scope)
