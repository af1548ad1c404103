"""A flight recorder, which keeps the latest calls and writes them when something goes wrong, or on request."""

from __future__ import annotations

import errno
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from ctypes import memmove
from dataclasses import replace
from functools import partial
from mmap import PAGESIZE
from os import getpid, kill, posix_fallocate
from pathlib import Path
from threading import current_thread, get_ident, main_thread
from types import FrameType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import UntypedStorage

from opgrip.capture.program.patches import Patches
from opgrip.capture.program.processes import with_mark
from opgrip.capture.recording.recorder import Recorder
from opgrip.capture.recording.scope_table import FIRST_PAIR, PAIR
from opgrip.capture.recording.thread_mode import ThreadCalls, ThreadMode
from opgrip.capture.writing.blocks import Blocks
from opgrip.capture.writing.definitions import Definitions, Pending
from opgrip.capture.writing.flusher import Flusher
from opgrip.cli.command import counted
from opgrip.cli.output_files import partial_path
from opgrip.errors import one_line, raise_if_from_program
from opgrip.traces.formats import flight_ring
from opgrip.traces.formats.flight_ring import HEAD, MAGIC
from opgrip.traces.io.writer import TraceWriter, encode_line
from opgrip.traces.schema.records import Entered, Header, Record, Scope, Signature, Thread

# numbers of records of each kind after which the tables are cleared; a known signature takes about 10 kB
MOST_OF_GENERATION = {Signature: 4096, Scope: 8192, PAIR: 16384}
MOST_DUMPS = 8  # maximum number of traces for events that the program survives, because a service may fail continually
SIGNAL_WAIT_S = 5.0  # maximum time in seconds that a signal handler waits for another thread that is writing

# function that opens a trace, given its path and fields of its header
BeginFile = Callable[[Path, dict[str, Any]], TraceWriter]


LEAST_BYTES = 1 << 20  # number of bytes in a new file in addition to twice the size of the kept data

Payload = Sequence[bytes | NDArray[np.int64]]


