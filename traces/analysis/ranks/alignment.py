"""Collectives of several ranks, and alignment of the ranks' clocks by the collectives that they share."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opgrip.traces.analysis.ranks.collectives import FROM_ROOT, TO_ROOT, Collective, collective_of, is_wait
from opgrip.traces.codec.call_blocks import CallBlock
from opgrip.traces.io.reader import TraceReader
from opgrip.traces.schema.json_values import LATEST_NS
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

    ordinal : number of earlier collectives in the same group
    start_ns, launched_ns : start and end of the call
    wait_ns, end_ns : times at which the program began to wait for the collective, and continued after it; or `UNKNOWN`
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
    def __init__(self, kinds: SignatureKinds) -> None:
        self._kinds = kinds
        self._columns = {name: array("q") for name in COLUMNS}
        self._threads: dict[int, _Thread] = {}
        # index of the event by storage of a collective's result, and the reverse
        self._pending: dict[int, int] = {}
        self._storages_of: dict[int, list[int]] = {}

    def add(self, block: CallBlock) -> None:
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


FEWEST = 3  # minimum number of shared collectives for comparing two clocks


@dataclass(frozen=True, slots=True)
class Clock:
    """Difference between the clock of one process and the clock of the merged trace.

    offset_ns : correction of the process's times, in addition to the difference of the captures' start times
    measured_ns : offset derived from the ends of collectives; None if it was not measured
    spread_ns : difference between the 10th and 90th percentile of the offsets of single collectives
    """

    offset_ns: int = 0
    measured_ns: int | None = None
    spread_ns: int | None = None
    collectives: int = 0

    def as_json(self) -> dict[str, int | None]:
        return {name: getattr(self, name) for name in self.__slots__}


def align(meetings: Meetings, processes: int) -> list[Clock]:
    clocks = [Clock() for _ in range(processes)]
    pairs = _Pairs(meetings)
    aligned: set[int] = set()
    for origin in range(processes):
        if origin in aligned:
            continue
        queue = deque([origin])
        aligned.add(origin)
        while queue:
            process = queue.popleft()
            for other in sorted(pairs.met_by(process) - aligned):
                clock = pairs.compare(process, other)
                if clock is None:
                    continue
                aligned.add(other)
                queue.append(other)
                base_ns = clocks[process].offset_ns
                measured_ns = base_ns + (clock.measured_ns or 0)
                clocks[other] = replace(clock, offset_ns=base_ns + clock.offset_ns, measured_ns=measured_ns)
    return clocks


class _Pairs:
    def __init__(self, meetings: Meetings) -> None:
        symmetric = [kind not in (*FROM_ROOT, *TO_ROOT) for kind in meetings.kinds]
        number = meetings.number
        chosen = np.array(symmetric, dtype=np.bool_)[meetings.kind] & (meetings.end_ns != UNKNOWN)
        self._rows: dict[int, tuple[Integers, Integers, Integers, NDArray[np.bool_]]] = {}
        at_once = meetings.wait_ns == meetings.launched_ns
        for process in np.unique(meetings.process[chosen]).tolist():
            own = chosen & (meetings.process == process)
            columns = (number[own], meetings.start_ns[own], meetings.end_ns[own], at_once[own])
            self._rows[process] = columns
        self._members: Mapping[int, set[int]] = self._together(meetings, chosen)

    def _together(self, meetings: Meetings, chosen: NDArray[np.bool_]) -> dict[int, set[int]]:
        members: dict[int, set[int]] = {process: set() for process in self._rows}
        pairs = np.unique(np.column_stack([meetings.group[chosen], meetings.process[chosen]]), axis=0)
        for group in np.split(pairs[:, 1], np.flatnonzero(np.diff(pairs[:, 0])) + 1):
            own = set(group.tolist())
            for process in own:
                members[process] |= own - {process}
        return members

    def met_by(self, process: int) -> set[int]:
        return set(self._members.get(process, ()))

    def compare(self, process: int, other: int) -> Clock | None:
        number, start, end, at_once = self._rows[process]
        number_2, start_2, end_2, at_once_2 = self._rows[other]
        common, place, place_2 = np.intersect1d(number, number_2, assume_unique=True, return_indices=True)
        if len(common) < FEWEST:
            return None
        start, end, at_once = start[place], end[place], at_once[place]
        start_2, end_2, at_once_2 = start_2[place_2], end_2[place_2], at_once_2[place_2]
        least, most = int((start - end_2).max()), int((end - start_2).min())
        sure = at_once & at_once_2
        # results that were used late do not show when the collective ended
        sure = sure if sure.sum() >= FEWEST else np.ones_like(sure)
        differences = (end - end_2)[sure]
        low, middle, high = np.percentile(differences, (10, 50, 90))
        measured = round(float(middle))
        if least <= most:
            measured = min(max(measured, least), most)
        spread = round(float(high - low))
        agree = least <= 0 <= most and abs(measured) <= spread
        return Clock(0 if agree else measured, measured, spread, len(common))


MOST = 1 << 12  # maximum number of collectives of a group that are compared


def rank_of(header: Mapping[str, Any]) -> int | None:
    rank = header.get("rank")
    is_rank = type(rank) is int and 0 <= rank < 1 << 31 and "parent_pid" not in header
    return rank if is_rank else None


def is_ambiguous(ranks: Sequence[int | None]) -> bool:
    numbers = [rank for rank in ranks if rank is not None]
    return len(set(numbers)) < len(numbers)


def measure_clocks(
    paths: Sequence[Path], headers: Sequence[Mapping[str, Any]], shifts: Sequence[int], unbounded: bool = False
) -> list[Clock]:
    """Add `shifts`, in ns, to the times of each process, and return the differences that remain between the clocks."""
    events: dict[int, Events] = {}
    kinds = [SignatureKinds() for _ in paths]
    ranks = [rank_of(header) for header in headers]
    if is_ambiguous(ranks):
        return [Clock() for _ in paths]
    for process, (path, shift_ns) in enumerate(zip(paths, shifts, strict=True)):
        if ranks[process] is None or abs(shift_ns) > LATEST_NS:
            continue
        scan = Scan(kinds[process])
        for record in TraceReader(path, unbounded).columns():
            if isinstance(record, Signature):
                kinds[process].add(record)
            elif isinstance(record, CallBlock):
                scan.add(record)
        events[process] = thinned(shifted(scan.events(), shift_ns), kinds[process])
    collectives = {process: kinds[process].collectives for process in events}
    clocks = align(match(events, collectives, ranks), len(paths))
    # processes that a rank forked share its clock
    offsets = {rank: clock.offset_ns for rank, clock in zip(ranks, clocks, strict=True) if rank is not None}
    for process, header in enumerate(headers):
        if ranks[process] is None and type(header.get("rank")) is int:
            clocks[process] = Clock(offsets.get(header["rank"], 0))
    return clocks


def thinned(events: Events, kinds: SignatureKinds, most: int = MOST) -> Events:
    groups: dict[str, int] = {}
    numbers = [groups.setdefault(kinds.collectives[number].group, len(groups)) for number in events.signature.tolist()]
    counts = np.bincount(numbers, minlength=1)[numbers] if numbers else np.empty(0, dtype=np.int64)
    # the smallest power of two that leaves at most this many
    stride = 1 << np.ceil(np.log2(np.maximum(counts / most, 1))).astype(np.int64)
    chosen = events.ordinal % stride == 0
    return Events(**{name: getattr(events, name)[chosen] for name in events.__slots__})


def shifted(events: Events, shift_ns: int) -> Events:
    names = ("start_ns", "launched_ns", "wait_ns", "end_ns")
    moved = {name: getattr(events, name) + shift_ns for name in names}
    for name in ("wait_ns", "end_ns"):
        moved[name][getattr(events, name) == UNKNOWN] = UNKNOWN
    return replace(events, **moved)


@dataclass(frozen=True, slots=True)
class Meetings:
    """Calls of collectives by all ranks, sorted by collective: N calls of M collectives. Arrays are (N,) unless stated.

    first : (M,), index of each collective's first call
    root : index of the process that sends to, or receives from, all others; -1 if there is none or it is unknown
    """

    kinds: tuple[str, ...]
    groups: tuple[str, ...]
    first: Integers
    process: Integers
    kind: Integers
    group: Integers
    root: Integers
    signature: Integers
    start_ns: Integers
    launched_ns: Integers
    wait_ns: Integers
    end_ns: Integers
    unmatched: int

    def __len__(self) -> int:
        return len(self.first)

    @property
    def number(self) -> Integers:
        return np.repeat(np.arange(len(self.first)), self.sizes)

    @property
    def sizes(self) -> Integers:
        return np.diff(np.append(self.first, len(self.process)))


def match(
    events: Mapping[int, Events], collectives: Mapping[int, Mapping[int, Collective]], ranks: Sequence[int | None]
) -> Meetings:
    """Return the collectives that at least two processes took part in."""
    kinds: dict[str, int] = {}
    groups: dict[str, int] = {}
    roots = {rank: place for place, rank in enumerate(ranks) if rank is not None}
    pieces: list[Integers] = []
    for process, own in events.items():
        if not len(own):
            continue
        by_signature = collectives[process]
        table = {
            number: (
                kinds.setdefault(item.kind, len(kinds)),
                groups.setdefault(item.group, len(groups)),
                -1 if item.root is None else roots.get(item.root, -1),
            )
            for number, item in by_signature.items()
        }
        facts = np.array([table[number] for number in own.signature.tolist()], dtype=np.int64)
        columns = (own.ordinal, own.signature, own.start_ns, own.launched_ns, own.wait_ns, own.end_ns)
        pieces.append(np.column_stack([np.full(len(own), process), facts, *columns]))
    rows = np.concatenate(pieces) if pieces else np.empty((0, 10), dtype=np.int64)
    rows = rows[np.lexsort((rows[:, 0], rows[:, 4], rows[:, 2]))]
    total = len(rows)
    rows = rows[_agreeing(rows)]
    new = np.any(np.diff(rows[:, [2, 4]], axis=0) != 0, axis=1)
    first = np.flatnonzero(np.append(True, new)) if len(rows) else np.empty(0, dtype=np.int64)
    # the ordinal is no longer needed
    names = ("process", "kind", "group", "root", "signature", "start_ns", "launched_ns", "wait_ns", "end_ns")
    columns_by_name = dict(zip(names, np.ascontiguousarray(np.delete(rows, 4, axis=1).T), strict=True))
    return Meetings(tuple(kinds), tuple(groups), first, unmatched=total - len(rows), **columns_by_name)


def _agreeing(rows: Integers) -> NDArray[np.bool_]:
    # of a group, the calls before the first collective whose members called different kinds
    if not len(rows):
        return np.empty(0, dtype=np.bool_)
    kind, group, ordinal = rows[:, 1], rows[:, 2], rows[:, 4]
    first = np.flatnonzero(np.append(True, (np.diff(group) != 0) | (np.diff(ordinal) != 0)))
    sizes = np.diff(np.append(first, len(rows)))
    differs = np.maximum.reduceat(kind, first) != np.minimum.reduceat(kind, first)
    good = sizes > 1
    stop = np.full(int(group.max()) + 1, np.iinfo(np.int64).max)
    np.minimum.at(stop, group[first][differs], ordinal[first][differs])
    return np.repeat(good & (ordinal[first] < stop[group[first]]), sizes)
