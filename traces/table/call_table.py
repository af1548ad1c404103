"""The table of a trace's calls, with one row per call, and the computation of its columns of times."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pandas as pd

from opgrip.traces.codec.call_blocks import CallBlock, Integers, perturbed_flags
from opgrip.traces.schema.records import FUNCTION, Kernels, Scope, Signature, Thread
from opgrip.traces.table.accelerators import device_of
from opgrip.traces.table.call_source import by_call, concatenated, or_all
from opgrip.traces.table.profiler_labels import are_marks

COUNT = "count"  # name of the column that holds the number of calls that a row of distinct calls represents


def counts_of(calls: pd.DataFrame) -> pd.Series[int]:
    """Return the number of calls that each row represents, for a table of calls or of distinct calls."""
    return calls[COUNT] if COUNT in calls else pd.Series(1, index=calls.index)


def quantiles(values: pd.Series[Any], groups: Any, counts: pd.Series[int], share: float = 0.5) -> pd.Series[float]:
    """Return the quantile `share`, 0 to 1, of each group of values.

    counts : number of times that each value counts
    """
    names = pd.Series(np.asarray(groups), index=values.index)
    table = pd.DataFrame({"group": names, "value": values.astype(float), COUNT: counts})
    own = table.dropna().sort_values(["group", "value"])
    ends = own.groupby("group")[COUNT].cumsum().to_numpy()
    sizes = own.groupby("group", sort=True)[COUNT].sum()
    rows = own.groupby("group", sort=True).size().to_numpy()
    place = share * (sizes.to_numpy() - 1)
    # one search serves all groups, because each group has its own interval of an increasing range
    offsets = np.cumsum(sizes.to_numpy()) - sizes.to_numpy()
    until = ends + np.repeat(offsets, rows)
    lower = np.searchsorted(until, offsets + np.floor(place), side="right")
    upper = np.searchsorted(until, offsets + np.ceil(place), side="right")
    column = own["value"].to_numpy()
    low, high = column[lower], column[upper]
    middle = low + (high - low) * (place - np.floor(place))
    if share == 0.5:
        # computed like the mean of two values, from which interpolation differs in the last digit
        middle = np.where(low == high, low, (low + high) / 2)
    return pd.Series(middle, index=sizes.index).reindex(np.unique(names.dropna()))


def usual_ns(calls: pd.DataFrame) -> pd.Series[Any]:
    return calls["duration_ns"] - calls["slow_memory_ns"]


@dataclass(frozen=True, slots=True)
class Typical:
    """Typical duration of each signature's calls, which replaces the durations of perturbed calls.

    median_ns : by signature, the median duration of unperturbed calls, or of all calls if `was_interrupted`
    was_interrupted : by signature, True if its only unperturbed call was probably interrupted
    """

    median_ns: pd.Series[float]
    was_interrupted: pd.Series[bool]

    def unperturbed_ns(self, calls: pd.DataFrame) -> pd.Series[Any]:
        signature, durations = calls["signature"], usual_ns(calls)
        median_ns = signature.map(self.median_ns)
        is_replaced = calls["perturbed"] | signature.map(self.was_interrupted)
        return durations.where(~is_replaced | median_ns.isna(), median_ns)


def typical_of(calls: pd.DataFrame) -> Typical | None:
    durations, perturbed, counts = usual_ns(calls), calls["perturbed"], counts_of(calls)
    if not perturbed.any():
        return None
    signature = calls["signature"]
    others = quantiles(durations.where(~perturbed), signature, counts)
    count, size = (number.groupby(signature).sum() for number in (counts.where(~perturbed, 0), counts))
    was_interrupted = (count == 1) & (size > 2) & (others == durations.groupby(signature).max())
    return Typical(others.where(~was_interrupted, quantiles(durations, signature, counts)), was_interrupted)


Times: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]


def with_functions(calls: pd.DataFrame) -> Times:
    """Return the device times of calls; a function recorded with `--grip` gets the sum of its inner calls' times."""
    times = calls["device_ns"].to_numpy(dtype=np.float64, copy=True)
    functions = (calls["kind"] == FUNCTION).to_numpy()
    if not functions.any() or np.isnan(times).all():
        return times
    # the time of an extension function already includes the calls that it makes
    own = ((calls["inside"].isna() | calls["gripped"]) & ~are_marks(calls)).to_numpy() & ~functions & ~np.isnan(times)
    starts = calls["start_ns"].to_numpy()
    ends = starts + calls["duration_ns"].to_numpy()
    thread = calls.groupby(["process", "thread"], observed=True, dropna=False).ngroup().to_numpy()
    for number in np.unique(thread[functions]):
        inner, outer = np.flatnonzero(own & (thread == number)), np.flatnonzero(functions & (thread == number))
        sums = np.concatenate([[0.0], np.cumsum(times[inner])])
        first, last = np.searchsorted(starts[inner], starts[outer]), np.searchsorted(starts[inner], ends[outer])
        times[outer] = np.where(np.isnan(times[outer]) & (last > first), sums[last] - sums[first], times[outer])
    return times


def summarize_kernels(kernels: Sequence[Kernels], op_by_signature: Mapping[int, str]) -> pd.DataFrame:
    rows = [
        (name, op_by_signature.get(record.signature, ""), launches, device_ns / 1e3)
        for record in kernels
        for name, launches, device_ns in zip(record.names, record.launches, record.device_ns, strict=True)
    ]
    table = pd.DataFrame(rows, columns=["kernel", "op", "launches", "time_us"])
    table = table.groupby(["kernel", "op"], as_index=False, sort=False).sum()
    table["share"] = table["time_us"] / max(float(table["time_us"].sum()), 1e-3)
    return table.sort_values(["time_us", "launches"], ascending=False, ignore_index=True)


