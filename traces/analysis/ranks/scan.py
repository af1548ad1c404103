"""Reader of the collectives in the trace of one rank. It needs memory for each collective, but not for other calls.

A collective begins when it is called. Its end is found in one of three ways. A program that waits at once continues
with its next call. `wait_tensor` marks the end. Otherwise the collective has ended when the first call that uses its
results starts, and at most the idle time right before that call was spent waiting.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from opgrip.traces.analysis.ranks.collectives import Collective, collective_of, is_wait
from opgrip.traces.codec.call_blocks import CallBlock
from opgrip.traces.schema.records import Signature
from opgrip.traces.table.call_source import NumberSet

Integers = NDArray[np.int64]
COLUMNS = ("signature", "start_ns", "launched_ns", "wait_ns", "end_ns")
UNKNOWN = int(np.iinfo(np.int64).min)  # placeholder for an unknown time; known times may be negative
MOST_PENDING = 1 << 12  # maximum number of results of collectives that wait for a call which uses them
# operators that return a view without reading values, and so do not wait for a collective
_VIEWS = frozenset(
    f"aten.{name}"
    for name in (
        *("view", "_unsafe_view", "as_strided", "slice", "select", "split", "split_with_sizes", "chunk", "unbind", "t"),
        *("detach", "alias", "narrow", "transpose", "permute", "expand", "unsqueeze", "squeeze", "reshape", "flatten"),
        *("_reshape_alias", "set_", "resize_"),
    )
)


@dataclass(slots=True)
class Events:
    """Calls of collectives by one rank, in call order; all arrays are (N,).

    signature : number of the call's signature
    ordinal : number of earlier collectives in the same group
    start_ns, launched_ns : start and end of the call
    wait_ns, end_ns : times at which the program began to wait for the collective and continued, or `UNKNOWN`
    """

    signature: Integers
    ordinal: Integers
    start_ns: Integers
    launched_ns: Integers
    wait_ns: Integers
    end_ns: Integers

    def __len__(self) -> int:
        return len(self.signature)


@dataclass(slots=True)
class _Thread:
    last_end_ns: int = UNKNOWN  # end of the thread's last call that is not a view
    open_event: int | None = None  # collective for whose end the program waits until the thread's next call


@dataclass(slots=True)
class SignatureKinds:
    """Signatures of a trace that are collectives, waits for collectives, or views, by number."""

    collectives: dict[int, Collective] = field(default_factory=dict)
    numbers: NumberSet = field(default_factory=NumberSet)
    waits: NumberSet = field(default_factory=NumberSet)
    views: NumberSet = field(default_factory=NumberSet)

    def add(self, record: Signature) -> None:
        collective = collective_of(record)
        if collective is not None:
            self.collectives[record.number] = collective
            self.numbers.put(record.number)
        elif is_wait(record):
            self.waits.put(record.number)
        elif record.op.rpartition(".")[0] in _VIEWS:
            self.views.put(record.number)


class Scan:
    """Collects the collectives of one rank from the blocks of calls in its trace."""

    def __init__(self, kinds: SignatureKinds) -> None:
        self._kinds = kinds
        self._columns = {name: array("q") for name in COLUMNS}
        self._threads: dict[int, _Thread] = {}
        # index of the event by storage of a collective's result, and the reverse
        self._pending: dict[int, int] = {}
        self._storages_of: dict[int, list[int]] = {}

    def add(self, block: CallBlock) -> None:
        """Add a block of calls of one thread; blocks are added in trace order."""
        if not len(block):
            return
        thread = self._threads.setdefault(block.thread, _Thread())
        if thread.open_event is not None:
            launched = self._columns["launched_ns"][thread.open_event]
            self._columns["end_ns"][thread.open_event] = _resumed_ns(block, 0, launched)
            thread.open_event = None
        firsts = np.cumsum(block.tensors) - block.tensors if len(block.tensors) else None
        places = np.flatnonzero(self._kinds.numbers.flags(block.signature)).tolist()
        for before, place in zip([0, *(place + 1 for place in places)], [*places, len(block)], strict=True):
            # a collective may take results of an earlier one
            self._settle(block, before, min(place + 1, len(block)), firsts, thread)
            if place < len(block):
                self._begin(block, place, firsts, thread)
        thread.last_end_ns = self._idle_since(block, len(block), thread, UNKNOWN)

    def events(self) -> Events:
        """Return all collectives sorted by start, because several threads of a rank may use the same group."""
        columns = {name: np.array(column, dtype=np.int64) for name, column in self._columns.items()}
        order = np.argsort(columns["start_ns"], kind="stable")
        columns = {name: column[order] for name, column in columns.items()}
        numbers: dict[str, int] = {}
        group_of = {
            number: numbers.setdefault(item.group, len(numbers)) for number, item in self._kinds.collectives.items()
        }
        group = np.array([group_of[number] for number in columns["signature"].tolist()], dtype=np.int64)
        ordinal = np.empty_like(group)
        by_group = np.argsort(group, kind="stable")
        sizes = np.bincount(group, minlength=len(numbers))
        ordinal[by_group] = np.arange(len(group)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return Events(ordinal=ordinal, **columns)

    def _begin(self, block: CallBlock, place: int, firsts: Integers | None, thread: _Thread) -> None:
        number = int(block.signature[place])
        collective = self._kinds.collectives[number]
        event = len(self._columns["signature"])
        start = int(block.start_ns[place])
        launched = start + int(block.duration_ns[place])
        wait, end = UNKNOWN, UNKNOWN
        if collective.waits:
            wait = launched
            if place + 1 < len(block):
                end = _resumed_ns(block, place + 1, launched)
            else:
                thread.open_event = event
        elif firsts is not None:
            storages = block.storages[firsts[place] : firsts[place] + block.tensors[place]]
            for storage in storages[storages >= 0].tolist():
                self._pending[storage] = event
                self._storages_of.setdefault(event, []).append(storage)
            while len(self._pending) > MOST_PENDING:
                self._forget(self._pending[next(iter(self._pending))])
        for name, value in zip(COLUMNS, (number, start, launched, wait, end), strict=True):
            self._columns[name].append(value)

    def _settle(self, block: CallBlock, before: int, stop: int, firsts: Integers | None, thread: _Thread) -> None:
        if not self._pending or firsts is None or before >= stop:
            return
        first = int(firsts[before])
        hits = self._hits(block.storages[first : int(firsts[stop - 1] + block.tensors[stop - 1])])
        idle_place = idle_ns = UNKNOWN
        for place, storage in self._takers(block, before, stop, firsts, first, hits):
            event = self._pending.get(storage)
            start = int(block.start_ns[place])
            if event is None or start < self._columns["start_ns"][event]:
                continue
            launched = self._columns["launched_ns"][event]
            if int(block.signature[place]) in self._kinds.waits:
                wait, end = start, start + int(block.duration_ns[place])
            else:
                if place != idle_place:
                    idle_place, idle_ns = place, self._idle_since(block, place, thread, start)
                wait, end = min(idle_ns, start), start
            self._columns["wait_ns"][event] = max(wait, launched)
            self._columns["end_ns"][event] = max(end, launched)
            self._forget(event)

    def _hits(self, storages: Integers) -> Integers:
        if len(storages) < len(self._pending):
            return np.array([place for place, item in enumerate(storages.tolist()) if item in self._pending], np.int64)
        return np.flatnonzero(np.isin(storages, list(self._pending)))

    def _takers(
        self, block: CallBlock, before: int, stop: int, firsts: Integers, first: int, hits: Integers
    ) -> Iterator[tuple[int, int]]:
        calls = np.searchsorted(firsts[before:stop], hits + first, side="right") - 1 + before
        for place, hit in zip(calls.tolist(), hits.tolist(), strict=True):
            if int(block.signature[place]) not in self._kinds.views:
                yield place, int(block.storages[first + hit])

    def _idle_since(self, block: CallBlock, place: int, thread: _Thread, start_ns: int) -> int:
        # views do not count, because DDP waits, then makes views of the results and copies these
        for before in range(place - 1, -1, -1):
            if int(block.signature[before]) not in self._kinds.views:
                return int(block.start_ns[before] + block.duration_ns[before])
        return start_ns if thread.last_end_ns == UNKNOWN else thread.last_end_ns

    def _forget(self, event: int) -> None:
        for storage in self._storages_of.pop(event):
            # another collective may have reused the storage since
            if self._pending.get(storage) == event:
                del self._pending[storage]


def _resumed_ns(block: CallBlock, place: int, launched_ns: int) -> int:
    # the start of call `place`; if that began before the launch ended, the end of the call or of the launch
    start, duration = int(block.start_ns[place]), int(block.duration_ns[place])
    return start if start >= launched_ns else max(start + duration, launched_ns)
