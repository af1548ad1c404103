"""Memory traffic that one kernel in place of a function's operators would still cause."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from opgrip.traces.analysis.dataflow import UNKNOWN, MemoryNumbers
from opgrip.traces.analysis.longtail.thread_calls import Function, MadeCall, function_of
from opgrip.traces.schema.records import NO_STORAGE

IS_USED_ELSEWHERE, IS_READ = 1, 2
"""Flags of memory: another function takes it; something reads it."""
USES = 4
"""Memory has one number: that of the function that made it, times this, plus its flags."""


class Traffic:
    """Where the memory of a whole trace comes from and goes to."""

    def __init__(self) -> None:
        self._numbers: dict[Function, int] = {}
        self._memory = MemoryNumbers()

    def note(self, calls: Iterable[MadeCall]) -> None:
        """Add a trace's calls in start order."""
        for call in calls:
            function = self._number_of(call)
            for storage, writes in zip(call.takes, call.operation.writes, strict=False):
                known = self._memory.get(storage)
                if known != UNKNOWN:
                    uses = IS_USED_ELSEWHERE if known // USES != function else 0
                    uses |= IS_READ if call.operation.moves and not writes else 0
                    if known | uses != known:
                        self._memory.set(storage, known | uses)
            taken = {NO_STORAGE, *call.takes}
            for storage in call.gives:
                is_new = storage not in taken
                if is_new and self._memory.get(storage) == UNKNOWN:
                    self._memory.set(storage, USES * function)

    def _number_of(self, call: MadeCall) -> int:
        return self._numbers.setdefault(function_of(call), len(self._numbers))

    def cross(self, call: MadeCall, borders: Borders) -> None:
        """Add the bytes that a call of a run moves into and out of it.

        What the function itself made, in any phase, can stay in a kernel. What others made is read once; what others
        take later, or
        nothing recorded reads, is written once; and so is what existed before.
        """
        borders.pass_by(call)
        operation = call.operation
        if not operation.moves:
            return
        function = self._number_of(call)
        for place, storage in enumerate(call.takes):
            if storage == NO_STORAGE or self._memory.get(storage) // USES == function:
                continue
            if operation.writes[place]:
                borders.write(storage, operation.argument_bytes[place])
            else:
                borders.read(
                    storage, operation.shapes[place], operation.argument_bytes[place], operation.extents[place]
                )
        for storage, size in zip(call.gives, operation.result_bytes, strict=False):
            known = self._memory.get(storage)
            if known // USES == function and (known & IS_USED_ELSEWHERE or not known & IS_READ):
                borders.write(storage, size)


@dataclass(slots=True)
class Borders:
    """Bytes that enter and leave a run: by memory, bytes read of each tensor, their extent, bytes written.

    Attributes
    ----------
    has_dataflow : True if a call of the run records its memory
    first, last : bytes that the first call with data takes, and that the last one gives
    """

    reads: dict[int, dict[tuple[object, ...], int]] = field(default_factory=dict)
    extents: dict[int, int] = field(default_factory=dict)
    writes: dict[int, int] = field(default_factory=dict)
    has_dataflow: bool = False
    first: int | None = None
    last: int = 0

    def pass_by(self, call: MadeCall) -> None:
        """Add the run's next call."""
        if any(storage != NO_STORAGE for storage in (*call.takes, *call.gives)):
            self.has_dataflow = True
        if call.operation.moves:
            if self.first is None:
                self.first = sum(call.operation.argument_bytes)
            self.last = sum(call.operation.result_bytes)

    def read(self, storage: int, shape: tuple[object, ...], size: int, extent: int) -> None:
        """Add bytes read; those of other tensors in the same memory may be the same ones."""
        self.reads.setdefault(storage, {})[shape] = size
        self.extents[storage] = max(self.extents.get(storage, 0), extent)

    def write(self, storage: int, size: int) -> None:
        """Add bytes written."""
        self.writes[storage] = max(self.writes.get(storage, 0), size)

    @property
    def bytes(self) -> int:
        """All bytes; views of the same memory may overlap. Without dataflow, only those at both ends."""
        if not self.has_dataflow:
            return (self.first or 0) + self.last
        inwards = sum(min(sum(sizes.values()), self.extents[storage]) for storage, sizes in self.reads.items())
        return inwards + sum(self.writes.values())
