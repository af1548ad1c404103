"""Which case a worker is at and since when, in memory that its supervisor sees."""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from time import monotonic_ns

NOTHING = -1
_COUNT, _ENTRY = struct.Struct("q"), struct.Struct("qqqq")
_ENTRIES = 16
_SIZE = _COUNT.size + _ENTRIES * _ENTRY.size
_MOST_READS = 10_000
"""One is almost always enough; a worker may write anywhere in its memory, and what it spoilt is never whole."""


@dataclass(frozen=True, slots=True)
class At:
    """Where a worker is.

    Attributes
    ----------
    case : number of the case, `NOTHING` between cases
    row : which of its rows is at work, `NOTHING` where it is none of them
    since_ns : by the monotonic clock
    """

    case: int
    row: int
    since_ns: int


class Watch:
    """The shared memory. Writing to it costs a fraction of a microsecond, so it is done before every run.

    It holds how often it was written to and the newest entries, each with a hash of its fields and its number: one that
    is read while it is written is told by that, and a worker that is killed meanwhile leaves the entry before.

    Parameters
    ----------
    file : descriptor of the file that it lies in, which the worker inherits
    """

    def __init__(self, file: int) -> None:
        is_new = os.fstat(file).st_size < _SIZE
        if is_new:
            os.truncate(file, _SIZE)
        self.file = file
        self._memory = mmap.mmap(file, _SIZE)
        # struct clears its target first; one element is one store
        self._count = memoryview(self._memory).cast("q")[:1]
        if is_new:
            self.mark_idle()

    def entered(self, case: int, row: int) -> None:
        """Something of a case begins."""
        number, since_ns = self._count[0] + 1, monotonic_ns()
        check = hash((number, case, row, since_ns))
        _ENTRY.pack_into(self._memory, _place(number), case, row, since_ns, check)
        self._count[0] = number

    def mark_idle(self) -> None:
        """No case runs."""
        self.entered(NOTHING, NOTHING)

    def read(self) -> At:
        """Where the worker is; between cases, where it has spoilt this memory."""
        for _ in range(_MOST_READS):
            number = self._count[0]
            case, row, since_ns, check = _ENTRY.unpack_from(self._memory, _place(number))
            if check == hash((number, case, row, since_ns)):
                return At(case, row, since_ns)
        return At(NOTHING, NOTHING, monotonic_ns())


def _place(number: int) -> int:
    return _COUNT.size + number % _ENTRIES * _ENTRY.size
