"""Heartbeat: the step that a child process is at, in memory that it shares with its supervisor."""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from time import monotonic_ns

IDLE = -1  # value of `item` or `part` while the child does not work on one


@dataclass(frozen=True, slots=True)
class Beat:
    """The step that a child process is at.

    item : index of the item that the child works on, or `IDLE` if it works on none
    part : index of the part of the item, or `IDLE` if the item has no parts
    since_ns : time at which the step began, by the monotonic clock
    """

    item: int
    part: int
    since_ns: int


class Heartbeat:
    """Shared memory in which a child process stores the step that it is at.

    Writing takes a fraction of a microsecond. The memory contains the number of writes and the newest entries, each
    with a hash. It lets a reader detect an incomplete entry; if a child is killed while it writes, the previous one is
    valid.
    """

    _COUNT, _ENTRY = struct.Struct("q"), struct.Struct("qqqq")
    _ENTRIES = 16
    _SIZE = _COUNT.size + _ENTRIES * _ENTRY.size
    # one read is almost always enough; a child may write anywhere in its memory, and corrupt memory never has a valid
    # entry
    _MOST_READS = 10_000

    def __init__(self, file: int) -> None:
        is_new = os.fstat(file).st_size < self._SIZE
        if is_new:
            os.truncate(file, self._SIZE)
        self.file = file
        self._memory = mmap.mmap(file, self._SIZE)
        # struct clears its target first; storing one element of a view is a single write
        self._count = memoryview(self._memory).cast("q")[:1]
        if is_new:
            self.rest()

    def enter(self, item: int, part: int = IDLE) -> None:
        """Store that the child begins a step."""
        number, since_ns = self._count[0] + 1, monotonic_ns()
        check = hash((number, item, part, since_ns))
        self._ENTRY.pack_into(self._memory, self._offset(number), item, part, since_ns, check)
        self._count[0] = number

    def rest(self) -> None:
        self.enter(IDLE)

    def read(self) -> Beat:
        """Return the step that the child is at; a step without an item if the memory was overwritten."""
        for _ in range(self._MOST_READS):
            number = self._count[0]
            item, part, since_ns, check = self._ENTRY.unpack_from(self._memory, self._offset(number))
            if check == hash((number, item, part, since_ns)):
                return Beat(item, part, since_ns)
        return Beat(IDLE, IDLE, monotonic_ns())

    def _offset(self, number: int) -> int:
        return self._COUNT.size + number % self._ENTRIES * self._ENTRY.size
