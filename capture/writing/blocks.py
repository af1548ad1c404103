"""Conversion of collected calls to records of the trace."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count, islice

import numpy as np
from numpy.typing import NDArray

from opgrip.capture.recording.observations import SiteTimes
from opgrip.capture.recording.recorder import Recorder
from opgrip.capture.recording.scope_table import FIRST_PAIR
from opgrip.capture.recording.thread_mode import UNPAIRED, ThreadCalls, ThreadMode
from opgrip.capture.signatures.predictions import CallNode
from opgrip.capture.timing.kernel_times import FOREVER_NS
from opgrip.capture.timing.page_faults import FEWEST, NONE_OPEN, Runs, runs_of
from opgrip.traces.codec.call_blocks import perturbed_flags
from opgrip.traces.schema.records import NO_STORAGE, Calls, Entered, Record, Thread

BLOCK = 1024  # maximum number of calls in one record
COLUMNS = 4  # number of integers that a dispatch mode stores per call, followed by the storages of the call's tensors
INTERRUPTED_NS = 1_000_000  # minimum duration of calls that other processes may have interrupted: about a time slice
MOST_SEQUENCES = 1 << 18  # maximum number of forward calls that wait for their backward calls
UNKNOWN = -1  # placeholder for the signature of a (signature, scope) pair that was not looked up yet


class Blocks:
    def __init__(self, recorder: Recorder, looks: bool = True) -> None:
        self.recorder = recorder
        self._looks = looks
        self._numbers = count()
        self.calls = 0
        self.perturbed = 0
        self.marks: Counter[int] = Counter()
        self._place_times = SiteTimes()
        self._threads: dict[int, int] = {}
        self.newest = -1
        self.is_contended = False
        self.duration_ns = 0
        # calls without marks: taken and not yet in `calls`; by thread, integers counted in its rows and the calls in
        # them. The lock keeps them consistent with the rows.
        self._in_flight = 0
        self._counted: dict[int, tuple[int, int]] = {}
        self._counting = threading.RLock()
        # by thread: last sequence number; scope of the forward call that made each node; start and end of the last call
        self._sequence: dict[int, int] = {}
        self._forward: dict[int, dict[int, int]] = {}
        self._last: dict[int, tuple[int, int]] = {}
        self._pairs: dict[int, tuple[int, int, int]] = {}
        self._first_pair, self._described = FIRST_PAIR, np.empty((0, 5), dtype=np.int64)

    def take(self, room: int | None = None) -> list[ThreadCalls]:
        """Remove and return the calls of all threads, except calls of graphs.

        room : maximum number of calls to take in total, or None for all
        """
        blocks: list[ThreadCalls] = []
        threads: list[ThreadCalls] = []
        # all calls of these captures are in the rows
        ended = [capture for capture in self.recorder.templates.captures if capture.ended_ns < FOREVER_NS]
        remaining_calls = room
        # Take the latest threads first: their backward calls belong to forward calls of earlier threads, which are
        # taken afterwards.
        for mode in reversed(self.recorder.threads.all):
            # read this before the rows: a call that ends in between is then in the rows
            open_since_ns = min((start for start, _ in self._running(mode)), default=NONE_OPEN)
            count = len(mode.rows)
            whole, used = self._split(mode, mode.rows[:count], remaining_calls, open_since_ns)
            threads[:0] = [whole]
            own, ran = self._own(whole), self._without_graphs(whole)
            with self._counting:
                integers, calls = self._counted.pop(mode.number, (0, 0))
                del mode.rows[:used]
                self._in_flight += own if ran is whole else self._own(ran)
                if integers > used:
                    self._counted[mode.number] = integers - used, calls - own
            if self.recorder.budget is not None:
                self.recorder.budget.calls += len(whole)
            if len(whole):
                self._last[mode.number] = int(whole.calls[-1, 1]), int(whole.calls[-1, 2])
            if remaining_calls is not None:
                remaining_calls -= len(ran)
            blocks[:0] = [ran.part(first, min(first + BLOCK, len(ran))) for first in range(0, len(ran), BLOCK)]
        # collect all forward calls before the first backward call is paired
        for block in threads:
            self._remember_forward(block)
        for capture in ended:
            self.recorder.templates.captures.remove(capture)
            graph = capture.record(self._names_of)
            self.recorder.pending.add(graph)
            if self.recorder.kernels is not None and capture.parts:
                self.recorder.kernels.graphs.note(graph, capture.written())
        return blocks

    def _own(self, calls: ThreadCalls) -> int:
        return len(calls) - int(self._describe(calls.calls[:, 0])[:, 2].sum())

    def _without_graphs(self, whole: ThreadCalls) -> ThreadCalls:
        for capture in reversed(self.recorder.templates.captures):
            is_for_graph = capture.contains(whole.mode, whole.calls[:, 1])
            is_for_graph &= self._describe(whole.calls[:, 0])[:, 4] > 0
            if is_for_graph.any():
                part, whole = whole.selected(is_for_graph), whole.selected(~is_for_graph)
                starts = part.calls[:, 1].tolist()
                part.mode.faults.take(starts)
                part.mode.device.forget(starts)
                capture.parts.append(part)
        return whole

    def _names_of(self, calls: NDArray[np.int64]) -> tuple[list[int], list[int]]:
        signatures, scopes = self._describe(calls[:, 0])[:, :2].T
        return signatures.tolist(), self._pair_with_forward(scopes, calls[:, 3])

    def records(self, block: ThreadCalls, learning: bool = False) -> Iterator[Record]:
        """Yield the records for calls of one thread that `take` returned.

        learning : True to yield no record of the calls themselves
        """
        mode, table = block.mode, block.calls
        signatures, own_scopes, is_mark, _, on_accelerator = self._describe(table[:, 0]).T
        signature = signatures.tolist()
        if self._looks:
            self.recorder.observations.count(signature, self.recorder.threads.all)
        scopes = self._pair_with_forward(own_scopes, table[:, 3])
        yield from self._thread(mode)
        starts = table[:, 1].tolist()
        start, duration = table[:, 1] - self.recorder.started_ns, table[:, 2] - table[:, 1]
        counted = mode.faults.take(starts)
        for place, call in counted.items():
            start[place], duration[place] = call.start_ns - self.recorder.started_ns, call.duration_ns
        began = start + self.recorder.started_ns
        perturbed = mode.own_work.take(began, began + duration, block.open_since_ns)
        page_faults = [(place, call.faults) for place, call in counted.items() if call.faults >= FEWEST]
        with self.recorder.graphs.question() as may_ask:
            device_ns = mode.device.times_ns(starts, may_ask)
        streams = mode.device.streams(starts)
        if self._looks:
            # on an accelerator, the time on the host does not depend on values
            times = self._place_times.note(signatures, own_scopes, _first(block), np.where(on_accelerator, 0, duration))
            for number, there in times:
                self.recorder.observations.want_at(number, there, self.recorder.threads.all)
        own = len(table) - int(is_mark.sum())
        if learning:
            with self._counting:
                self._in_flight -= own
            return
        slow_memory = self.recorder.slow_memory.slow_calls(counted, signature)
        self.duration_ns += int(duration.sum())
        long = np.flatnonzero(duration >= INTERRUPTED_NS).tolist() if self.is_contended else []
        perturbed = _with_places(perturbed, [*(place for place, _ in slow_memory), *long])
        yield Calls(
            thread=self._threads[mode.number],
            signature=signature,
            scope=scopes,
            start_ns=start.tolist(),
            duration_ns=duration.tolist(),
            tensors=block.tensors.tolist(),
            storages=block.flows.tolist(),
            newest=self.newest,
            device_ns=device_ns,
            page_faults=page_faults,
            streams=streams,
            perturbed=perturbed,
            slow_memory=slow_memory,
        )
        if self.recorder.kernels is not None:
            self.recorder.kernels.note(self._threads[mode.number], mode.idents, signature, starts, table[:, 2])
        self.newest = int(block.flows.max(initial=self.newest))
        with self._counting:
            self.calls += len(table)
            self.marks.update(signatures[is_mark > 0].tolist())
            self._in_flight -= own
        self.perturbed += int((perturbed_flags(perturbed, len(table)) > is_mark).sum())

    @property
    def own_written(self) -> int:
        return self.calls - self.marks.total()

    def count_own(self) -> int:
        pairs, marks = self.recorder.scopes.pairs, self.recorder.signatures.marks
        with self._counting:
            for mode in self.recorder.threads.all:
                integers, calls = self._counted.get(mode.number, (0, 0))
                # a copy: a call may be added meanwhile
                values = np.array(mode.rows[integers:], dtype=np.int64)
                calls += sum(pairs[number][0] not in marks for number in values[values >= FIRST_PAIR].tolist())
                self._counted[mode.number] = integers + len(values), calls
            return self.own_written + self._in_flight + sum(calls for _, calls in self._counted.values())

    def begin_file(self) -> None:
        self.calls = self.perturbed = 0
        self.marks.clear()
        self._threads.clear()
        self._numbers = count()
        self.newest = -1

    def pass_over(self, block: ThreadCalls) -> None:
        mode, starts = block.mode, block.calls[:, 1].tolist()
        mode.faults.take(starts)
        mode.own_work.take(block.calls[:, 1], block.calls[:, 2], block.open_since_ns)
        mode.device.forget(starts)

    def forget_thread(self, number: int) -> None:
        for table in (self._threads, self._sequence, self._forward, self._last):
            table.pop(number, None)

    def running(self) -> Iterator[Record]:
        for mode, entered in self.entered():
            yield from self._thread(mode)
            yield replace(entered, thread=self._threads[mode.number])

    def entered(self) -> Iterator[tuple[ThreadMode, Entered]]:
        for mode in self.recorder.threads.all:
            for start, node in self._running(mode):
                opened = self.recorder.signatures.open_record(node.number)
                since = start - self.recorder.started_ns
                yield mode, Entered(mode.number, since, node.scope, node.number, opened)

    def _running(self, mode: ThreadMode) -> list[tuple[int, CallNode]]:
        return mode.running(*self._last.get(mode.number, (0, 1)))

    def _split(
        self, mode: ThreadMode, values: list[int], most: int | None, open_since_ns: int
    ) -> tuple[ThreadCalls, int]:
        rows = np.array(values, dtype=np.int64)
        places = np.append(np.flatnonzero(rows >= FIRST_PAIR), len(rows))
        if most is not None:
            places = places[: most + 1]
        used = int(places[-1])
        own = places[:-1, None] + np.arange(COLUMNS)
        is_flow = np.ones(used, dtype=np.bool_)
        is_flow[own] = False
        return ThreadCalls(mode, rows[own], np.diff(places) - COLUMNS, rows[:used][is_flow], open_since_ns), used

    def _describe(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        pairs, signatures = self.recorder.scopes.pairs, self.recorder.signatures
        if pairs is not self._pairs:
            # some were removed
            self._pairs, self._first_pair, self._described = pairs, min(pairs, default=FIRST_PAIR), self._described[:0]
        places = numbers - self._first_pair
        missing = int(places.max(initial=-1)) + 1 - len(self._described)
        if missing > 0:
            self._described = np.concatenate([self._described, np.full((missing, 5), UNKNOWN)])
        described: NDArray[np.int64] = self._described[places]
        is_new = described[:, 0] == UNKNOWN
        if is_new.any():
            for place in set(places[is_new].tolist()):
                number, scope, _ = pairs[place + self._first_pair]
                sets = signatures.marks, signatures.differentiable, signatures.on_accelerator
                self._described[place] = number, scope, *(number in numbers for numbers in sets)
            described = self._described[places]
        return described

    def _thread(self, mode: ThreadMode) -> Iterator[Record]:
        if mode.number not in self._threads:
            self._threads[mode.number] = next(self._numbers)
            yield Thread(self._threads[mode.number], mode.thread_name)

    def _remember_forward(self, block: ThreadCalls) -> None:
        forward = self._forward.setdefault(block.mode.number, {})
        last = self._sequence.get(block.mode.number, block.mode.first_sequence)
        _, scopes, _, is_differentiable, _ = self._describe(block.calls[:, 0]).T
        followed = (block.calls[:, 3] >= 0) & (is_differentiable > 0)
        sequences, scopes = block.calls[followed, 3], scopes[followed]
        if len(sequences):
            is_next = np.diff(sequences, prepend=last) != 0
            # autograd makes and counts a node before the operator's call is seen
            forward.update(zip((sequences[is_next] - 1).tolist(), scopes[is_next].tolist(), strict=True))
            last = int(sequences[-1])
        self._sequence[block.mode.number] = last
        for number in list(islice(forward, max(0, len(forward) - MOST_SEQUENCES))):
            del forward[number]

    def _pair_with_forward(self, scopes: NDArray[np.int64], sequences: NDArray[np.int64]) -> list[int]:
        places = np.flatnonzero((sequences < 0) & (sequences != UNPAIRED))
        forward_scopes = self._forward_scopes((-1 - sequences[places]).tolist())
        # most of these recur, and the work for each call must be little
        pairs = list(zip(scopes[places].tolist(), forward_scopes, strict=True))
        scope_of_pair = {
            (scope, forward): scope if forward is None else self.recorder.scopes.backward_scope(scope, forward)
            for scope, forward in dict.fromkeys(pairs)
        }
        paired = scopes.copy()
        paired[places] = list(map(scope_of_pair.__getitem__, pairs))
        numbers: list[int] = paired.tolist()
        return numbers

    def _forward_scopes(self, numbers: Sequence[int]) -> list[int | None]:
        tables = [table for table in self._forward.values() if table]
        if len(tables) == 1:
            return list(map(tables[0].get, numbers))
        # None if several threads made a node of this number
        matches = ([table[number] for table in tables if number in table] for number in numbers)
        return [scopes[0] if len(scopes) == 1 else None for scopes in matches]


def _with_places(runs: Runs, places: Sequence[int]) -> Runs:
    if not places:
        return runs
    covered = {place for first, length in runs for place in range(first, first + length)}
    return runs_of(np.array(sorted(covered.union(places)), dtype=np.intp))


def _first(block: ThreadCalls) -> NDArray[np.int64]:
    firsts = np.cumsum(block.tensors) - block.tensors
    padded = np.append(block.flows, NO_STORAGE)
    return np.where(block.tensors > 0, padded[firsts], NO_STORAGE)
