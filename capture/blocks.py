"""Turns what the modes kept of calls into records, and gives backward calls the scope of the forward call."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import numpy as np

from opgrip.capture.dispatch import UNPAIRED, RecordingMode
from opgrip.capture.recorder import Recorder
from opgrip.traces.records import Calls, Entered, Record, Thread

BLOCK = 512
"""Calls in one record."""
COLUMNS = 4
"""Integers that a mode keeps of a call."""
MOST_SEQUENCES = 1 << 18
"""Forward calls that wait for their backward calls."""


class Blocks:
    """Makes the records of one process's calls."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.calls = 0
        self._threads: dict[int, int] = {}
        self._newest = -1
        # by thread: the last sequence number, and the scope of the forward call that made each node
        self._last: dict[int, int] = {}
        self._forward: dict[int, dict[int, int]] = {}
        self._last_end: dict[int, int] = {}

    def take(self, room: int | None = None) -> list[tuple[RecordingMode, list[int], list[int]]]:
        """Rows and flows of at most a block of calls of each thread, removed from its mode.

        Parameters
        ----------
        room : the most calls to take in all
        """
        taken = []
        left = BLOCK * len(self.recorder.modes) if room is None else room
        # the last threads first: what they run backward, those before them ran forward, and is taken afterwards
        for mode in reversed(self.recorder.modes):
            rows = mode.rows[: min(len(mode.rows) // COLUMNS, BLOCK, left) * COLUMNS]
            left -= len(rows) // COLUMNS
            if rows:
                del mode.rows[: len(rows)]
                pairs = self.recorder.pairs
                count = sum([pairs[pair][2] for pair in rows[::COLUMNS]])
                flows = mode.flows[:count]
                del mode.flows[:count]
                taken.append((mode, rows, flows))
        return taken[::-1]

    def records(self, mode: RecordingMode, rows: list[int], flows: list[int]) -> Iterator[Record]:
        """The records of what `take` gave."""
        table = np.array(rows, dtype=np.int64).reshape(-1, COLUMNS)
        pairs = self.recorder.pairs
        signature, scope, tensors = zip(*[pairs[pair] for pair in table[:, 0].tolist()], strict=True)
        scopes = self._paired(mode.number, list(scope), table[:, 3].tolist())
        yield from self._thread(mode)
        start, duration = table[:, 1] - self.recorder.started_ns, table[:, 2] - table[:, 1]
        columns = (list(signature), scopes, start.tolist(), duration.tolist(), list(tensors))
        device_ns = mode.device.times_ns(table[:, 1].tolist())
        yield Calls(self._threads[mode.number], *columns, flows, self._newest, device_ns)
        self._last_end[mode.number] = int(table[-1, 2])
        self._newest = max(self._newest, *flows) if flows else self._newest
        self.calls += len(table)

    def running(self) -> Iterator[Record]:
        """The calls that each thread is in, outermost first."""
        for mode in self.recorder.modes:
            for start, node in mode.running(self._last_end.get(mode.number, 1)):
                yield from self._thread(mode)
                opened = self.recorder.open_signature(node.number)
                since = start - self.recorder.started_ns
                yield Entered(self._threads[mode.number], since, node.scope, node.number, opened)

    def _thread(self, mode: RecordingMode) -> Iterator[Record]:
        if mode.number not in self._threads:
            self._threads[mode.number] = len(self._threads)
            yield Thread(self._threads[mode.number], mode.thread_name)

    def _paired(self, mode: int, scopes: list[int], sequences: list[int]) -> list[int]:
        """The scopes of a thread's calls, with those of the forward calls for the calls in a backward pass."""
        forward = self._forward.setdefault(mode, {})
        last = self._last.get(mode, -1)
        paired = []
        for scope, sequence in zip(scopes, sequences, strict=True):
            if sequence >= 0:
                if sequence != last:
                    # a node is made before its operator is seen, and counted by then
                    forward[sequence - 1] = scope
                    last = sequence
            elif sequence != UNPAIRED:
                caused_by = self._forward_scope(forward, -1 - sequence)
                if caused_by is not None:
                    scope = self.recorder.backward_scope(scope, caused_by)
            paired.append(scope)
        self._last[mode] = last
        for number in list(forward)[: len(forward) - MOST_SEQUENCES]:
            del forward[number]
        return paired

    def _forward_scope(self, own: dict[int, int], number: int) -> int | None:
        # the engine's threads run what another thread ran forward
        return next((scopes[number] for scopes in chain((own,), self._forward.values()) if number in scopes), None)
