"""Tables of the calls of long traces: equal calls in one row, or all calls in parts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from opgrip.traces.codec.call_blocks import CallBlock, Integers, perturbed_flags
from opgrip.traces.table.call_source import CallSource, by_call, or_all, selected
from opgrip.traces.table.call_table import (
    COUNT,
    CallNames,
    concatenated_columns,
    known_streams,
    named_columns,
    typical_of,
    with_times,
)

# columns in which calls must be equal to count as one distinct call
KEYS = (
    *("thread", "signature", "scope", "stream", "perturbed", "page_faults", "slow_memory_ns"),
    *("device_ns", "duration_ns"),
)
# names of the columns for the start of the first call and for its position in the file
FIRST, PLACE = "start_ns", "place"
BATCH = 1 << 18  # number of calls that are aggregated at a time
WIDEST = 1 << 62
TIMES = ("slow_memory_ns", "device_ns", "duration_ns")
MOST_ROWS = 1 << 18  # maximum number of distinct calls for which exact times are compared
# number of leading bits of a time that are compared if there are more distinct calls: initially, and at least
FINEST, COARSEST = 10, 3


class DistinctCalls:
    """Counts equal calls; calls with different start times or storages can be equal."""

    def __init__(self) -> None:
        self._pieces: list[list[Integers]] = []
        self._pending = 0
        self._places = 0
        self._sums: list[pd.DataFrame] = []
        # number of leading bits of a time that count; None for all
        self._bits: int | None = None

    def add(self, block: CallBlock) -> None:
        calls = len(block)
        self._pieces.append(
            [
                np.full(calls, block.thread),
                block.signature,
                block.scope,
                or_all(block.streams, calls, 0),
                perturbed_flags(block.perturbed, len(block)).astype(np.int64),
                by_call(block.page_faults, calls),
                by_call(block.slow_memory, calls),
                np.maximum(or_all(block.device_ns, calls, -1), -1),
                block.duration_ns,
                block.start_ns,
            ]
        )
        self._pending += calls
        if self._pending >= BATCH:
            self._sum_up()

    def table(self, names: CallNames) -> pd.DataFrame:
        rows = self.rows()
        signature, scope, thread = (rows[name].to_numpy() for name in ("signature", "scope", "thread"))
        table = pd.DataFrame(
            named_columns(signature, scope, thread, names) | {FIRST: rows[FIRST], "duration_ns": rows["duration_ns"]}
        )
        device_ns = rows["device_ns"].astype(float)
        table["device_ns"] = device_ns.where(device_ns >= 0)
        table["stream"] = known_streams(rows["stream"].to_numpy(), table["device_ns"].isna().to_numpy())
        table["perturbed"] = rows["perturbed"].astype(bool)
        table["page_faults"] = rows["page_faults"]
        table["slow_memory_ns"] = rows["slow_memory_ns"]
        table[COUNT] = rows[COUNT]
        return with_times(table, typical_of(table))

    def rows(self) -> pd.DataFrame:
        self._sum_up()
        while len(self._sums) > 1:
            self._join()
        return self._sums[0].sort_values([FIRST, PLACE], ignore_index=True)

    def _sum_up(self) -> None:
        columns = [np.concatenate(pieces) for pieces in zip(*self._pieces, strict=True)]
        self._pieces.clear()
        calls, self._pending = self._pending, 0
        if not columns:
            columns = [np.empty(0, dtype=np.int64)] * (len(KEYS) + 1)
        *keys, starts = columns
        places = np.arange(self._places, self._places + calls)
        self._places += calls
        self._sums.append(_distinct(keys, starts, places, np.ones(calls, dtype=np.int64), self._bits))
        # a batch is merged with batches of similar length, so that each row is merged only a few times
        while len(self._sums) > 1 and len(self._sums[-2]) < 2 * len(self._sums[-1]):
            self._join()

    def _join(self) -> None:
        both = pd.concat([self._sums.pop(-2), self._sums.pop()])
        joined = _distinct_rows(both, self._bits)
        while len(joined) > MOST_ROWS and self._bits != COARSEST:
            self._bits = FINEST if self._bits is None else self._bits - 1
            joined = _distinct_rows(joined, self._bits)
        self._sums.append(joined)


def _distinct_rows(table: pd.DataFrame, bits: int | None) -> pd.DataFrame:
    starts, places, counts = (table[name].to_numpy() for name in (FIRST, PLACE, COUNT))
    return _distinct([table[name].to_numpy() for name in KEYS], starts, places, counts, bits)


def _distinct(
    keys: Sequence[Integers], starts: Integers, places: Integers, counts: Integers, bits: int | None
) -> pd.DataFrame:
    order = np.argsort(starts, kind="stable")
    distinguishing_keys = [_rounded(key, bits) if name in TIMES else key for name, key in zip(KEYS, keys, strict=True)]
    codes, _ = pd.factorize(_packed(distinguishing_keys)[order])
    number = int(codes.max(initial=-1)) + 1
    # the last write to a row is the one of the first call
    first = np.empty(number, dtype=np.int64)
    first[codes[::-1]] = order[::-1]
    table = {name: key[first] for name, key in zip(KEYS, keys, strict=True)}
    summed = np.bincount(codes, weights=counts[order], minlength=number).astype(np.int64)
    if bits is not None:
        for name in TIMES:
            off = (keys[KEYS.index(name)][order] - table[name][codes]) * counts[order]
            table[name] += np.rint(np.bincount(codes, weights=off, minlength=number) / summed).astype(np.int64)
    return pd.DataFrame(table | {FIRST: starts[first], PLACE: places[first], COUNT: summed})


def _rounded(times: Integers, bits: int | None) -> Integers:
    # the mean of times with the same truncated value has this truncated value, too
    if bits is None:
        return times
    _, exponents = np.frexp(times)
    dropped = np.maximum(exponents - bits, 0).astype(np.int64)
    rounded: Integers = (times >> dropped) << dropped
    return rounded


def _packed(keys: Sequence[Integers]) -> Integers:
    if not len(keys[0]):
        return keys[0]
    packed, width = np.zeros(len(keys[0]), dtype=np.int64), 1
    for key in keys:
        least, most = int(key.min()), int(key.max())
        if (most - least + 1) * width >= WIDEST:
            packed, width = _dense(packed)
            if (most - least + 1) * width >= WIDEST:
                key, most = _dense(key)
                least, most = 0, most - 1
        if most > least:
            packed = packed * (most - least + 1) + (key - least)
            width *= most - least + 1
    return packed


def _dense(key: Integers) -> tuple[Integers, int]:
    codes, unique = pd.factorize(key)
    return np.asarray(codes, dtype=np.int64), len(unique)


def distinct_calls(source: Iterable[CallBlock], names: CallNames) -> pd.DataFrame:
    distinct = DistinctCalls()
    for block in source:
        distinct.add(block)
    return distinct.table(names)


# number of blocks by which a call may come late: a call is late if it starts before the latest start known then
NEAR = 32
PART_CALLS = 1 << 16  # number of calls that are sorted at a time
START, NUMBER = "start_ns", "number"


@dataclass(frozen=True, slots=True)
class Rows:
    columns: dict[str, np.ndarray[Any, Any]]
    storages: Integers

    def __len__(self) -> int:
        return len(self.columns[NUMBER])

    def take(self, places: Integers) -> Rows:
        tensors = self.columns["tensors"]
        counts = tensors[places]
        firsts = (np.cumsum(tensors) - tensors)[places] - (np.cumsum(counts) - counts)
        storages = self.storages[np.repeat(firsts, counts) + np.arange(counts.sum())]
        return Rows({name: column[places] for name, column in self.columns.items()}, storages)


def ordered_rows(source: CallSource) -> Iterator[Rows]:
    """Yield all calls sorted by start, in parts."""
    if source.is_kept:
        rows = _rows(list(source))
        yield _numbered(rows.take(np.argsort(rows.columns[START], kind="stable")), 0)
        return
    late, _ = _in_order(_joined([*_late_rows(source)]), None)
    pending: list[Rows] = []
    number = 0
    for rows, bound_ns in _near_rows(source):
        pending.append(rows)
        due, rest = _in_order(_joined(pending), bound_ns)
        end = len(late) if bound_ns is None else int(np.searchsorted(late.columns[START], bound_ns, side="right"))
        if end:
            due, _ = _in_order(_joined([late.take(np.arange(end)), due]), None)
            late = late.take(np.arange(end, len(late)))
        pending = [rest]
        if len(due):
            yield _numbered(due, number)
            number += len(due)


class _Lateness:
    def __init__(self) -> None:
        self._newest_ns = np.iinfo(np.int64).min
        self._bounds = deque([self._newest_ns] * NEAR, maxlen=NEAR)

    @property
    def bound_ns(self) -> int:
        return int(self._bounds[0])

    def flags(self, block: CallBlock) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        flags = block.start_ns < self.bound_ns
        self._newest_ns = max(self._newest_ns, int(block.start_ns.max()))
        self._bounds.append(self._newest_ns)
        return flags


def _late_rows(source: Iterable[CallBlock]) -> Iterator[Rows]:
    lateness, number = _Lateness(), 0
    for block in source:
        flags = lateness.flags(block)
        if flags.any():
            rows = _rows([selected(block, flags)])
            yield Rows(rows.columns | {NUMBER: number + np.flatnonzero(flags)}, rows.storages)
        number += len(block)


def _near_rows(source: Iterable[CallBlock]) -> Iterator[tuple[Rows, int | None]]:
    # each part comes with a time in ns before which no call of a later part starts; None for the last part
    lateness, number = _Lateness(), 0
    blocks: list[CallBlock] = []
    numbers: list[Integers] = []
    size = 0
    for block in source:
        near = ~lateness.flags(block)
        blocks.append(selected(block, near))
        numbers.append(number + np.flatnonzero(near))
        number += len(block)
        size += len(block)
        if size >= PART_CALLS:
            yield _with_numbers(_rows(blocks), numbers), lateness.bound_ns
            blocks, numbers, size = [], [], 0
    yield _with_numbers(_rows(blocks), numbers), None


def _with_numbers(rows: Rows, numbers: Sequence[Integers]) -> Rows:
    return Rows(rows.columns | {NUMBER: np.concatenate([np.empty(0, dtype=np.int64), *numbers])}, rows.storages)


def _rows(blocks: Sequence[CallBlock]) -> Rows:
    columns = concatenated_columns(blocks)
    storages = [block.storages for block in blocks if len(block.tensors)]
    number = np.arange(len(columns[START]))
    return Rows(columns | {NUMBER: number}, np.concatenate([np.empty(0, dtype=np.int64), *storages]))


def _joined(parts: Sequence[Rows]) -> Rows:
    if not parts:
        return _rows([])
    columns = {name: np.concatenate([part.columns[name] for part in parts]) for name in parts[0].columns}
    return Rows(columns, np.concatenate([part.storages for part in parts]))


def _in_order(rows: Rows, bound_ns: int | None) -> tuple[Rows, Rows]:
    starts = rows.columns[START]
    order = np.lexsort((rows.columns[NUMBER], starts))
    end = len(order) if bound_ns is None else int(np.searchsorted(starts[order], bound_ns, side="right"))
    return rows.take(order[:end]), rows.take(order[end:])


def _numbered(rows: Rows, first: int) -> Rows:
    return Rows(rows.columns | {NUMBER: first + np.arange(len(rows))}, rows.storages)