# columns of a table of calls that are taken from blocks, with their dtypes
COLUMNS = {
    **dict.fromkeys(("thread", "signature", "scope", "start_ns", "duration_ns"), np.int64),
    "device_ns": np.float64,
    "stream": np.int64,
    "perturbed": np.bool_,
    "page_faults": np.int64,
    "slow_memory_ns": np.int64,
    "tensors": np.int64,
}
DENSE = 1 << 20  # maximum of numbers that are looked up in an array; captures only write smaller ones


@dataclass(frozen=True, slots=True)
class CallNames:
    signatures: list[Signature]
    scopes: list[Scope]
    threads: dict[int, Thread]


def calls_table(source: Iterable[CallBlock], names: CallNames) -> pd.DataFrame:
    table = rows_table(concatenated_columns(source), names)
    table = table.sort_values("start_ns", kind="stable", ignore_index=True)
    table["device_ns"] = with_functions(table)
    return with_times(table, typical_of(table))


def known_streams(numbers: np.ndarray[Any, Any], is_on_host: np.ndarray[Any, Any]) -> pd.arrays.IntegerArray:
    return pd.arrays.IntegerArray(numbers, is_on_host & (numbers == 0))


def rows_table(columns: Mapping[str, np.ndarray[Any, Any]], names: CallNames) -> pd.DataFrame:
    tensors = columns["tensors"]
    table = pd.DataFrame(
        named_columns(columns["signature"], columns["scope"], columns["thread"], names)
        | {name: columns[name] for name in ("start_ns", "duration_ns", "device_ns", "stream", "perturbed")}
        | {"host_ns": 0.0, "raw_ns": 0.0, "time_ns": 0.0, "page_faults": columns["page_faults"]}
        | {"slow_memory_ns": columns["slow_memory_ns"], "tensors": tensors}
        | {"first_storage": np.cumsum(tensors) - tensors}
    )
    table["stream"] = known_streams(table["stream"].to_numpy(), table["device_ns"].isna().to_numpy())
    return table


def with_times(table: pd.DataFrame, typical: Typical | None) -> pd.DataFrame:
    """Add the columns `raw_ns`, `host_ns` and `time_ns` to a table of calls, in place, and return the table."""
    table["raw_ns"] = table["device_ns"].fillna(table["duration_ns"])
    table["host_ns"] = table["duration_ns"] if typical is None else typical.unperturbed_ns(table)
    table["time_ns"] = table["device_ns"].fillna(table["host_ns"])
    return table


def named_columns(signature: Integers, scope: Integers, thread: Integers, names: CallNames) -> dict[str, Any]:
    signatures, scopes, threads = names.signatures, names.scopes, names.threads
    by_number = {record.number: record for record in scopes}

    def of_scope(value: Callable[[Scope], Any]) -> pd.Categorical:
        return _names(scope, {record.number: value(record) for record in scopes})

    def origin(record: Scope) -> Scope:
        return by_number.get(record.forward, record) if record.forward is not None else record

    return {
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
    }


def concatenated_columns(source: Iterable[CallBlock]) -> dict[str, np.ndarray[Any, Any]]:
    pieces: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    for block in source:
        calls = len(block)
        of_block = (
            np.full(calls, block.thread),
            block.signature,
            block.scope,
            block.start_ns,
            block.duration_ns,
            device_times(block),
            or_all(block.streams, calls, 0),
            perturbed_flags(block.perturbed, len(block)),
            by_call(block.page_faults, calls),
            by_call(block.slow_memory, calls),
            or_all(block.tensors, calls, 0),
        )
        for name, column in zip(COLUMNS, of_block, strict=True):
            pieces[name].append(column)
    return {name: np.concatenate(items or [np.empty(0, dtype=COLUMNS[name])]) for name, items in pieces.items()}


def device_times(block: CallBlock) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the device time of each call of a block in ns; NaN for calls that ran only on the host."""
    times = or_all(block.device_ns, len(block), -1).astype(np.float64)
    times[times < 0] = np.nan
    return times


def all_storages(source: Iterable[CallBlock]) -> Integers:
    return concatenated([block.storages for block in source])


def _names(numbers: np.ndarray[Any, np.dtype[np.int64]], names: dict[int, Any]) -> pd.Categorical:
    # categorical, because a million calls share a few names
    categories = list(dict.fromkeys(name for name in names.values() if name is not None))
    place = {name: index for index, name in enumerate(categories)}
    code_of = {number: place.get(name, -1) for number, name in names.items()}
    dtype = pd.CategoricalDtype(categories)
    return pd.Categorical.from_codes(_translated(numbers, code_of), dtype=dtype)


def _translated(numbers: Integers, code_of: Mapping[int, int]) -> Integers:
    if min(code_of, default=0) < 0 or max(code_of, default=0) >= DENSE:
        unique, inverse = np.unique(numbers, return_inverse=True)
        own = np.array([code_of.get(int(number), -1) for number in unique], dtype=np.int64)
        return own[inverse] if len(unique) else np.empty(0, dtype=np.int64)
    # a number without a name looks up the last entry
    codes = np.full(max(code_of, default=-1) + 2, -1, dtype=np.int64)
    codes[list(code_of)] = list(code_of.values())
    last = len(codes) - 1
    translated: Integers = codes[np.where((numbers < 0) | (numbers > last), last, numbers)]
    return translated