class RingFile:
    """A file of fixed size that holds recent calls and remains readable if the process dies."""

    def __init__(self, trace: Path, size: int) -> None:
        stem = partial_path(trace).name.removesuffix(".gz").removesuffix(".zst").removesuffix(".jsonl")
        self.path = trace.resolve().with_name(f"{stem}.ring")
        size = -(-size // PAGESIZE) * PAGESIZE
        file = self.path.open("xb")
        try:
            with file:
                posix_fallocate(file.fileno(), 0, size)
            # `mmap` would keep a descriptor, which the program may close and use again
            self._storage = UntypedStorage.from_file(str(self.path), True, size)
        except BaseException as error:
            self.remove()
            if isinstance(error, RuntimeError | ValueError):
                raise OSError(errno.ENOMEM, str(error), str(self.path)) from error
            raise
        self._size, self._end = size, len(MAGIC)
        self._write(0, MAGIC)

    def add(self, kind: int, numbers: Sequence[int], payload: Payload = ()) -> bool:
        """Add a piece of data to the file; return False if it does not fit."""
        pieces = [piece if isinstance(piece, bytes) else piece.tobytes() for piece in payload]
        start = self._end + 8 * HEAD
        end = start + -(-sum(map(len, pieces)) // 8) * 8
        # leave space for the kind 0 of the next chunk, which marks the end
        if end + 8 * HEAD > self._size:
            return False
        place = start
        for piece in pieces:
            self._write(place, piece)
            place += len(piece)
        head = np.zeros(HEAD, dtype="<i8")
        head[1 : 1 + len(numbers)] = numbers
        self._write(self._end + 8, head[1:].tobytes())
        # write the kind last; only then is the chunk valid
        head[0] = kind
        self._write(self._end, head[:1].tobytes())
        self._end = end
        return True

    def _write(self, place: int, data: bytes) -> None:
        memmove(self._storage.data_ptr() + place, data, len(data))

    def remove(self) -> None:
        with suppress(OSError):
            self.path.unlink()


class Ring:
    """The latest calls of a recording, in memory and in a ring file, which is replaced when it is full."""

    def __init__(
        self,
        recorder: Recorder,
        definitions: Definitions,
        last: int,
        path: Path,
        make_header: Callable[[dict[str, Any]], Header],
    ) -> None:
        self.last, self.seen = last, 0
        self.blocks: list[ThreadCalls] = []
        self._recorder, self._definitions = recorder, definitions
        self._path, self._make_header = path, make_header
        self._file: RingFile | None = None
        self._redaction: Any = None
        self._threads: set[int] = set()
        self._next_pair: int | None = None
        self._had_running = False

    def __len__(self) -> int:
        return sum(map(len, self.blocks))

    def add(self, blocks: list[ThreadCalls]) -> list[ThreadCalls]:
        """Add calls; remove and return the oldest ones above the limit."""
        self.blocks += blocks
        surplus = len(self) - self.last
        if surplus <= 0:
            return []
        ends = np.concatenate([block.calls[:, 2] for block in self.blocks])
        oldest_ns = int(np.partition(ends, surplus)[surplus])
        forgotten, remaining = [], []
        for block in self.blocks:
            # a thread's calls are in the order of their ends
            first = int(np.searchsorted(block.calls[:, 2], oldest_ns))
            if first:
                forgotten.append(block.part(0, first))
            if first < len(block):
                remaining.append(block.part(first, len(block)).copied() if first else block)
        self.blocks = remaining
        return forgotten

    def pairs(self) -> set[int]:
        return {number for block in self.blocks for number in np.unique(block.calls[:, 0]).tolist()}

    def write(self, pending: list[Pending], blocks: list[ThreadCalls]) -> None:
        """Write records and added calls to the file; the file begins with the first calls."""
        if not (pending or blocks):
            return
        file = self._file
        # a new file already contains all of this
        if blocks if file is None else not self._add_to(file, pending, blocks):
            self._begin(sum(block.calls.nbytes + block.flows.nbytes for block in blocks))

    def write_running(self, running: list[tuple[ThreadMode, Entered]]) -> None:
        if self._file is None or not (running or self._had_running):
            return
        self._had_running = bool(running)
        if not self._add_running(self._file, running):
            self._begin(0)
            self._add_running(self._file, running)

    def clear(self) -> None:
        self.blocks = []
        self.remove_file()

    def remove_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.remove()

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
        recorder, old = self._recorder, self._file
        self._redaction, self._threads, self._next_pair = self._definitions.make_redaction(), set(), None
        header = encode_line(self._make_header({"flight": {"last": self.last, "before": 0}}))
        lines = header + self._definitions.all_lines(self._redaction)
        size = (
            len(lines)
            + 32 * len(recorder.scopes.pairs)
            + sum(block.calls.nbytes + block.tensors.nbytes + block.flows.nbytes + 512 for block in self.blocks)
        )
        file = RingFile(self._path, 2 * (size + more_bytes) + LEAST_BYTES)
        file.add(flight_ring.START, [self.last, recorder.started_ns, self.seen - len(self)])
        self._add_lines(file, lines)
        self._add_pairs(file)
        for block in self.blocks:
            self._add_block(file, block)
        self._file = file
        if old is not None:
            old.remove()

    def _add_lines(self, file: RingFile, lines: bytes) -> bool:
        return not lines or file.add(flight_ring.LINES, [len(lines)], [lines])

    def _add_pairs(self, file: RingFile) -> bool:
        pairs, rows = self._recorder.scopes.pairs, []
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
        return self._definitions.encode(records, self._redaction)


class FlightRecorder(Flusher):
    """A writing thread that keeps only the latest calls, and writes them when asked."""

    def __init__(
        self,
        recorder: Recorder,
        begin_file: BeginFile,
        last: int,
        path: Path,
        make_header: Callable[[dict[str, Any]], Header],
    ) -> None:
        super().__init__(recorder, self._open_next)
        self.blocks = Blocks(recorder, looks=False)
        self.definitions = Definitions(recorder.privacy)
        self.ring = Ring(recorder, self.definitions, last, path, make_header)
        self.dumps: list[Path] = []
        self.left_out = 0
        self._begin_file, self._path = begin_file, path
        self._survived = self._signatures = 0
        self._is_broken = False
        self._holder: int | None = None
        self._later: Callable[[], None] | None = None

    def prepare(self) -> None:
        self._open_next().discard()

    def flush(self, pause_s: float = 0.0) -> None:
        if getpid() != self.recorder.pid or self._is_broken:
            return
        with self._turn():
            try:
                self._collect()
            except Exception as error:
                # stop recording after an internal error
                self.failure, self._is_broken = error, True
                self.recorder.stop()

    def write_running(self) -> None:
        if getpid() == self.recorder.pid and not self._is_broken and not self.learning:
            with self._turn(), self._ring_file():
                self.ring.write_running(list(self.blocks.entered()))

    def dump(self, reason: str, always: bool = False, wait: bool = True) -> Path | None:
        """Write the latest calls that are not in an earlier trace, and return the new trace's path.

        always : True to write even if `MOST_DUMPS` traces were written
        wait : True to let the writing thread write; False to write in this thread, as a signal handler must
        """
        if not wait:
            # this is a signal handler, which may have interrupted code that the writing thread waits for
            return self._dump(reason, always, wait)
        paths: list[Path | None] = []
        self.run_job(lambda: paths.append(self._dump(reason, always, wait)))
        return next(iter(paths), None)

    def _dump(self, reason: str, always: bool, wait: bool) -> Path | None:
        if getpid() != self.recorder.pid:
            return None
        with self._turn():
            try:
                self._collect()
                if wait:
                    self._fit_deferred(wait=True)
                if self._is_broken or not len(self.ring):
                    return None
                if not always:
                    if self._survived >= MOST_DUMPS:
                        self.left_out += 1
                        return None
                    self._survived += 1
                path = self._write_dump(reason)
            except Exception as error:
                self.failure = error
                return None
            self.dumps.append(path)
            # each call is in only one trace
            self.ring.clear()
            return path

    def dump_for_signal(self, name: str, always: bool, again: Callable[[], None]) -> bool:
        if self._holder == get_ident():
            self._later = again
            return False
        # do not wait forever: the writing thread may need a lock that this thread holds
        if self._writing.acquire(timeout=SIGNAL_WAIT_S):
            self._writing.release()
            self.dump(name, always, wait=False)
        return True

    def finish(self) -> None:
        self.ring.remove_file()
        self.recorder.storages.close()

    @property
    def calls(self) -> int:
        return self.blocks.own_written

    @property
    def signatures(self) -> int:
        return self._signatures - len(self.blocks.marks)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        with self._writing:
            self._holder = get_ident()
            try:
                yield
            finally:
                self._holder = None
        later, self._later = self._later, None
        if later is not None:
            later()

    def _collect(self) -> None:
        recorder = self.recorder
        generations = self._generations_in_use()
        ended = [mode for mode in recorder.threads.all if mode.ended]
        blocks = self.blocks.take()
        # take pending records after the calls, so that they include everything the calls refer to
        pending = self._take_pending()
        self.ring.seen += sum(map(len, blocks))
        forgotten = blocks if self.learning else self.ring.add(blocks)
        self._keep(pending, [] if self.learning else blocks)
        for block in forgotten:
            self.blocks.pass_over(block)
        self._fit_deferred()
        for mode in ended:
            recorder.threads.forget(mode)
            self.blocks.forget_thread(mode.number)
        if any(recorder.generations.size(kind) >= most for kind, most in MOST_OF_GENERATION.items()):
            running = [(entered.signature, entered.scope) for _, entered in self.blocks.entered()]
            self.definitions.prune(recorder.prune(generations, self.ring.pairs(), running))
            recorder.forget()

    def _take_pending(self) -> list[Pending]:
        pending = self.recorder.pending.take()
        self.definitions.add(pending)
        return pending

    def _keep(self, pending: list[Pending], blocks: list[ThreadCalls]) -> None:
        if self.failure is None:
            with self._ring_file():
                self.ring.write(pending, blocks)

    @contextmanager
    def _ring_file(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.failure = error
            self.ring.remove_file()

    def _generations_in_use(self) -> set[int]:
        current = self.recorder.generations.current
        generations = {current}
        for first, last in [mode.generations for mode in self.recorder.threads.all]:
            generations.update(range(first, (current if last is None else last) + 1))
        return generations

    def _open_next(self, reason: str | None = None, calls: int = 0) -> TraceWriter:
        happened = {} if reason is None else {"reason": reason}
        flight = {"last": self.ring.last, "before": self.ring.seen - calls, **happened}
        return self._begin_file(dump_path(self._path, len(self.dumps) + 1), {"flight": flight})

    def _write_dump(self, reason: str) -> Path:
        calls = len(self.ring)
        self.definitions.begin_file()
        self.blocks.begin_file()
        try:
            self.writer = writer = self._open_next(reason, calls)
            for block in self.ring.blocks:
                self._write(self.blocks.records(block))
            self._write(self.blocks.running())
            file = self.definitions.file
            self._signatures = file.signatures
            end = replace(self._end(self._signatures), before=self.ring.seen - calls, step_starts_ns=[])
            writer.write_lines(self.definitions.encode([end], file.redaction))
            writer.close()
        except BaseException:
            if self.writer is not None:
                self.writer.discard()
            raise
        finally:
            self.writer = None
        assert writer.path is not None
        return writer.path

    def _write(self, records: Iterable[Record]) -> None:
        records = list(records)
        threads = [record for record in records if isinstance(record, Thread)]
        others = [record for record in records if not isinstance(record, Thread)]
        self.definitions.add((record, encode_line(record)) for record in threads)
        self._keep(self._take_pending(), [])
        writer = self.open()
        writer.write_lines(self.definitions.lines_for(others))
        writer.write_lines(self.definitions.encode(others, self.definitions.file.redaction))


STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)  # they end a program by default


class SignalWatch:
    """A context that calls `stopped` if a signal in `STOPPING` arrives, unless the program ignores this signal."""

    def __init__(
        self, stopped: Callable[[str, bool, Callable[[], None]], bool], handled: Callable[[], None] = lambda: None
    ) -> None:
        self.refused: str | None = None
        self._stopped = stopped
        self._handled = handled
        self._own: dict[int, Any] = {}
        self._patches = Patches()
        self._set = signal.signal
        self._active = False

    def __enter__(self) -> SignalWatch:
        if current_thread() is not main_thread():
            self.refused = "the capture did not begin in the main thread"
            return self
        self._set, self._active = signal.signal, True
        for number in STOPPING:
            self._watch(number, signal.getsignal(number))
        self._patches.replace(signal, "signal", self._watching_signal)
        # use `in`: a handler may be SIG_DFL, which is 0
        known = lambda get: lambda number: self._own[number] if number in self._own else get(number)  # noqa: E731
        self._patches.replace(signal, "getsignal", known)
        return self

    def __exit__(self, *ignored: object) -> None:
        if not self._active:
            return
        self._active = False
        self._patches.undo()
        for number, handler in self._own.items():
            # impossible outside the main thread; the handler then calls the program's handler
            with suppress(ValueError):
                self._set(number, handler)

    def _watch(self, number: int, handler: Any) -> None:
        if handler == self._handle:
            # the program set the handler that is already in place
            return
        self._own.pop(number, None)
        if handler is None or handler == signal.SIG_IGN:
            return
        self._set(number, self._handle)
        self._own[number] = handler

    def _watching_signal(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def watched(signalnum: int, handler: Any) -> Any:
            before = self._own.get(signalnum)
            # raises an error if this is not the main thread or the handler is invalid
            previous = original(signalnum, handler)
            if self._active and signalnum in STOPPING:
                try:
                    self._watch(signalnum, handler)
                except Exception as error:
                    raise_if_from_program(error)
            return previous if before is None else before

        return watched

    def _handle(self, number: int, frame: FrameType | None) -> Any:
        handler = self._own.get(number, signal.SIG_DFL)
        is_last = not callable(handler) or handler is signal.default_int_handler
        if self._active and not self._notify(number, is_last):
            return None
        if callable(handler):
            result = handler(number, frame)
            self._handled()
            return result
        self._set(number, signal.SIG_DFL)
        kill(getpid(), number)
        return None

    def _notify(self, number: int, is_last: bool) -> bool:
        try:
            return self._stopped(signal.Signals(number).name, is_last, partial(signal.raise_signal, number))
        except Exception as error:
            # the exception may come from the handler of another signal
            raise_if_from_program(error)
            return True


# attribute of a handled error: the process and the capture, because errors can be pickled, and if calls were written
WRITTEN = "_opgrip_written"


class Flights:
    def __init__(self, recorder: Recorder, last: int) -> None:
        self.signals = SignalWatch(self._at_signal, lambda: setattr(self, "_was_signalled", False))
        self._recorder = recorder
        self._last = last
        self._flight: FlightRecorder | None = None
        self._was_signalled = False
        self._is_active = False

    @property
    def dumps(self) -> list[Path]:
        return [] if self._flight is None else self._flight.dumps

    def recorder_to(
        self, path: str | Path, begin_file: BeginFile, make_header: Callable[[dict[str, Any]], Header]
    ) -> FlightRecorder:
        self._flight = FlightRecorder(self._recorder, begin_file, self._last, Path(path), make_header)
        return self._flight

    def begin(self) -> None:
        self._was_signalled = False
        self._is_active = True
        self.signals.__enter__()

    def end(self) -> None:
        self._is_active = False
        self.signals.__exit__(None, None, None)

    def dump(self, reason: str, always: bool = True) -> Path | None:
        return self._flight.dump(reason, always) if self._flight is not None and self._is_active else None

    def dump_for_error(self, error: BaseException, always: bool = False) -> None:
        # for an exception raised by a signal's handler, such as Ctrl-C, the calls were already written for the signal
        is_of_signal = self._was_signalled and isinstance(error, KeyboardInterrupt | SystemExit)
        is_exit = error.code in (None, 0) if isinstance(error, SystemExit) else isinstance(error, GeneratorExit)
        if is_of_signal or is_exit:
            return
        own = (getpid(), id(self))
        marks: list[tuple[Any, ...]] = [getattr(item, WRITTEN, ()) for item in _chain(error)]
        was_written = [mark[2] for mark in marks if mark[:2] == own]
        if any(was_written) or (was_written and not always):
            return
        path = self.dump(one_line(error), always)
        with suppress(Exception):
            # Mark the error itself. In a table, its id or its traceback's id could be reused by the next error of a
            # loop, a reference would keep the frames it left alive, and errors implemented in C have no weak
            # references.
            setattr(error, WRITTEN, (*own, path is not None))

    def notes(self) -> Iterator[str]:
        if self.signals.refused is not None:
            yield f"signals were not watched: {self.signals.refused}"
        if self._flight is not None and self._flight.left_out:
            more = counted(self._flight.left_out, "more event")
            yield f"no trace was written for {more}: the limit of {len(self.dumps)} traces was reached"

    def _at_signal(self, name: str, is_last: bool, again: Callable[[], None]) -> bool:
        if self._flight is None:
            return True
        self._was_signalled = True
        return self._flight.dump_for_signal(name, is_last, again)


def dump_path(path: Path, number: int) -> Path:
    if number == 1:
        return path
    while (other := with_mark(path, f"dump{number}")).exists():
        number += 1
    return other


def _chain(error: BaseException) -> Iterator[BaseException]:
    visited: set[int] = set()
    here: BaseException | None = error
    while here is not None and id(here) not in visited:
        visited.add(id(here))
        yield here
        here = here.__cause__ or here.__context__
