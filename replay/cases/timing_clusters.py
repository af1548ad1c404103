"""Ways in which calls of one signature behave, where those of some places of a program take other times than others."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from opgrip.traces.schema.arguments import numbers_of, with_numbers
from opgrip.traces.schema.records import NO_STORAGE, Observed, Signature
from opgrip.traces.table.trace import Trace
from opgrip.traces.table.weighted_quantiles import COUNT

DIFFERENT = 1.5
"""Calls behave in two ways where those of one place take so many times as long as those of another."""
ANY = -1
"""Memory of the calls in a scope whose memory comes once."""
MOST_CALLS = 200_000
"""Calls of those signatures that are looked at."""
MEMORY = "memory"
"""Of the first tensor of each call."""
COLUMNS = [
    *("signature", "op", "kind", "scope", "module", "function", "file", "line", "phase", "inside", "gripped"),
    *("start_ns", "duration_ns", "device_ns", "raw_ns", "time_ns", "perturbed", "page_faults", "slow_memory_ns"),
]
"""What cases are made of."""


@dataclass(frozen=True, slots=True)
class Behaviour:
    """Some calls of a signature, alike in what they take.

    Attributes
    ----------
    signature : with the values and results of one of them
    calls : the selected ones' indices in the trace's table; of very many, those of some pieces of the trace
    captured_us : median time of these; of all, where none is selected
    place : of that one: its module, function and line
    """

    signature: Signature
    calls: pd.Index[int]
    captured_us: float
    place: str


@dataclass(frozen=True, slots=True)
class PlacedCalls:
    """The calls of a signature, some of which were looked at for their places.

    A place is a scope and the memory of the first tensor, where that comes again; else the scope alone.

    Attributes
    ----------
    calls : those of `calls_looked_at`, by their start: also those that are not selected, as looks are at these too
    places : of each, the number of its place
    typical_ns : of each, what those in its place take
    observed : what later calls of the signature met
    rows : of each of these, its row among the calls; None where it was not looked at for its place, or has none
    """

    signature: Signature
    calls: pd.DataFrame
    places: NDArray[np.int64]
    typical_ns: NDArray[np.float64]
    observed: Sequence[Observed]
    rows: Sequence[int | None]

    def behaviours(self, selected: pd.Index[int]) -> list[Behaviour]:
        """The ways in which all calls behave, the most frequent first; none where they all behave alike."""
        groups = self._groups()
        if len(groups) < 2:
            return []
        times = np.array([self.typical_ns[group[0][0]] for group in groups])
        nearest = np.abs(np.log(self.typical_ns)[:, None] - np.log(times)[None, :]).argmin(axis=1)
        order = sorted(range(len(groups)), key=lambda index: -int((nearest == index).sum()))
        return [self._behaviour(groups[index], nearest == index, selected) for index in order]

    def observed_in(self, selected: pd.Index[int]) -> list[Observed]:
        """What later calls met, without those of places that have no selected call."""
        places = set(self.places[self.calls.index.isin(selected)].tolist())
        return [
            item
            for item, row in zip(self.observed, self.rows, strict=True)
            if item.since_ns is None or (row is not None and int(self.places[row]) in places)
        ]

    def _groups(self) -> list[list[tuple[int, Signature]]]:
        """The calls that were looked at, alike in what they take: the row of each, and the signature as it had it."""
        examples = [
            (row, variant)
            for item, row in zip(self.observed, self.rows, strict=True)
            if row is not None and (variant := variant_of(self.signature, item)) is not None
        ]
        groups: list[list[tuple[int, Signature]]] = []
        for example in sorted(examples, key=lambda example: (float(self.typical_ns[example[0]]), example[0])):
            if groups and self.typical_ns[example[0]] < DIFFERENT * self.typical_ns[groups[-1][0][0]]:
                groups[-1].append(example)
            else:
                groups.append([example])
        return groups

    def _behaviour(
        self, examples: Sequence[tuple[int, Signature]], alike: NDArray[np.bool_], selected: pd.Index[int]
    ) -> Behaviour:
        is_selected = self.calls.index.isin(selected)
        places = set(self.places[is_selected].tolist())
        # rather values of a selected place than of another that behaves so
        row, variant = next((item for item in examples if int(self.places[item[0]]) in places), examples[0])
        one = self.calls.iloc[row]
        place = f"{one['module']} {one['function']} {one['file']}:{one['line']}"
        own = alike & is_selected
        median_us = float(np.median(self.typical_ns[own if own.any() else alike])) / 1e3
        return Behaviour(variant, self.calls.index[own], median_us, place.strip())


def calls_looked_at(trace: Trace) -> pd.DataFrame:
    """The calls of the signatures that were looked at in some places, with the memory of each one's first tensor.

    They have the index of `Trace.calls`, of which no more is made. Of a long trace, those of the beginning, where the
    capture looked, and of pieces all along.
    """
    numbers = list(_looked_at(trace))
    tables = [pd.DataFrame({name: [] for name in [*COLUMNS, MEMORY]})]
    if numbers:
        distinct = trace.distinct_calls
        all_calls = int(distinct.loc[distinct["signature"].isin(numbers), COUNT].sum())
        tables = list(_pieces(trace.call_parts(), numbers, all_calls))
    return pd.concat(tables)


def _pieces(
    parts: Iterable[tuple[pd.DataFrame, NDArray[np.int64]]], numbers: Collection[int], all_calls: int
) -> Iterator[pd.DataFrame]:
    """Parts of the calls of some signatures: all where these are few, else at most a part more than so many."""
    seen = taken = 0
    for part, storages in parts:
        own = part[part["signature"].isin(numbers)]
        # half of them are of the beginning
        if all_calls <= MOST_CALLS or taken <= MOST_CALLS / 2 * (1 + seen / all_calls):
            yield own[COLUMNS].assign(**{MEMORY: _first_memory(own, storages)})
            taken += len(own)
        seen += len(own)


def placed_calls(trace: Trace, calls: pd.DataFrame) -> dict[int, PlacedCalls]:
    """The calls of each signature that was looked at in some places, by its number.

    Parameters
    ----------
    calls : of `calls_looked_at`
    """
    signatures, observed = {signature.number: signature for signature in trace.signatures}, _looked_at(trace)
    placed: dict[int, PlacedCalls] = {}
    for name, own in calls.groupby("signature"):
        number = int(str(name))
        own = own.sort_values("start_ns", kind="stable")
        memory = own[MEMORY].to_numpy()
        places, typical_ns = _places(own, memory)
        rows = list(_rows(observed[number], own["start_ns"].to_numpy(), memory))
        placed[number] = PlacedCalls(signatures[number], own, places, typical_ns, observed[number], rows)
    return placed


def _looked_at(trace: Trace) -> dict[int, list[Observed]]:
    """What later calls of those signatures met."""
    known = {signature.number for signature in trace.signatures}
    return {
        number: items
        for number, items in trace.observed.items()
        if number in known and any(item.since_ns is not None for item in items)
    }


def variant_of(signature: Signature, observed: Observed) -> Signature | None:
    """A signature as one of its later calls had it; None where the two do not fit."""
    if len(numbers_of([signature.args, signature.kwargs])) != len(observed.values):
        return None
    args, kwargs = with_numbers((signature.args, signature.kwargs), observed.values)
    return replace(signature, args=args, kwargs=kwargs, outputs=observed.outputs)


def _rows(observed: Sequence[Observed], starts: NDArray[np.int64], memory: NDArray[np.int64]) -> Iterator[int | None]:
    """Of each that was looked at for its place, its row among the signature's calls."""
    for item in observed:
        if item.since_ns is None:
            yield None
            continue
        candidates = starts >= item.since_ns
        if item.storage is not None:
            # calls of other threads, and of other processes in a merged trace, can begin meanwhile
            candidates &= memory == item.storage
        yield int(candidates.argmax()) if candidates.any() else None


