"""Turns what the modes kept of calls into records, and gives backward calls the scope of the forward call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

import numpy as np
from numpy.typing import NDArray

from opgrip.capture.recording.recorder import Recorder
from opgrip.capture.recording.thread_mode import UNPAIRED, ThreadMode
from opgrip.capture.signatures.predictions import CallPoint
from opgrip.capture.timing.page_faults import FEWEST, NONE_OPEN, Runs, runs_of
from opgrip.capture.timing.place_times import PlaceTimes
from opgrip.traces.schema.records import NO_STORAGE, Calls, Entered, Record, Thread

BLOCK = 1024
"""Calls in one record."""
COLUMNS = 4
"""Integers that a mode keeps of a call, before those of its tensors."""
INTERRUPTED_NS = 1_000_000
"""Duration of calls that other processes may have interrupted: the system gives a processor for about so long."""
MOST_SEQUENCES = 1 << 18
"""Forward calls that wait for their backward calls."""


@dataclass(frozen=True, slots=True)
class ThreadCalls:
    """Some calls of a thread.

    Attributes
    ----------
    calls : a row each: number of its pair, start, end, sequence number
    tensors : how many tensors each has
    flows : their storages, one call's after another's
    open_since_ns : the start of the first call that has not ended by the last of these
    """

    mode: ThreadMode
    calls: NDArray[np.int64]
    tensors: NDArray[np.int64]
    flows: NDArray[np.int64]
    open_since_ns: int = NONE_OPEN

    def __len__(self) -> int:
        return len(self.calls)

    def part(self, first: int, stop: int) -> ThreadCalls:
        """The calls from one place to before another."""
        ends = np.concatenate([[0], np.cumsum(self.tensors)])
        own, flows = slice(first, stop), slice(ends[first], ends[stop])
        open_since_ns = min(self.open_since_ns, int(self.calls[stop:, 1].min(initial=NONE_OPEN)))
        return ThreadCalls(self.mode, self.calls[own], self.tensors[own], self.flows[flows], open_since_ns)

    def copied(self) -> ThreadCalls:
        """The same calls in memory of their own, where they are part of others."""
        return replace(self, calls=self.calls.copy(), tensors=self.tensors.copy(), flows=self.flows.copy())


class Blocks:
    """Makes the records of one process's calls.

    Attributes
    ----------
    calls : how many there were
    marks : how many of them were marks of `record_function`, by their signature
    perturbed : how many of the others ran right after the capture's own work
    newest : the largest number of a storage in them
    duration_ns : sum of the durations of calls
    is_contended : whether other processes used the processors while the next calls ran

    Parameters
    ----------
    looks : let calls be looked at for what these calls took
    """

    def __init__(self, recorder: Recorder, looks: bool = True) -> None:
        self.recorder = recorder
        self._looks = looks
        self._numbers = count()
        self.calls = 0
        self.perturbed = 0
        self.marks: Counter[int] = Counter()
        self._place_times = PlaceTimes()
        self._threads: dict[int, int] = {}
        self.newest = -1
        self.is_contended = False
        self.duration_ns = 0
        # by thread: the last sequence number, the scope of the forward call that made each node, the last call
        self._sequence: dict[int, int] = {}
        self._forward: dict[int, dict[int, int]] = {}
        self._last: dict[int, tuple[int, int]] = {}

    def take(self, room: int | None = None) -> list[ThreadCalls]:
        """All calls that are there, removed from their modes, in parts of at most a block.

        Parameters
        ----------
        room : the most calls to take in all
        """
        blocks: list[ThreadCalls] = []
        remaining_calls = room
        # the last threads first: what they run backward, those before them ran forward, and is taken afterwards
        for mode in reversed(self.recorder.threads.all):
            # before the rows: what ends in between has its row here
            open_since_ns = min((start for start, _ in self._running(mode)), default=NONE_OPEN)
            count = len(mode.rows)
            whole, used = self._split(mode, mode.rows[:count], remaining_calls, open_since_ns)
            del mode.rows[:used]
            self.recorder.work.calls += len(whole)
            self.recorder.work.integers += used
            if len(whole):
                self._last[mode.number] = int(whole.calls[-1, 1]), int(whole.calls[-1, 2])
            if remaining_calls is not None:
                remaining_calls -= len(whole)
            blocks[:0] = [whole.part(first, min(first + BLOCK, len(whole))) for first in range(0, len(whole), BLOCK)]
        # all forward calls are known before the first call of a backward pass is paired
        for block in blocks:
            self._remember_forward(block)
        return blocks

    def records(self, block: ThreadCalls, learning: bool = False) -> Iterator[Record]:
        """The records of what `take` gave.

        Parameters
        ----------
        learning : the calls themselves are neither among them nor counted
        """
        mode, pairs, table = block.mode, self.recorder.scopes.pairs, block.calls
        signature, scope, tensors = zip(*[pairs[pair] for pair in table[:, 0].tolist()], strict=True)
        if self._looks:
            self.recorder.observations.count(signature, self.recorder.threads.all)
        scopes = self._pair_with_forward(list(scope), table[:, 3])
        yield from self._thread(mode)
        starts = table[:, 1].tolist()
        start, duration = table[:, 1] - self.recorder.started_ns, table[:, 2] - table[:, 1]
        counted = mode.faults.take(starts)
        for place, call in counted.items():
            start[place], duration[place] = call.start_ns - self.recorder.started_ns, call.duration_ns
        began = start + self.recorder.started_ns
        perturbed = mode.own_work.take(began, began + duration, block.open_since_ns)
        page_faults = [(place, call.faults) for place, call in counted.items() if call.faults >= FEWEST]
        flows = block.flows.tolist()
        columns = (list(signature), scopes, start.tolist(), duration.tolist(), list(tensors))
        with self.recorder.graphs.question() as may_ask:
            device_ns = mode.device.times_ns(starts, may_ask)
        streams = mode.device.streams(starts)
        if self._looks:
            for number, there in self._place_times.note(signature, scope, _first(block), duration):
                self.recorder.observations.want_at(number, there, self.recorder.threads.all)
        if learning:
            return
        slow_memory = self.recorder.slow_memory.slow_calls(counted, signature)
        self.duration_ns += int(duration.sum())
        long = np.flatnonzero(duration >= INTERRUPTED_NS).tolist() if self.is_contended else []
        perturbed = _with_places(perturbed, [*(place for place, _ in slow_memory), *long])
        yield Calls(
            *(self._threads[mode.number], *columns, flows, self.newest, device_ns, page_faults, streams, perturbed),
            slow_memory,
        )
        if self.recorder.kernels is not None:
            self.recorder.kernels.note(self._threads[mode.number], mode.idents, signature, starts, table[:, 2].tolist())
        self.newest = max(self.newest, *flows) if flows else self.newest
        self.calls += len(table)
        marks = self.recorder.signatures.marks
        if marks:
            self.marks.update(number for number in signature if number in marks)
        self.perturbed += sum(
            signature[place] not in marks for first, count in perturbed for place in range(first, first + count)
        )

    def begin_file(self) -> None:
        """The records to come go to a file that has none yet."""
        self.calls = self.perturbed = 0
        self.marks.clear()
        self._threads.clear()
        self._numbers = count()
        self.newest = -1

    def pass_over(self, block: ThreadCalls) -> None:
        """Forget what else is kept of calls of which no record is made."""
        mode, starts = block.mode, block.calls[:, 1].tolist()
        mode.faults.take(starts)
        mode.own_work.take(block.calls[:, 1], block.calls[:, 2], block.open_since_ns)
        mode.device.forget(starts)

    def forget_thread(self, number: int) -> None:
        """Forget a thread that has ended, by its mode's number."""
        for table in (self._threads, self._sequence, self._forward, self._last):
            table.pop(number, None)

    def running(self) -> Iterator[Record]:
        """Yield the calls that each thread is in, outermost first."""
        for mode, entered in self.entered():
            yield from self._thread(mode)
            yield replace(entered, thread=self._threads[mode.number])

    def entered(self) -> Iterator[tuple[ThreadMode, Entered]]:
        """Yield the same, with the number of its mode for a thread's."""
        for mode in self.recorder.threads.all:
            for start, node in self._running(mode):
                opened = self.recorder.signatures.open_record(node.number)
                since = start - self.recorder.started_ns
                yield mode, Entered(mode.number, since, node.scope, node.number, opened)

    def _running(self, mode: ThreadMode) -> list[tuple[int, CallPoint]]:
        return mode.running(*self._last.get(mode.number, (0, 1)))

    def _split(
        self, mode: ThreadMode, values: list[int], most: int | None, open_since_ns: int
    ) -> tuple[ThreadCalls, int]:
        """The calls in a mode's rows, and how many integers these were."""
        # plain integers alone: a list for each call would have Python's collector go through all that a program holds
        places: list[int] = []
        place, pairs = 0, self.recorder.scopes.pairs
        while place < len(values) and (most is None or len(places) < most):
            places.append(place)
            place += COLUMNS + pairs[values[place]][2]
        rows = np.array(values[:place], dtype=np.int64)
        firsts = np.array(places, dtype=np.int64)
        own = firsts[:, None] + np.arange(COLUMNS)
        is_flow = np.ones(place, dtype=np.bool_)
        is_flow[own] = False
        tensors = np.diff(firsts, append=place) - COLUMNS
        return ThreadCalls(mode, rows[own], tensors, rows[is_flow], open_since_ns), place

    def _thread(self, mode: ThreadMode) -> Iterator[Record]:
        if mode.number not in self._threads:
            self._threads[mode.number] = next(self._numbers)
            yield Thread(self._threads[mode.number], mode.thread_name)

    def _remember_forward(self, block: ThreadCalls) -> None:
        forward = self._forward.setdefault(block.mode.number, {})
        last = self._sequence.get(block.mode.number, block.mode.first_sequence)
        followed = block.calls[block.calls[:, 3] >= 0]
        for pair, sequence in zip(followed[:, 0].tolist(), followed[:, 3].tolist(), strict=True):
            signature, scope, _ = self.recorder.scopes.pairs[pair]
            if sequence != last and signature in self.recorder.signatures.differentiable:
                # a node is made before its operator is seen, and counted by then
                forward[sequence - 1] = scope
                last = sequence
        self._sequence[block.mode.number] = last
        for number in list(forward)[: max(0, len(forward) - MOST_SEQUENCES)]:
            del forward[number]

    def _pair_with_forward(self, scopes: list[int], sequences: NDArray[np.int64]) -> list[int]:
        """The scopes of a thread's calls, with those of the forward calls for the calls in a backward pass."""
        for place in np.flatnonzero((sequences < 0) & (sequences != UNPAIRED)).tolist():
            caused_by = self._forward_scope(-1 - int(sequences[place]))
            if caused_by is not None:
                scopes[place] = self.recorder.scopes.backward_scope(scopes[place], caused_by)
        return scopes

    def _forward_scope(self, number: int) -> int | None:
        """The scope of the forward call that made a node; None where several threads made one of this number."""
        matching_scopes = [scopes[number] for scopes in self._forward.values() if number in scopes]
        if len(matching_scopes) != 1 or not self.recorder.scopes.has_scope(matching_scopes[0]):
            return None
        return matching_scopes[0]


def _with_places(runs: Runs, places: Sequence[int]) -> Runs:
    """Return runs that cover single places too."""
    if not places:
        return runs
    covered = {place for first, length in runs for place in range(first, first + length)}
    return runs_of(np.array(sorted(covered.union(places)), dtype=np.intp))


def _first(block: ThreadCalls) -> list[int]:
    """The memory of each call's first tensor."""
    firsts = np.cumsum(block.tensors) - block.tensors
    padded = np.append(block.flows, NO_STORAGE)
    numbers: list[int] = np.where(block.tensors > 0, padded[firsts], NO_STORAGE).tolist()
    return numbers
