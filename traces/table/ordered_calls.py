"""The calls of a long trace in the order in which they started, a part at a time.

A file has calls in the order in which they ended, and the blocks of several threads between each other. So a call can
start long before those that stand before it: a function that is around them. Such calls, which are few, are found in a
first reading; all others are in order within a few blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from opgrip.traces.codec.call_blocks import CallBlock, Integers
from opgrip.traces.table.call_source import CallSource, selected
from opgrip.traces.table.call_table import concatenated_columns

NEAR = 32
"""A call is late that starts before what the block so many blocks before it held."""
BATCH = 1 << 16
"""Calls that are put into order at a time."""
START, NUMBER = "start_ns", "number"


@dataclass(frozen=True, slots=True)
class Rows:
    """Some calls.

    Attributes
    ----------
    columns : those of `call_table.COLUMNS`, and `number`: the place among all calls, in the file and then, of rows that
        are in order, by their start
    storages : of the tensors of the rows, one row after the other
    """

    columns: dict[str, np.ndarray[Any, Any]]
    storages: Integers

    def __len__(self) -> int:
        return len(self.columns[NUMBER])

    def take(self, places: Integers) -> Rows:
        """The rows of these places, in their order."""
        tensors = self.columns["tensors"]
        counts = tensors[places]
        firsts = (np.cumsum(tensors) - tensors)[places] - (np.cumsum(counts) - counts)
        storages = self.storages[np.repeat(firsts, counts) + np.arange(counts.sum())]
        return Rows({name: column[places] for name, column in self.columns.items()}, storages)


def ordered_rows(source: CallSource) -> Iterator[Rows]:
    """All calls, in parts that follow each other; of calls that start at once, those first that stand first."""
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
    """Tells late calls from the others, one block after the other."""

    def __init__(self) -> None:
        self._newest_ns = np.iinfo(np.int64).min
        self._bounds = deque([self._newest_ns] * NEAR, maxlen=NEAR)

    @property
    def bound_ns(self) -> int:
        """When the calls of all later blocks start at the earliest, but for the late ones."""
        return int(self._bounds[0])

    def flags(self, block: CallBlock) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Of each call of the next block, whether it is late."""
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
    """The rows that are not late, each time with when all later ones start at the earliest; None behind the last."""
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
        if size >= BATCH:
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
    """The rows that start until then, in order, and the others; None for all."""
    starts = rows.columns[START]
    order = np.lexsort((rows.columns[NUMBER], starts))
    end = len(order) if bound_ns is None else int(np.searchsorted(starts[order], bound_ns, side="right"))
    return rows.take(order[:end]), rows.take(order[end:])


def _numbered(rows: Rows, first: int) -> Rows:
    return Rows(rows.columns | {NUMBER: first + np.arange(len(rows))}, rows.storages)
