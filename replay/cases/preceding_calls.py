"""The calls that run before a case's calls in the program, and the argument tensors that were used shortly before."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import torch

from opgrip.platform.machine import last_cache_bytes
from opgrip.replay.cases.cases import Case, make_cases
from opgrip.replay.operators.lookup import is_view
from opgrip.replay.operators.memory import bytes_of
from opgrip.traces import Trace
from opgrip.traces.schema.arguments import tensors
from opgrip.traces.schema.records import NO_STORAGE, Signature
from opgrip.traces.table.profiler_labels import own_calls

BEFORE = 4  # number of preceding calls that are run before a call
FLUSHING_BYTES = 64 << 20  # use of so many bytes evicts older data from a cache; calls before it are not run
MOST_PLACES = 32  # maximum number of calls of a case whose preceding calls are used
MOST_CALLS = 300_000
RECENT_BYTES = 8 << 20  # bytes that a program may use between two uses of a tensor that is to stay in a CPU's cache
# the same as a share of an accelerator's last-level cache, whose two halves may contain the same data
SHARE_OF_CACHE = 0.5
MOST_RECENT_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class CallPosition:
    """A call's position in the program, and the use of memory before it.

    position : index of the call if all calls are listed one thread after the other
    before : signature numbers of the calls to run before it, in order
    recent, used_bytes : indices of the argument tensors that were used shortly before, and the bytes that calls used
        since
    """

    position: int
    before: tuple[int, ...]
    recent: tuple[int, ...]
    used_bytes: tuple[int, ...] = ()

    def within(self, cache_bytes: int) -> CallPosition:
        recent = [(place, used) for place, used in zip(self.recent, self.used_bytes, strict=True) if used < cache_bytes]
        return replace(self, recent=tuple(place for place, _ in recent), used_bytes=tuple(used for _, used in recent))


@dataclass(frozen=True, slots=True)
class PrecedingCalls:
    places: Mapping[int, Sequence[CallPosition]]
    cases: Mapping[int, Case]

    def places_of(self, case: Case, cache_bytes: int) -> list[CallPosition]:
        return [place.within(cache_bytes) for place in self.places.get(case.number, ())]

    def first(self, case: Case) -> int:
        indices = self.places.get(case.number)
        return indices[0].position if indices else 0

    def around(self, cases: Sequence[Case]) -> list[Case]:
        own = {case.number for case in cases}
        before = {number for case in cases for index in self.places.get(case.number, ()) for number in index.before}
        return [self.cases[number] for number in sorted(before - own) if number in self.cases]


def recent_bytes(device: str) -> int:
    """Return how many bytes a program may use between two uses of a tensor that is to stay in the device's cache."""
    if torch.device(device).type == "cpu":
        return RECENT_BYTES
    return int(SHARE_OF_CACHE * last_cache_bytes(device))


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
    signatures = {signature.number: signature for signature in trace.signatures}
    used_bytes = {number: _used_bytes(signature) for number, signature in signatures.items()}
    places: dict[int, list[CallPosition]] = {}
    position = 0
    for _, own in calls.groupby("thread", sort=False, observed=True):
        order = own["signature"].to_numpy()
        own_cases = case_numbers[own.index].to_numpy()
        chosen = _chosen(own_cases)
        recent = _recent(order, own["first_storage"].to_numpy(), storages, signatures, used_bytes, chosen)
        for index in sorted(chosen):
            used = recent.get(index, {})
            place = CallPosition(position + index, _before(order, index, used_bytes), tuple(used), tuple(used.values()))
            places.setdefault(int(own_cases[index]), []).append(place)
        position += len(order)
    return PrecedingCalls(places, cases)


def _before(order: np.ndarray, index: int, used_bytes: Mapping[int, int]) -> tuple[int, ...]:
    before: list[int] = []  # from the earliest call whose data may still be in a cache
    used = 0
    for number in reversed(order[max(0, index - BEFORE) : index].tolist()):
        before.append(number)
        used += used_bytes.get(number, 0)
        if used >= FLUSHING_BYTES:
            break
    return tuple(reversed(before))


def _used_bytes(signature: Signature) -> int:
    return 0 if is_view(signature) else bytes_of([signature.args, signature.kwargs, signature.outputs])


def _first_calls(trace: Trace) -> tuple[pd.DataFrame, np.ndarray]:
    tables: list[pd.DataFrame] = []
    pieces: list[np.ndarray] = []
    calls = storages = 0
    for part, own_storages in trace.call_parts():
        own = own_calls(part).head(MOST_CALLS - calls)
        tables.append(own.assign(first_storage=own["first_storage"] + storages))
        pieces.append(own_storages)
        calls, storages = calls + len(own), storages + len(own_storages)
        if calls == MOST_CALLS:
            break
    return pd.concat(tables), np.concatenate(pieces)


def _numbers_of_cases(calls: pd.DataFrame, measured: Sequence[Case]) -> pd.Series[int]:
    numbers = calls["signature"].copy()
    for case in measured:
        if case.part_of is not None:
            for cluster in case.timing_clusters:
                numbers[calls.index.intersection(cluster.calls)] = case.number
    return numbers


def _chosen(cases: np.ndarray) -> set[int]:
    chosen: set[int] = set()
    by_case = np.argsort(cases, kind="stable")
    _, first, count = np.unique(cases[by_case], return_index=True, return_counts=True)
    for start, number in zip(first.tolist(), count.tolist(), strict=True):
        steps = np.linspace(0, number - 1, min(number, MOST_PLACES)).astype(int)
        chosen.update(by_case[start + steps].tolist())
    return chosen


def _recent(
    order: np.ndarray,
    first_storage: np.ndarray,
    storages: np.ndarray,
    signatures: Mapping[int, Signature],
    used_bytes: Mapping[int, int],
    chosen: set[int],
) -> dict[int, dict[int, int]]:
    # by index of the call and of a tensor argument that was used shortly before: bytes that calls have used since
    argument_counts = {number: len(list(tensors([item.args, item.kwargs]))) for number, item in signatures.items()}
    result_counts = {number: len(list(tensors(item.outputs))) for number, item in signatures.items()}
    last_use: dict[int, int] = {}
    used = 0
    recent: dict[int, dict[int, int]] = {}
    for index, (number, first) in enumerate(zip(order.tolist(), first_storage.tolist(), strict=True)):
        memory = storages[first : first + argument_counts.get(number, 0) + result_counts.get(number, 0)].tolist()
        if index in chosen:
            own = memory[: argument_counts.get(number, 0)]
            since = [used - last_use.get(storage, -MOST_RECENT_BYTES) for storage in own]
            recent[index] = {
                place: since[place]
                for place, storage in enumerate(own)
                if storage != NO_STORAGE and since[place] < MOST_RECENT_BYTES
            }
        if used_bytes.get(number):
            used += used_bytes[number]
            last_use.update(dict.fromkeys(memory, used))
    return recent
