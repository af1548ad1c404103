"""The calls of a trace that were entered and did not end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from opgrip.traces.codec.call_blocks import CallBlock
from opgrip.traces.codec.integer_text import Integers
from opgrip.traces.schema.records import Entered

NEVER = np.iinfo(np.int64).max


class _Thread:
    """Of one thread, the first call that began since each of those that were entered, and when the last one began."""

    def __init__(self, records: list[Entered]) -> None:
        self.records = records
        self._entered_ns: Integers = np.unique(np.array([record.start_ns for record in records], dtype=np.int64))
        self._starts = np.full(len(self._entered_ns), NEVER)
        self._signatures = np.full(len(self._entered_ns), -1)
        self._last_ns = -1
        self._has_calls = False

    def note(self, block: CallBlock) -> None:
        """Take note of calls of the thread."""
        order = np.argsort(block.start_ns, kind="stable")
        starts = block.start_ns[order]
        last = int(starts[-1])
        self._last_ns = max(self._last_ns, last) if self._has_calls else last
        self._has_calls = True
        # of the calls since each, the first of this block
        places = np.searchsorted(starts, self._entered_ns)
        rows = np.flatnonzero(places < len(starts))
        firsts = starts[places[rows]]
        earlier = firsts < self._starts[rows]
        rows, places = rows[earlier], places[rows][earlier]
        self._starts[rows] = starts[places]
        self._signatures[rows] = block.signature[order][places]

    def unfinished(self) -> list[Entered]:
        """Those that did not end, in the order in which they began."""
        rows = np.searchsorted(self._entered_ns, [record.start_ns for record in self.records])
        firsts = self._signatures[rows].tolist()
        by_start = {
            record.start_ns: record
            for record, first in zip(self.records, firsts, strict=True)
            if first != record.signature
        }
        # a call that is around others began before them
        newest = max(by_start, default=-1)
        return [record for start, record in sorted(by_start.items()) if start > self._last_ns or start == newest]


def unfinished_calls(entered: Mapping[int, list[Entered]], source: Iterable[CallBlock]) -> list[Entered]:
    """Of each thread, the calls that were entered and did not end: those that began last.

    A call's row can begin later than it was entered: what a capture looks at before the operator runs is not its time.
    """
    if not entered:
        return []
    threads = {number: _Thread(records) for number, records in entered.items()}
    for block in source:
        thread = threads.get(block.thread)
        if thread is not None and len(block):
            thread.note(block)
    return [record for thread in threads.values() for record in thread.unfinished()]
