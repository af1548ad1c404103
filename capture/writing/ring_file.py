"""A memory-mapped file with the latest calls and all records to which they refer, which remains if the process dies.

The system writes mapped memory to the disk even after `kill -9`, a segmentation fault or `os._exit`.
`opgrip.traces.formats.flight_ring` documents the layout and reads the file as a trace.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from opgrip.capture.recording.scope_table import FIRST_PAIR
from opgrip.capture.recording.thread_mode import ThreadCalls, ThreadMode
from opgrip.capture.writing.definitions import Pending
from opgrip.cli.output_files import partial_path
from opgrip.traces.formats import flight_ring
from opgrip.traces.formats.flight_ring import HEAD, MAGIC
from opgrip.traces.io.writer import encode_line
from opgrip.traces.schema.records import Entered, Header, Record, Thread

if TYPE_CHECKING:
    from opgrip.capture.writing.flight_recorder import FlightRecorder

LEAST_BYTES = 1 << 20  # number of bytes in a new file in addition to twice the size of the kept data

Payload = Sequence[bytes | NDArray[np.int64]]


class RingFile:
    """A file of fixed size to which chunks are added, which remains readable if the process dies.

    trace : path of the trace; the file is in the same folder, with `.part` and the process id in its name
    size : minimum size of the file in bytes

    Raises OSError if the file cannot be created or its disk space cannot be reserved.
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
        """Add a chunk to the file; return False if it does not fit.

        kind : kind of the chunk, see `opgrip.traces.formats.flight_ring`
        numbers : up to three integers for the head of the chunk
        payload : content of the chunk
        """
        pieces = [piece if isinstance(piece, bytes) else piece.tobytes() for piece in payload]
        start = self._end + 8 * HEAD
        end = start + -(-sum(map(len, pieces)) // 8) * 8
        # leave space for the kind 0 of the next chunk, which marks the end
        if end + 8 * HEAD > len(self._memory):
            return False
        memory, place = self._memory, start
        for piece in pieces:
            memory[place : place + len(piece)] = piece
            place += len(piece)
        head = np.zeros(HEAD, dtype="<i8")
        head[1 : 1 + len(numbers)] = numbers
        memory[self._end + 8 : start] = head[1:].tobytes()
        # write the kind last; only then is the chunk valid
        head[0] = kind
        memory[self._end : self._end + 8] = head[:1].tobytes()
        self._end = end
        return True

    def remove(self) -> None:
        with suppress(OSError):
            self.path.unlink()


class RingMirror:
    """Keeps a copy of a flight recorder's data in a ring file, which is replaced when it is full.

    A new file is complete before the old one is removed, so that a readable file always exists. If writing fails, the
    error becomes the recorder's `failure`, and the latest calls are only in memory.

    path : path of the trace, next to which the ring file lies
    make_header : returns the header of a trace with some fields added
    """

    def __init__(self, flight: FlightRecorder, path: Path, make_header: Callable[[dict[str, Any]], Header]) -> None:
        self._flight, self._path, self._make_header = flight, path, make_header
        self._file: RingFile | None = None
        self._redaction: Any = None
        self._threads: set[int] = set()
        self._next_pair: int | None = None
        self._had_running = False

    def add(self, pending: list[Pending], blocks: list[ThreadCalls]) -> None:
        """Add records to the ring file, and then the calls that refer to them."""
        if self._flight.failure is not None or not (pending or blocks):
            return
        file = self._file
        try:
            # a new file already contains all of this
            if blocks if file is None else not self._add_to(file, pending, blocks):
                self._begin(sum(block.calls.nbytes + block.flows.nbytes for block in blocks))
        except OSError as error:
            self._fail(error)

    def add_running(self) -> None:
        if self._file is None:
            return
        running = list(self._flight.blocks.entered())
        if not running and not self._had_running:
            return
        self._had_running = bool(running)
        try:
            if not self._add_running(self._file, running):
                self._begin(0)
                self._add_running(self._file, running)
        except OSError as error:
            self._fail(error)

    def remove(self) -> None:
        """Remove the ring file; the next calls start a new one."""
        file, self._file = self._file, None
        if file is not None:
            file.remove()

    def _fail(self, error: OSError) -> None:
        self._flight.failure = error
        self.remove()

    def _add_running(self, file: RingFile, running: list[tuple[ThreadMode, Entered]]) -> bool:
        lines = self._encode([entered for _, entered in running])
        has_threads = all(self._add_thread(file, mode) for mode, _ in running)
        return has_threads and self._add_pairs(file) and file.add(flight_ring.RUNNING, [len(lines)], [lines])

    def _add_to(self, file: RingFile, pending: list[Pending], blocks: list[ThreadCalls]) -> bool:
        lines = b"".join(text for _, text in pending)
        if self._redaction is not None:
            lines = self._encode([record for record, _ in pending])
        return (
            self._add_lines(file, lines)
            and self._add_pairs(file)
            and all(self._add_block(file, item) for item in blocks)
        )

    def _begin(self, more_bytes: int) -> None:
        """Start a new ring file with all data that is kept; it has space for `more_bytes` bytes in addition."""
        flight, old = self._flight, self._file
        recorder = flight.recorder
        self._redaction, self._threads, self._next_pair = flight.definitions.make_redaction(), set(), None
        header = encode_line(self._make_header({"flight": {"last": flight.ring.last, "before": 0}}))
        lines = header + flight.definitions.all_lines(self._redaction)
        blocks = flight.ring.blocks
        size = (
            len(lines)
            + 32 * len(recorder.scopes.pairs)
            + sum(block.calls.nbytes + block.tensors.nbytes + block.flows.nbytes + 512 for block in blocks)
        )
        file = RingFile(self._path, 2 * (size + more_bytes) + LEAST_BYTES)
        before = flight._seen - len(flight.ring)
        file.add(flight_ring.START, [flight.ring.last, recorder.started_ns, before])
        self._add_lines(file, lines)
        self._add_pairs(file)
        for block in blocks:
            self._add_block(file, block)
        self._file = file
        if old is not None:
            old.remove()

    def _add_lines(self, file: RingFile, lines: bytes) -> bool:
        return not lines or file.add(flight_ring.LINES, [len(lines)], [lines])

    def _add_pairs(self, file: RingFile) -> bool:
        """Add the pairs of signature and scope that the file does not contain yet."""
        pairs, rows = self._flight.recorder.scopes.pairs, []
        if self._next_pair is None:
            rows = [(number, *pair) for number, pair in list(pairs.items())]
            self._next_pair = 1 + max(pairs, default=FIRST_PAIR - 1)
        while self._next_pair in pairs:
            rows.append((self._next_pair, *pairs[self._next_pair]))
            self._next_pair += 1
        return not rows or file.add(flight_ring.PAIRS, [len(rows)], [np.array(rows, dtype=np.int64)])

    def _add_block(self, file: RingFile, block: ThreadCalls) -> bool:
        numbers = [block.mode.number, len(block), len(block.flows)]
        payload: Payload = [block.calls, block.tensors, block.flows]
        return self._add_thread(file, block.mode) and file.add(flight_ring.CALLS, numbers, payload)

    def _add_thread(self, file: RingFile, mode: ThreadMode) -> bool:
        if mode.number in self._threads:
            return True
        self._threads.add(mode.number)
        return self._add_lines(file, self._encode([Thread(mode.number, mode.thread_name)]))

    def _encode(self, records: Iterable[Record]) -> bytes:
        return self._flight.definitions.encode(records, self._redaction)
