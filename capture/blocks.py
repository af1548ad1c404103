"""Turns what the modes kept of calls into records, and gives backward calls the scope of the forward call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from opgrip.capture.dispatch import UNPAIRED
from opgrip.capture.page_faults import FEWEST
from opgrip.capture.recorder import Recorder
from opgrip.capture.thread_mode import ThreadMode
from opgrip.traces.records import Calls, Entered, Record, Thread

BLOCK = 1024
"""Calls in one record."""
COLUMNS = 4
"""Integers that a mode keeps of a call, before those of its tensors."""
MOST_SEQUENCES = 1 << 18
"""Forward calls that wait for their backward calls."""


@dataclass(frozen=True, slots=True)
class CallBlock:
    """Some calls of a thread, each with the storages of its tensors."""

    mode: ThreadMode
    calls: list[list[int]]
    flows: list[list[int]]


class Blocks:
    """Makes the records of one process's calls.

    Attributes
    ----------
    calls : how many there were
    marks : how many of them were marks of `record_function`, by their signature
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.calls = 0
        self.marks: Counter[int] = Counter()
        self._threads: dict[int, int] = {}
        self._newest = -1
        # by thread: the last sequence number, the scope of the forward call that made each node, the last call
        self._sequence: dict[int, int] = {}
        self._forward: dict[int, dict[int, int]] = {}
        self._last: dict[int, tuple[int, int]] = {}

    def take(self, room: int | None = None) -> list[CallBlock]:
        """All calls that are there, removed from their modes, in parts of at most a block.

        Parameters
        ----------
        room : the most calls to take in all
        """
        blocks: list[CallBlock] = []
        remaining_calls = room
        # the last threads first: what they run backward, those before them ran forward, and is taken afterwards
        for mode in reversed(self.recorder.modes):
            count = len(mode.rows)
            values = mode.rows[:count]
            calls, flows, used = self._split(values, remaining_calls)
            del mode.rows[:used]
            if remaining_calls is not None:
                remaining_calls -= len(calls)
            firsts = range(0, len(calls), BLOCK)
            blocks[:0] = [
                CallBlock(mode, calls[first : first + BLOCK], flows[first : first + BLOCK]) for first in firsts
            ]
        # all forward calls are known before the first call of a backward pass is paired
        for block in blocks:
            self._remember_forward(block)
        return blocks

    def records(self, block: CallBlock) -> Iterator[Record]:
        """The records of what `take` gave."""
        mode, pairs = block.mode, self.recorder.pairs
        table = np.array(block.calls, dtype=np.int64)
        signature, scope, tensors = zip(*[pairs[pair] for pair in table[:, 0].tolist()], strict=True)
        self.recorder.observations.count(signature, self.recorder.modes)
        scopes = self._pair_with_forward(list(scope), table[:, 3].tolist())
        yield from self._thread(mode)
        starts = table[:, 1].tolist()
        start, duration = table[:, 1] - self.recorder.started_ns, table[:, 2] - table[:, 1]
        counted = mode.faults.take(starts)
        for place, (_, began, without_counting) in counted.items():
            start[place], duration[place] = began - self.recorder.started_ns, without_counting
        page_faults = [(place, faults) for place, (faults, *_) in counted.items() if faults >= FEWEST]
        flows = [number for flow in block.flows for number in flow]
        columns = (list(signature), scopes, start.tolist(), duration.tolist(), list(tensors))
        with self.recorder.graphs.question() as may_ask:
            device_ns = mode.device.times_ns(starts, may_ask)
        streams = mode.device.streams(starts)
        yield Calls(self._threads[mode.number], *columns, flows, self._newest, device_ns, page_faults, streams)
        if self.recorder.kernels is not None:
            self.recorder.kernels.note(self._threads[mode.number], mode.idents, signature, starts, table[:, 2].tolist())
        self._last[mode.number] = int(table[-1, 1]), int(table[-1, 2])
        self._newest = max(self._newest, *flows) if flows else self._newest
        self.calls += len(table)
        if self.recorder.marks:
            self.marks.update(number for number in signature if number in self.recorder.marks)

    def running(self) -> Iterator[Record]:
        """The calls that each thread is in, outermost first."""
        for mode in self.recorder.modes:
            for start, node in mode.running(*self._last.get(mode.number, (0, 1))):
                yield from self._thread(mode)
                opened = self.recorder.open_signature(node.number)
                since = start - self.recorder.started_ns
                yield Entered(self._threads[mode.number], since, node.scope, node.number, opened)

    def _split(self, values: list[int], most: int | None) -> tuple[list[list[int]], list[list[int]], int]:
        """Calls and flows of a mode's rows, and how many integers these were."""
        calls: list[list[int]] = []
        flows: list[list[int]] = []
        place, pairs = 0, self.recorder.pairs
        while place < len(values) and (most is None or len(calls) < most):
            after = place + COLUMNS + pairs[values[place]][2]
            calls.append(values[place : place + COLUMNS])
            flows.append(values[place + COLUMNS : after])
            place = after
        return calls, flows, place

    def _thread(self, mode: ThreadMode) -> Iterator[Record]:
        if mode.number not in self._threads:
            self._threads[mode.number] = len(self._threads)
            yield Thread(self._threads[mode.number], mode.thread_name)

    def _remember_forward(self, block: CallBlock) -> None:
        forward = self._forward.setdefault(block.mode.number, {})
        last = self._sequence.get(block.mode.number, block.mode.first_sequence)
        for pair, _, _, sequence in block.calls:
            signature, scope, _ = self.recorder.pairs[pair]
            if sequence >= 0 and sequence != last and signature in self.recorder.differentiable:
                # a node is made before its operator is seen, and counted by then
                forward[sequence - 1] = scope
                last = sequence
        self._sequence[block.mode.number] = last
        for number in list(forward)[: max(0, len(forward) - MOST_SEQUENCES)]:
            del forward[number]

    def _pair_with_forward(self, scopes: list[int], sequences: list[int]) -> list[int]:
        """The scopes of a thread's calls, with those of the forward calls for the calls in a backward pass."""
        paired_scopes = []
        for scope, sequence in zip(scopes, sequences, strict=True):
            caused_by = None
            if sequence < 0 and sequence != UNPAIRED:
                caused_by = self._forward_scope(-1 - sequence)
            paired_scopes.append(scope if caused_by is None else self.recorder.backward_scope(scope, caused_by))
        return paired_scopes

    def _forward_scope(self, number: int) -> int | None:
        """The scope of the forward call that made a node; None where several threads made one of this number."""
        matching_scopes = [scopes[number] for scopes in self._forward.values() if number in scopes]
        return matching_scopes[0] if len(matching_scopes) == 1 else None
