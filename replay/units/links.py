"""How the calls of a unit hang together: where each tensor that one takes comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from opgrip.replay.arguments.casting import CAST
from opgrip.replay.operators import Unsupported, find_operator
from opgrip.replay.sequences.flow import can_flow, interface_of
from opgrip.replay.sequences.traits import sizes_vary
from opgrip.replay.units.runs import DETACH, UnitCall, geometry
from opgrip.traces.arguments import GeneratorSpec, GroupSpec, Opaque, ReductionSpec, TensorSpec, leaves
from opgrip.traces.graph import written
from opgrip.traces.names import plain_name
from opgrip.traces.records import NO_STORAGE, OPERATOR, Signature


@dataclass(frozen=True, slots=True)
class Outside:
    """A tensor that comes from outside, by its place among them."""

    place: int


@dataclass(frozen=True, slots=True)
class Given:
    """A result: the call, and the place among its tensors."""

    call: int
    place: int


@dataclass(frozen=True, slots=True)
class ViewOf:
    """Another tensor in the memory of one that flows."""

    base: Given
    spec: TensorSpec


Source: TypeAlias = Outside | Given | ViewOf


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

    calls: tuple[Signature, ...]
    outside: tuple[TensorSpec, ...]
    settings: tuple[Any, ...]
    sources: tuple[tuple[Source, ...], ...]
    outputs: tuple[Given, ...]
    mutates: bool
    reason: str | None = None

    @property
    def results(self) -> tuple[TensorSpec, ...]:
        """What the outputs were at the first calls."""
        return tuple(interface_of(self.calls[given.call]).gives[given.place] for given in self.outputs)


def is_setting(leaf: object) -> bool:
    """Whether an argument depends on where and in what a call is replayed."""
    return isinstance(leaf, torch.device | GeneratorSpec) or (isinstance(leaf, torch.dtype) and leaf in CAST)


def marks_a_range(signature: Signature) -> bool:
    """Whether a call does nothing but tell a profiler of a range, which a trace has no handle of."""
    return signature.op.startswith("profiler._record_function_")


def link(calls: Sequence[UnitCall], signatures: Mapping[int, Signature], wanted: Sequence[tuple[int, int]]) -> Links:
    """The links between calls.

    Parameters
    ----------
    wanted : results that are taken outside, as call and place; those of the last call that gives any where none is
    """
    own = tuple(signatures[call.signature] for call in calls)
    linker = _Linker()
    sources = tuple(linker.add(call, signature) for call, signature in zip(calls, own, strict=True))
    settings = dict.fromkeys(leaf for item in own for leaf in leaves([item.args, item.kwargs]) if is_setting(leaf))
    reason = _refusal(own) or linker.reason
    outputs = tuple(Given(*place) for place in sorted(wanted)) or _last(own)
    return Links(own, linker.outside, tuple(settings), sources, outputs, linker.mutates, reason)


def _last(calls: Sequence[Signature]) -> tuple[Given, ...]:
    for index in reversed(range(len(calls))):
        if given := interface_of(calls[index]).gives:
            return tuple(Given(index, place) for place in range(len(given)))
    return ()


def _refusal(calls: Sequence[Signature]) -> str | None:
    if all(map(marks_a_range, calls)):
        return "its calls tell a profiler of ranges, and do nothing else"
    return next(filter(None, (_refusal_of(call) for call in calls if not marks_a_range(call))), None)


def _refusal_of(signature: Signature) -> str | None:
    if signature.raised is not None:
        return f"{signature.op} raised when it was captured: {signature.raised}"
    taken = list(leaves([signature.args, signature.kwargs]))
    for leaf in taken:
        if isinstance(leaf, Opaque):
            return f"a trace cannot hold an argument of {signature.op}, of type {leaf.type_name}"
        if isinstance(leaf, GroupSpec | ReductionSpec):
            return f"{signature.op} takes a process group, which a replay has none of"
    return None


class _Linker:
    """Follows the memory through a unit's calls."""

    def __init__(self) -> None:
        self.mutates = False
        self.reason: str | None = None
        self._outside: list[tuple[int, TensorSpec]] = []
        self._calls = 0
        self._known: dict[tuple[int, tuple[object, ...]], Source] = {}
        self._detached: dict[tuple[int, tuple[object, ...]], Source] = {}
        self._made: dict[int, tuple[Given, TensorSpec, str] | None] = {}
        self._varying: dict[int, list[tuple[Given, TensorSpec]]] = {}
        self._came: set[int] = set()

    @property
    def outside(self) -> tuple[TensorSpec, ...]:
        """Tensors from outside, those in the same memory by its number."""
        memory = [number for number, _ in self._outside if number != NO_STORAGE]
        shared = {number for number in memory if memory.count(number) > 1} if len(set(memory)) < len(memory) else set()
        return tuple(replace(spec, storage=number if number in shared else None) for number, spec in self._outside)

    def add(self, call: UnitCall, signature: Signature) -> tuple[Source, ...]:
        """The sources of the next call's tensors."""
        interface = interface_of(signature)
        sources = tuple(map(self._source, call.takes, interface.takes))
        self.mutates |= any(
            writes and memory not in self._made for memory, writes in zip(call.takes, written(signature), strict=True)
        )
        varies = _sizes_vary(signature)
        for place, memory in enumerate(call.gives):
            if place < len(interface.gives):
                self._give(memory, interface.gives[place], Given(self._calls, place), signature.op, varies)
            elif memory not in self._came:
                # its outputs are not recorded
                self._made.setdefault(memory, None)
        self._calls += 1
        return sources

    def _give(self, memory: int, spec: TensorSpec, given: Given, op: str, varies: bool) -> None:
        if memory == NO_STORAGE:
            return
        if memory not in self._came:
            self._made[memory] = (given, spec, op)
        if varies:
            self._varying.setdefault(memory, []).append((given, spec))
        key = (memory, geometry(spec))
        if op == DETACH and key in self._known:
            # autograd keeps results so too: what is taken later with a gradient is not this
            self._detached[key] = given
        else:
            self._known[key] = given

    def _source(self, memory: int, spec: TensorSpec) -> Source:
        if memory == NO_STORAGE:
            return self._from_outside(memory, spec)
        key = (memory, geometry(spec))
        found = None if spec.requires_grad else self._detached.get(key)
        found = found or self._known.get(key)
        if found is None and memory in self._made:
            try:
                found = self._known[key] = self._varied(memory, spec) or _view(self._made[memory], spec)
            except Unsupported as error:
                self.reason = self.reason or str(error)
        if found is None:
            found = self._known[key] = self._from_outside(memory, spec)
        return found

    def _varied(self, memory: int, spec: TensorSpec) -> Source | None:
        """The result that a tensor is with another size: a signature has the results of its first call alone."""
        for given, known in self._varying.get(memory, ()):
            if _alike(known, spec) and len(known.shape) == len(spec.shape):
                return given
        return None

    def _from_outside(self, memory: int, spec: TensorSpec) -> Source:
        self._came.add(memory)
        self._outside.append((memory, spec))
        return Outside(len(self._outside) - 1)


def _view(base: tuple[Given, TensorSpec, str] | None, spec: TensorSpec) -> Source:
    """A tensor in memory that a call made, which no call gave as it is."""
    if base is None:
        raise Unsupported("the trace does not tell what a call gave that a later one takes")
    given, known, op = base
    if not (_alike(known, spec) and can_flow(known) and can_flow(spec)):
        raise Unsupported(f"a result of {op} is taken as {plain_name(spec.dtype)}, which no call gave")
    return ViewOf(given, spec)


def _alike(one: TensorSpec, other: TensorSpec) -> bool:
    kinds = [(spec.dtype, spec.conj, spec.neg, spec.device) for spec in (one, other)]
    return kinds[0] == kinds[1]


def _sizes_vary(signature: Signature) -> bool:
    """Whether what a call gives has a size that depends on values."""
    if signature.kind != OPERATOR:
        return True
    try:
        return sizes_vary(find_operator(signature).function)
    except Unsupported:
        return False
