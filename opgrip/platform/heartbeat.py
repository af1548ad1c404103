"""Heartbeat: the current step of a child process, in memory that it shares with its supervisor."""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from time import monotonic_ns

IDLE = -1
"""value of `item` or `part` while the child does not work on one"""


@dataclass(frozen=True, slots=True)
class Beat:
    """One step of a child process.

    Attributes
    ----------
    item, part : number of the item that the child works on, and of the part of this item; `IDLE` if there is none
    since_ns : start of the step, by the monotonic clock
    """

    item: int
    part: int
    since_ns: int


class Heartbeat:
    """The current step of a child process, in memory shared with its supervisor.

    Writing takes a fraction of a microsecond, so that a child can write before every run of a call. The memory holds
    the number of writes and the newest entries, each with a hash of its fields and number. The hash lets a reader
    detect an incomplete entry; if a child is killed while it writes, the previous entry is still valid.

    Parameters
    ----------
    file : descriptor of the shared file, which the child inherits
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
        """Record the start of a step."""
        number, since_ns = self._count[0] + 1, monotonic_ns()
        check = hash((number, item, part, since_ns))
        self._ENTRY.pack_into(self._memory, self._offset(number), item, part, since_ns, check)
        self._count[0] = number

    def rest(self) -> None:
        """Record that the child is between steps."""
        self.enter(IDLE)

    def read(self) -> Beat:
        """Return the current step, or an idle one if the child has corrupted the memory."""
        for _ in range(self._MOST_READS):
            number = self._count[0]
            item, part, since_ns, check = self._ENTRY.unpack_from(self._memory, self._offset(number))
            if check == hash((number, item, part, since_ns)):
                return Beat(item, part, since_ns)
        return Beat(IDLE, IDLE, monotonic_ns())

    def _offset(self, number: int) -> int:
        return self._COUNT.size + number % self._ENTRIES * self._ENTRY.size
