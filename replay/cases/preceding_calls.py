"""Calls that run before a call in the program, and the bytes used since the program last used the call's memory."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np
import pandas as pd

from opgrip.replay.cases.cases import Case, make_cases
from opgrip.replay.cases.subgraph_calls import Links, Outside
from opgrip.replay.cases.subgraphs import SubgraphOperator
from opgrip.replay.operators.lookup import is_view
from opgrip.replay.operators.work import GATHERS, SCATTERS
from opgrip.traces import Trace
from opgrip.traces.codec.call_blocks import Integers
from opgrip.traces.schema.arguments import tensors
from opgrip.traces.schema.records import NO_STORAGE, Signature
from opgrip.traces.schema.tensor_specs import stored_elements
from opgrip.traces.table.profiler_labels import own_calls

BEFORE = 4  # number of preceding calls that are run before a call
MOST_PLACES = 32  # maximum number of calls of a case whose state of the caches is reproduced
MOST_CALLS = 300_000
BAG = "embedding_bag"  # part of the names of operators that read a row of a table for each index

Distances = tuple[int | None, ...]
# the fields `distances`, `of_result` and `of_code` of a call
State = tuple[Distances, int | None, int | None]


@dataclass(frozen=True, slots=True)
class CallPosition:
    """Position of a call in the program, and the bytes that the program used since it last used the call's memory.

    position : index of the call in a list of all calls of one thread after the other
    before : signature numbers of the calls to run before it, in order
    distances : for each tensor argument, bytes of other memory that the program used between its last use of the
        argument's memory and the call; None if unknown
    of_result : the same for the memory that the call's largest result gets; None if it is new or unknown
    of_code : the same for the machine code of the operator
    """

    position: int
    before: tuple[int, ...]
    distances: Distances = ()
    of_result: int | None = None
    of_code: int | None = None


@dataclass(frozen=True, slots=True)
class PrecedingCalls:
    places: Mapping[int, Sequence[CallPosition]]
    cases: Mapping[int, Case]

    def first(self, case: Case) -> int:
        indices = self.places.get(case.number)
        return indices[0].position if indices else 0

    def around(self, cases: Sequence[Case]) -> list[Case]:
        own = {case.number for case in cases}
        before = {number for case in cases for index in self.places.get(case.number, ()) for number in index.before}
        return [self.cases[number] for number in sorted(before - own) if number in self.cases]


def make_preceding_calls(
    trace: Trace, everything: Sequence[Case] | None = None, measured: Sequence[Case] = ()
) -> PrecedingCalls:
    if everything is None:
        with warnings.catch_warnings():
            # warnings about values are shown when cases are selected
            warnings.simplefilter("ignore")
            everything = make_cases(trace, with_preceding_calls=True)
    cases = {case.number: case for case in everything if case.signature.raised is None}
    calls, storages = _first_calls(trace)
    case_numbers = _numbers_of_cases(calls, measured)
    chosen = _chosen(calls, case_numbers)
    states = _distances(calls, storages, trace.signatures, chosen)
    places: dict[int, list[CallPosition]] = {}
    op = {signature.number: signature.op for signature in trace.signatures}
    numbers = calls["signature"].to_numpy()
    for index, (position, before) in chosen.items():
        distances, of_result, of_code = states[index]
        # the code is used by a call that runs before
        of_code = None if op[numbers[index]] in {op[number] for number in before} else of_code
        place = CallPosition(position, before, distances, of_result, of_code)
        places.setdefault(int(case_numbers[index]), []).append(place)
    return PrecedingCalls(places, cases)


def make_places_of_subgraphs(trace: Trace, cases: Sequence[Case]) -> PrecedingCalls:
    """Return where the program runs subgraphs. Their inputs have distances, and no calls run before them."""
    calls, storages = _first_calls(trace)
    starts: dict[int, list[tuple[int, _Uses]]] = {}
    for case in cases:
        assert isinstance(case.operator, SubgraphOperator)
        sizes = _bytes_of_inputs(case.operator.links)
        for first, own in case.storages[:: 1 + len(case.storages) // MOST_PLACES]:
            starts.setdefault(first, []).append((case.number, _Uses(list(own), [], *sizes, NO_STORAGE)))
    places: dict[int, list[CallPosition]] = {}
    numbers = calls.index.tolist()
    for index, _, blocks in _in_order(calls, storages, trace.signatures):
        for number, inputs in starts.get(numbers[index], ()):
            places.setdefault(number, []).append(CallPosition(index, (), blocks.distances(inputs)))
    return PrecedingCalls(places, {})


def _bytes_of_inputs(links: Links) -> tuple[list[int], list[int]]:
    # how many bytes a subgraph uses of each tensor from outside, and how many these have
    wholes = [stored_elements(spec) * spec.dtype.itemsize for spec in links.outside]
    used = [0] * len(wholes)
    for facts, sources in zip(links.calls, links.sources, strict=True):
        for source, size in zip(sources, _bytes_by_tensor(facts.signature)[0], strict=False):
            if isinstance(source, Outside):
                used[source.place] = max(used[source.place], size)
    # results of views are used, which are not followed
    return [size or whole for size, whole in zip(used, wholes, strict=True)], wholes


def used_bytes(signature: Signature) -> int:
    return sum(_bytes_by_tensor(signature)[0])


def _bytes_by_tensor(signature: Signature) -> tuple[list[int], list[int]]:
    # how many bytes a call uses of each tensor argument and result, and how many these have
    arguments, results = (list(tensors(tree)) for tree in ([signature.args, signature.kwargs], signature.outputs))
    sizes = [stored_elements(spec) * spec.dtype.itemsize for spec in (*arguments, *results)]
    if is_view(signature):
        return [0] * len(sizes), sizes
    name = signature.op.rpartition(".")[0].rstrip("_")
    if not arguments or not (name in GATHERS or name in SCATTERS or BAG in name):
        return sizes, sizes
    # it uses only as many elements of its largest argument as there are indices, values and results
    table = max(range(len(arguments)), key=sizes.__getitem__)
    used = sum(size for size in sizes if size < sizes[table])
    if BAG in name:
        used *= max(prod(arguments[table].shape[1:]), 1)
    return [min(size, used) if size == sizes[table] else size for size in sizes], sizes


def _first_calls(trace: Trace) -> tuple[pd.DataFrame, Integers]:
    tables: list[pd.DataFrame] = []
    pieces: list[Integers] = []
    calls = storages = 0
    for part, own_storages in trace.call_parts():
        own = own_calls(part)
        # a damaged trace may lack the signature of a call
        own = own[own["op"].notna()].head(MOST_CALLS - calls)
        tables.append(own.assign(first_storage=own["first_storage"] + storages))
        pieces.append(own_storages)
        calls, storages = calls + len(own), storages + len(own_storages)
        if calls == MOST_CALLS:
            break
    return pd.concat(tables), np.concatenate(pieces)


def _numbers_of_cases(calls: pd.DataFrame, measured: Sequence[Case]) -> Integers:
    numbers = calls["signature"].copy()
    for case in measured:
        if case.part_of is not None:
            for cluster in case.timing_clusters:
                numbers[calls.index.intersection(cluster.calls)] = case.number
    return numbers.to_numpy()


def _chosen(calls: pd.DataFrame, case_numbers: Integers) -> dict[int, tuple[int, tuple[int, ...]]]:
    # by index of a chosen call in `calls`: its position, and the signatures of the calls before it
    chosen: dict[int, tuple[int, tuple[int, ...]]] = {}
    position = 0
    for own in calls.groupby("thread", sort=False, observed=True).indices.values():
        order = calls["signature"].to_numpy()[own]
        by_case = np.argsort(case_numbers[own], kind="stable")
        _, first, count = np.unique(case_numbers[own][by_case], return_index=True, return_counts=True)
        for start, number in zip(first.tolist(), count.tolist(), strict=True):
            steps = np.linspace(0, number - 1, min(number, MOST_PLACES)).astype(int)
            for index in np.unique(by_case[start + steps]).tolist():
                chosen[int(own[index])] = position + index, tuple(order[max(0, index - BEFORE) : index].tolist())
        position += len(order)
    return chosen


def _distances(
    calls: pd.DataFrame, storages: Integers, signatures: Sequence[Signature], chosen: Collection[int]
) -> dict[int, State]:
    return {
        index: (blocks.distances(call), blocks.distance(call.largest_result), blocks.distance(call.code))
        for index, call, blocks in _in_order(calls, storages, signatures)
        if index in chosen
    }


def _in_order(
    calls: pd.DataFrame, storages: Integers, signatures: Sequence[Signature]
) -> Iterator[tuple[int, _Uses, _Blocks]]:
    sizes = {item.number: _bytes_by_tensor(item) for item in signatures}
    counts = {item.number: len(list(tensors([item.args, item.kwargs]))) for item in signatures}
    codes = {op: NO_STORAGE - 1 - place for place, op in enumerate(dict.fromkeys(item.op for item in signatures))}
    code_of = {item.number: codes[item.op] for item in signatures}
    uses = []
    for number, first in zip(calls["signature"].tolist(), calls["first_storage"].tolist(), strict=True):
        count = len(sizes[number][0])
        own = storages[first : first + count].tolist()
        own += [NO_STORAGE] * (count - len(own))
        uses.append(_Uses(own[: counts[number]], own[counts[number] :], *sizes[number], code_of[number]))
    blocks = _Blocks(uses)
    for index, call in enumerate(uses):
        blocks.allocate(call)
        yield index, call, blocks
        blocks.use(index, call)


class _Uses(NamedTuple):
    # the storages of a call's tensor arguments and results, how many bytes it uses of each, how many these have, and a
    # number for the code of its operator, as that of a storage
    arguments: list[int]
    results: list[int]
    sizes: list[int]
    wholes: list[int]
    code: int

    @property
    def items(self) -> Iterator[tuple[int, int]]:
        pairs = zip((*self.arguments, *self.results), self.sizes, strict=True)
        yield from ((storage, size) for storage, size in pairs if size and storage != NO_STORAGE)
        yield self.code, 0

    @property
    def new(self) -> dict[int, int]:
        # storages that may be new, with their sizes
        sizes = zip(self.results, self.sizes[len(self.arguments) :], strict=True)
        return {storage: size for storage, size in sizes if size and storage not in (NO_STORAGE, *self.arguments)}

    @property
    def largest_result(self) -> int:
        new = self.new
        return max(new, key=new.__getitem__, default=NO_STORAGE)


class _Blocks:
    """Last uses of the memory of a program. A result is assumed to reuse the memory of its size that was freed last."""

    def __init__(self, calls: Sequence[_Uses]) -> None:
        last_use: dict[int, tuple[int, int]] = {}
        made: set[int] = set()
        for index, call in enumerate(calls):
            made.update(storage for storage in call.new if storage not in last_use)
            last_use.update((storage, (index, size)) for storage, size in call.items)
        self._freed: dict[int, list[int]] = {}
        self._free: dict[int, list[int]] = {}
        self._block_of: dict[int, int] = {}
        self._count = 0
        self._used_at, self._bytes = np.full(len(last_use), -np.inf), np.zeros(len(last_use))
        for storage, (index, size) in last_use.items():
            if storage in made:
                self._freed.setdefault(index, []).append(storage)
            else:
                self._use(storage, index - len(calls), size)

    def allocate(self, call: _Uses) -> None:
        for storage, size in call.new.items():
            if storage not in self._block_of and (free := self._free.get(size)):
                self._block_of[storage] = free.pop()

    def use(self, index: int, call: _Uses) -> None:
        for storage, size in call.items:
            self._use(storage, index, size)
        for storage in self._freed.get(index, ()):
            block = self._block_of.pop(storage)
            self._free.setdefault(int(self._bytes[block]), []).append(block)

    def distances(self, call: _Uses) -> Distances:
        distances: list[int | None] = []
        for storage, used, whole in zip(call.arguments, call.sizes, call.wholes, strict=False):
            distance = self.distance(storage) if used else None
            # a part of a tensor, such as rows of a table, was not used each time that the tensor was
            distances.append(None if distance is None else distance + whole - used)
        return tuple(distances)

    def distance(self, storage: int) -> int | None:
        block = self._block_of.get(storage)
        if block is None:
            return None
        used_at = self._used_at[: self._count]
        return int(self._bytes[: self._count][used_at > used_at[block]].sum())

    def _use(self, storage: int, index: int, size: int) -> None:
        block = self._block_of.setdefault(storage, self._count)
        self._count = max(self._count, block + 1)
        self._used_at[block], self._bytes[block] = index, size