def _first_memory(calls: pd.DataFrame, storages: NDArray[np.int64]) -> NDArray[np.int64]:
    """The memory of each call's first tensor."""
    # a call that has none can be the last
    padded = np.append(storages, NO_STORAGE)
    return np.where(calls["tensors"] > 0, padded[calls["first_storage"].to_numpy()], NO_STORAGE)


def _places(calls: pd.DataFrame, memory: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The place of each call, and what those in it take in ns."""
    first = pd.Series(memory, index=calls.index)
    raw_ns = (calls["raw_ns"] - calls["slow_memory_ns"]).astype(float)
    calm_ns = calm_times(calls)
    by_memory = [calls["scope"], first]
    again = raw_ns.groupby(by_memory).transform("size") > 1
    candidates = (
        calm_ns.groupby(by_memory).transform("median").where(again),
        raw_ns.groupby(by_memory).transform("median").where(again),
        calm_ns.groupby(calls["scope"]).transform("median"),
        raw_ns,
    )
    typical = candidates[0]
    for other in candidates[1:]:
        typical = typical.fillna(other)
    places = calls.groupby([calls["scope"], first.where(again, ANY)]).ngroup()
    return np.asarray(places, dtype=np.int64), np.asarray(typical.clip(lower=1.0), dtype=np.float64)


def calm_times(calls: pd.DataFrame) -> pd.Series[float]:
    """Times of calls in ns; nan of those that the capture's own work perturbed on the host."""
    return calls["raw_ns"].astype(float).where(~calls["perturbed"] | calls["device_ns"].notna())
