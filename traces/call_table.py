"""The calls of a trace as a table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

from opgrip.traces.accelerators import device_of
from opgrip.traces.device_times import device_times, streams, with_functions
from opgrip.traces.records import Calls, DeviceTimes, Scope, Signature, Thread


def calls_table(
    blocks: list[Calls],
    later: list[DeviceTimes],
    signatures: list[Signature],
    scopes: list[Scope],
    threads: dict[int, Thread],
) -> pd.DataFrame:
    """One row a call in the order in which calls started, in the columns that `Trace.calls` has.

    Parameters
    ----------
    later : times on an accelerator that were known only after the calls were written
    """

    def of_scope(value: Callable[[Scope], Any]) -> pd.Categorical:
        return _names(scope, {record.number: value(record) for record in scopes})

    signature, scope = column(blocks, "signature"), column(blocks, "scope")
    by_number = {record.number: record for record in scopes}
    lengths = [len(block.signature) for block in blocks]
    thread = np.repeat([block.thread for block in blocks], lengths).astype(np.int64)
    tensors = np.concatenate([block.tensors or [0] * len(block.signature) for block in blocks] or [[]]).astype(np.int64)

    def origin(record: Scope) -> Scope:
        return by_number.get(record.forward, record) if record.forward is not None else record

    table = pd.DataFrame(
        {
            "signature": signature,
            "op": _names(signature, {record.number: record.op for record in signatures}),
            "scope": scope,
            "module": of_scope(lambda record: origin(record).module),
            "function": of_scope(lambda record: origin(record).function),
            "file": of_scope(lambda record: origin(record).file),
            "line": pd.Series(of_scope(lambda record: origin(record).line)).astype("Int64").fillna(0).astype("int64"),
            "own_module": of_scope(lambda record: record.module),
            "phase": of_scope(lambda record: record.phase),
            "inside": of_scope(lambda record: record.inside),
            "gripped": np.isin(scope, [record.number for record in scopes if record.gripped]),
            "kind": _names(signature, {record.number: record.kind for record in signatures}),
            "device": _names(signature, {record.number: device_of(record) for record in signatures}),
            "process": _names(thread, {number: record.process for number, record in threads.items()}),
            "thread": _names(thread, {number: record.name for number, record in threads.items()}),
            "start_ns": column(blocks, "start_ns"),
            "duration_ns": column(blocks, "duration_ns"),
            "device_ns": device_times(blocks, later),
            "stream": streams(blocks),
            "perturbed": _perturbed(blocks, lengths),
            "host_ns": 0.0,
            "raw_ns": 0.0,
            "time_ns": 0.0,
            "page_faults": _page_faults(blocks, lengths),
            "tensors": tensors,
            "first_storage": np.cumsum(tensors) - tensors,
        }
    )
    table = table.sort_values("start_ns", kind="stable", ignore_index=True)
    table["stream"] = pd.arrays.IntegerArray(table["stream"].to_numpy(), table["device_ns"].isna().to_numpy())
    table["device_ns"] = with_functions(table)
    table["raw_ns"] = table["device_ns"].fillna(table["duration_ns"])
    table["host_ns"] = _unperturbed_ns(table)
    table["time_ns"] = table["device_ns"].fillna(table["host_ns"])
    return table


def _unperturbed_ns(calls: pd.DataFrame) -> pd.Series[float]:
    """Durations of calls; of those that were perturbed, the median of others of their signature where there are any.

    Where there is one other alone, and it took longer than all, it was interrupted: there the median of all counts.
    """
    durations, perturbed = calls["duration_ns"], calls["perturbed"]
    if not perturbed.any():
        return durations
    groups = durations.groupby(calls["signature"])
    others = durations.where(~perturbed).groupby(calls["signature"])
    typical, count = others.transform("median"), others.transform("count")
    was_interrupted = (count == 1) & (groups.transform("size") > 2) & (typical == groups.transform("max"))
    typical = typical.where(~was_interrupted, groups.transform("median"))
    return durations.where(~(perturbed | was_interrupted) | typical.isna(), typical)


def column(blocks: list[Calls], name: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    """What the blocks have under a name, one after the other."""
    pieces = [np.asarray(getattr(block, name), dtype=np.int64) for block in blocks]
    return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64)


def _page_faults(blocks: list[Calls], lengths: list[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
    faults = np.zeros(sum(lengths), dtype=np.int64)
    first = 0
    for block, length in zip(blocks, lengths, strict=True):
        for place, count in block.page_faults:
            faults[first + place] = count
        first += length
    return faults


def _perturbed(blocks: list[Calls], lengths: list[int]) -> np.ndarray[Any, np.dtype[np.bool_]]:
    perturbed = np.zeros(sum(lengths), dtype=np.bool_)
    first = 0
    for block, length in zip(blocks, lengths, strict=True):
        for place, count in block.perturbed:
            perturbed[first + place : first + min(place + count, length)] = True
        first += length
    return perturbed


def _names(numbers: np.ndarray[Any, np.dtype[np.int64]], names: dict[int, Any]) -> pd.Categorical:
    """The name of each number, as a category: a million calls share a few names."""
    categories = list(dict.fromkeys(name for name in names.values() if name is not None))
    place = {name: index for index, name in enumerate(categories)}
    code_of = {number: place.get(name, -1) for number, name in names.items()}
    unique, inverse = np.unique(numbers, return_inverse=True)
    codes = np.array([code_of.get(int(number), -1) for number in unique], dtype=np.int64)
    dtype = pd.CategoricalDtype(categories)
    return pd.Categorical.from_codes(codes[inverse] if len(unique) else inverse, dtype=dtype)
