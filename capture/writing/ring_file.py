"""A file, mapped into memory, that holds the last calls and all that they refer to, whatever ends the process.

What is written is in the file at once: the system writes mapped memory to the disk also after `kill -9`, a segmentation
fault or `os._exit`. `opgrip.traces.formats.flight_ring` documents the layout and reads the file as a trace.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from opgrip.cli.output_files import partial_path
from opgrip.traces.formats.flight_ring import HEAD, MAGIC

Payload = Sequence[bytes | NDArray[np.int64]]


class RingFile:
    """One file of a fixed size, to which chunks are added.

    Parameters
    ----------
    trace : the trace whose calls it has; the file stands beside it, with `.part` and the process's number in its name

    Raises
    ------
    OSError : if it cannot be created. Its space is reserved: a disk that is full later cannot hit the mapped memory
    """

    def __init__(self, trace: Path, size: int) -> None:
        stem = partial_path(trace).name.removesuffix(".gz").removesuffix(".zst").removesuffix(".jsonl")
        self.path = trace.resolve().with_name(f"{stem}.ring")
        size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        number = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            os.posix_fallocate(number, 0, size)
            self._memory = mmap.mmap(number, size)
        except BaseException:
            self.remove()
            raise
        finally:
            os.close(number)
        self._memory[: len(MAGIC)] = MAGIC
        self._end = len(MAGIC)

    def add(self, kind: int, numbers: Sequence[int], payload: Payload = ()) -> bool:
        """Add a chunk; return False if there is no room for it.

        Parameters
        ----------
        numbers : up to three integers of the chunk's head
        """
        pieces = [piece if isinstance(piece, bytes) else piece.tobytes() for piece in payload]
        start = self._end + 8 * HEAD
        end = start + -(-sum(map(len, pieces)) // 8) * 8
        # the next chunk's kind stays 0
        if end + 8 * HEAD > len(self._memory):
            return False
        memory, place = self._memory, start
        for piece in pieces:
            memory[place : place + len(piece)] = piece
            place += len(piece)
        head = np.zeros(HEAD, dtype="<i8")
        head[1 : 1 + len(numbers)] = numbers
        memory[self._end + 8 : start] = head[1:].tobytes()
        # last: only now there is a chunk
        head[0] = kind
        memory[self._end : self._end + 8] = head[:1].tobytes()
        self._end = end
        return True

    def remove(self) -> None:
        """Remove the file."""
        with suppress(OSError):
            self.path.unlink()
