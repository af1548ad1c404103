"""How the calls of a unit hang together: where each tensor that one takes comes from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from opgrip.replay.cases.flow import can_flow
from opgrip.replay.cases.units.runs import DETACH, Facts, UnitCall, geometry
from opgrip.replay.operators.lookup import Unsupported
from opgrip.traces.schema.arguments import TensorSpec
from opgrip.traces.schema.records import NO_STORAGE
from opgrip.traces.schema.tensor_specs import plain_name


@dataclass(frozen=True, slots=True)
class Outside:
    """A tensor that comes from outside, by its place among them."""

    place: int


@dataclass(frozen=True, slots=True)
class ResultOf:
    """A result: the call, and the place among its tensors."""

    call: int
    place: int


@dataclass(frozen=True, slots=True)
class ViewOf:
    """Another tensor in the memory of one that flows."""

    base: ResultOf
    spec: TensorSpec


Source: TypeAlias = Outside | ResultOf | ViewOf


@dataclass(frozen=True, slots=True)
class Links:
    """A unit's calls, linked.

    Attributes
    ----------
    outside : what comes from outside, each tensor once
    settings : devices, floating-point dtypes and generators among the arguments, each once: what depends on where and
        in what a unit is replayed, which its inputs know
    sources : of each call, those of the tensors among its arguments, in their order
    outputs : the results that the unit gives
    mutates : whether a call may write into what comes from outside
    reason : why the calls cannot be run as one; None where they can
    """

    calls: tuple[Facts, ...]
    outside: tuple[TensorSpec, ...]
    settings: tuple[Any, ...]
    sources: tuple[tuple[Source, ...], ...]
    outputs: tuple[ResultOf, ...]
    mutates: bool
    reason: str | None = None

    @property
    def results(self) -> tuple[TensorSpec, ...]:
        """What the outputs were at the first calls."""
        return tuple(self.calls[output.call].gives[output.place] for output in self.outputs)


def link(calls: Sequence[UnitCall], facts: Mapping[int, Facts], escaping_results: Sequence[tuple[int, int]]) -> Links:
    """The links between calls.

    Parameters
    ----------
    facts : of the calls' signatures, by number
    escaping_results : those that are taken outside, as call and place; where none is, those of the last call that gives
        any
    """
    own = tuple(facts[call.signature] for call in calls)
    linker = _Linker()
    sources = tuple(linker.add(call, item) for call, item in zip(calls, own, strict=True))
    settings = dict.fromkeys(leaf for item in own for leaf in item.settings)
    reason = next((call.refusal for call in own if call.refusal is not None), linker.reason)
    outputs = tuple(ResultOf(*place) for place in sorted(escaping_results)) or _last(own)
    return Links(own, linker.outside, tuple(settings), sources, outputs, linker.mutates, reason)


def _last(calls: Sequence[Facts]) -> tuple[ResultOf, ...]:
    for index in reversed(range(len(calls))):
        if gives := calls[index].gives:
            return tuple(ResultOf(index, place) for place in range(len(gives)))
    return ()


class _Linker:
    """Follows the memory through a unit's calls."""

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
        """Tensors from outside, those in the same memory by its number."""
        times = Counter(number for number, _ in self._outside if number != NO_STORAGE)
        return tuple(replace(spec, storage=number if times[number] > 1 else None) for number, spec in self._outside)

    def add(self, call: UnitCall, facts: Facts) -> tuple[Source, ...]:
        """The sources of the next call's tensors."""
        sources = tuple(map(self._source, call.takes, facts.takes))
        for memory, writes in zip(call.takes, facts.writes, strict=True):
            self.mutates |= writes and memory not in self._base_of_memory
        for place, memory in enumerate(call.gives):
            if place < len(facts.gives):
                self._give(memory, facts.gives[place], ResultOf(self._calls, place), facts)
            elif memory not in self._came:
                # its outputs are not recorded
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
            # autograd keeps results so too: what is taken later with a gradient is not this
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
                source = self._source_of_tensor[key] = self._varied(memory, spec) or _view(
                    self._base_of_memory[memory], spec
                )
            except Unsupported as error:
                self.reason = self.reason or str(error)
        if source is None:
            source = self._source_of_tensor[key] = self._from_outside(memory, spec)
        return source

    def _varied(self, memory: int, spec: TensorSpec) -> Source | None:
        """The result that a tensor is with another size: a signature has the results of its first call alone."""
        for result, result_spec in self._varying.get(memory, ()):
            if _alike(result_spec, spec) and len(result_spec.shape) == len(spec.shape):
                return result
        return None

    def _from_outside(self, memory: int, spec: TensorSpec) -> Source:
        self._came.add(memory)
        self._outside.append((memory, spec))
        return Outside(len(self._outside) - 1)


def _view(base: tuple[ResultOf, TensorSpec, str] | None, spec: TensorSpec) -> Source:
    """A tensor in memory that a call made, which no call gave as it is."""
    if base is None:
        raise Unsupported("the trace does not tell what a call gave that a later one takes")
    result, result_spec, op = base
    if not (_alike(result_spec, spec) and can_flow(result_spec) and can_flow(spec)):
        raise Unsupported(f"a result of {op} is taken as {plain_name(spec.dtype)}, which no call gave")
    return ViewOf(result, spec)


def _alike(one: TensorSpec, other: TensorSpec) -> bool:
    kinds = [(spec.dtype, spec.conj, spec.neg, spec.device) for spec in (one, other)]
    return kinds[0] == kinds[1]
