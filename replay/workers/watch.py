"""Which case a worker is at and since when, in memory that its supervisor sees."""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from time import monotonic_ns

NOTHING = -1
_FORM = struct.Struct("qqq")


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

    Parameters
    ----------
    file : descriptor of the file that it lies in, which the worker inherits
    """

    def __init__(self, file: int) -> None:
        if os.fstat(file).st_size < _FORM.size:
            os.truncate(file, _FORM.size)
        self.file = file
        self._memory = mmap.mmap(file, _FORM.size)

    def entered(self, case: int, row: int) -> None:
        """Something of a case begins."""
        _FORM.pack_into(self._memory, 0, case, row, monotonic_ns())

    def mark_idle(self) -> None:
        """No case runs."""
        self.entered(NOTHING, NOTHING)

    def read(self) -> At:
        """Where the worker is."""
        return At(*_FORM.unpack_from(self._memory, 0))
