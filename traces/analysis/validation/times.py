"""Calls of a thread in time: each ends after those before it in the file, and lies beside or inside of another."""

from __future__ import annotations

from collections import deque

from opgrip.traces.analysis.validation.findings import TIME, Validation
from opgrip.traces.schema.records import Calls

MOST_OPEN = 1 << 16
"""Calls of a thread beside each other that a later one is held against."""


class Times:
    """Checks the times of blocks of calls in their order."""

    def __init__(self, validation: Validation) -> None:
        self._validation = validation
        # of each thread, the start and end of the calls that are inside of no other, the last at the end
        self._beside: dict[int, deque[tuple[int, int]]] = {}

    def see(self, place: int, record: Calls) -> None:
        """Check a block; one finding for each way in which its times are wrong."""
        beside = self._beside.setdefault(record.thread, deque(maxlen=MOST_OPEN))
        crossing: list[int] = []
        disordered: list[int] = []
        for index, (start, duration) in enumerate(zip(record.start_ns, record.duration_ns, strict=True)):
            end = start + duration
            if beside and end < beside[-1][1]:
                disordered.append(index)
                continue
            while beside and beside[-1][0] >= start:
                beside.pop()
            if beside and beside[-1][1] > start:
                crossing.append(index)
            beside.append((start, end))
        self._tell(place, record, crossing, "begins before, and ends after, the end of another that began before it")
        self._tell(place, record, disordered, "ends before the call that stands before it")

    def _tell(self, place: int, record: Calls, indices: list[int], what: str) -> None:
        if indices:
            first = indices[0]
            others = f", and {len(indices) - 1:,} others of the block" if len(indices) > 1 else ""
            at = f"at {record.start_ns[first]} ns of thread {record.thread}"
            self._validation.add(place, TIME, f"call {first} of the block, {at}, {what}{others}")
