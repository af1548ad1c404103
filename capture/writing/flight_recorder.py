"""A flight recorder: it keeps the latest calls in memory and in a ring file, and writes them as a trace on some events.

The latest calls can be read however the process ends. While Python runs, they are written as a trace. If the process
dies (`kill -9`, a segmentation fault, `os._exit`), its ring file remains and can be read like a trace. The ring file
may lack the calls of the last half second; with `write_ahead` it has all calls. It is removed when the recording ends.

A call only costs the copying of its integers, because records are created when a trace is written.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from opgrip.capture.recording.recorder import Recorder
from opgrip.capture.recording.scope_table import PAIR
from opgrip.capture.recording.thread_mode import ThreadCalls
from opgrip.capture.writing.blocks import Blocks
from opgrip.capture.writing.definitions import Definitions, Pending
from opgrip.capture.writing.flusher import Flusher
from opgrip.capture.writing.ring_file import RingMirror
from opgrip.traces.io.writer import TraceWriter, encode_line
from opgrip.traces.schema.records import Header, Record, Scope, Signature, Thread

# numbers of records of each kind after which the tables are cleared; a known signature takes about 10 kB
MOST_OF_GENERATION = {Signature: 4096, Scope: 8192, PAIR: 16384}
# maximum number of traces for events that the program survives, so that a service in which requests fail continually
# does not fill the disk
MOST_DUMPS = 8
SIGNAL_WAIT_S = 5.0  # maximum time in seconds that a signal handler waits for another thread that is writing

# function that opens a trace, given the number of the trace (from 1) and fields of its header
OpenDump = Callable[[int, dict[str, Any]], TraceWriter]


class Ring:
    """The latest calls of all threads, up to a maximum number."""

    def __init__(self, last: int) -> None:
        self.last = last
        self.blocks: list[ThreadCalls] = []

    def __len__(self) -> int:
        return sum(map(len, self.blocks))

    def add(self, blocks: list[ThreadCalls]) -> list[ThreadCalls]:
        """Add calls, in the order in which each thread made them; remove and return the oldest calls beyond the
        maximum.
        """
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

    def take(self) -> list[ThreadCalls]:
        blocks, self.blocks = self.blocks, []
        return blocks

    def pairs(self) -> set[int]:
        return {number for block in self.blocks for number in np.unique(block.calls[:, 0]).tolist()}


class FlightRecorder(Flusher):
    """A writing thread that keeps the latest calls, instead of writing all calls to a file.

    open_dump : opens a trace for the latest calls
    last : number of calls to keep
    path : path of the trace, next to which the ring file lies
    make_header : returns the header of a trace with some fields added

    dumps : paths of the traces that were written
    left_out : number of traces not written because of the limit `MOST_DUMPS`
    """

    def __init__(
        self,
        recorder: Recorder,
        open_dump: OpenDump,
        last: int,
        path: Path,
        make_header: Callable[[dict[str, Any]], Header],
    ) -> None:
        super().__init__(recorder, self._open_next)
        self.blocks = Blocks(recorder, looks=False)
        self.ring = Ring(last)
        self.definitions = Definitions(recorder.privacy)
        self.dumps: list[Path] = []
        self.left_out = 0
        self._open_dump = open_dump
        self._survived = self._seen = self._signatures = 0
        self._is_broken = False
        self._holder: int | None = None
        self._later: Callable[[], None] | None = None
        self._mirror = RingMirror(self, path, make_header)

    def prepare(self) -> None:
        """Raise any error that would prevent writing a trace, by opening a file and discarding it."""
        self._open_next().discard()

    def flush(self, pause_s: float = 0.0) -> None:
        """Collect the calls that ended since the last flush. Errors do not reach the program; `pause_s` is unused."""
        if os.getpid() != self.recorder.pid or self._is_broken:
            return
        with self._turn():
            try:
                self._collect()
            except Exception as error:
                # stop recording after an internal error
                self.failure, self._is_broken = error, True
                self.recorder.stop()

    def write_running(self) -> None:
        """Write the calls that threads are running now to the ring file."""
        if os.getpid() == self.recorder.pid and not self._is_broken and not self.learning:
            with self._turn():
                self._mirror.add_running()

    def dump(self, reason: str, always: bool = False, wait: bool = True) -> Path | None:
        """Write the kept calls as a trace; return its path, or None if nothing was written.

        Calls that are already in an earlier trace are not written again.

        reason : reason to record in the trace's header
        always : True to write even if `MOST_DUMPS` traces were written
        wait : True to wait for values that are still on an accelerator
        """
        if not wait:
            # this is a signal handler, which may have interrupted code that the writing thread waits for
            return self._dump(reason, always, wait)
        paths: list[Path | None] = []
        self.run_job(lambda: paths.append(self._dump(reason, always, wait)))
        return next(iter(paths), None)

    def _dump(self, reason: str, always: bool, wait: bool) -> Path | None:
        if os.getpid() != self.recorder.pid:
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
            self._mirror.remove()
            return path

    def dump_for_signal(self, name: str, always: bool, again: Callable[[], None]) -> bool:
        """Write the kept calls before the program's handler of a signal runs; return True if the handler may run now.

        name : name of the signal
        always : as for `dump`
        again : raises the signal again; it is called later if the calls cannot be written now
        """
        if self._holder == threading.get_ident():
            self._later = again
            return False
        # do not wait forever: the writing thread may need a lock that this thread holds
        if self._writing.acquire(timeout=SIGNAL_WAIT_S):
            self._writing.release()
            self.dump(name, always, wait=False)
        return True

    def finish(self) -> None:
        """Remove the ring file at the end of the recording, because everything to keep has been written."""
        self._mirror.remove()
        self.recorder.storages.close()

    @property
    def calls(self) -> int:
        """Number of calls in the last trace, without `record_function` labels."""
        return self.blocks.own_written

    @property
    def signatures(self) -> int:
        """Number of signatures in the last trace, without `record_function` labels."""
        return self._signatures - len(self.blocks.marks)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        with self._writing:
            self._holder = threading.get_ident()
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
        pending = self._keep_pending()
        self._seen += sum(map(len, blocks))
        forgotten = blocks if self.learning else self.ring.add(blocks)
        self._mirror.add(pending, [] if self.learning else blocks)
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

    def _keep_pending(self) -> list[Pending]:
        pending = self.recorder.pending.take()
        self.definitions.add(pending)
        return pending

    def _generations_in_use(self) -> set[int]:
        """Return the generations of the recorder's tables whose numbers a thread may still use."""
        current = self.recorder.generations.current
        generations = {current}
        for first, last in [mode.generations for mode in self.recorder.threads.all]:
            generations.update(range(first, (current if last is None else last) + 1))
        return generations

    def _open_next(self) -> TraceWriter:
        return self._open_dump(len(self.dumps) + 1, self._flight(None))

    def _flight(self, reason: str | None, calls_in_trace: int = 0) -> dict[str, Any]:
        """Return the field of a trace's header that describes the flight recorder."""
        happened = {} if reason is None else {"reason": reason}
        return {"flight": {"last": self.ring.last, "before": self._seen - calls_in_trace, **happened}}

    def _write_dump(self, reason: str) -> Path:
        blocks = self.ring.take()
        calls = sum(map(len, blocks))
        self.definitions.begin_file()
        self.blocks.begin_file()
        try:
            self.writer = writer = self._open_dump(len(self.dumps) + 1, self._flight(reason, calls))
            for block in blocks:
                self._write(self.blocks.records(block))
            self._write(self.blocks.running())
            file = self.definitions.file
            self._signatures = file.signatures
            end = replace(self._end(self._signatures), before=self._seen - calls, step_starts_ns=[])
            writer.write_lines(self.definitions.encode([end], file.redaction))
            writer.close()
        except BaseException:
            self.ring.add(blocks)
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
        pending = self._keep_pending()
        self._mirror.add(pending, [])
        writer = self.open()
        writer.write_lines(self.definitions.lines_for(others))
        writer.write_lines(self.definitions.encode(others, self.definitions.file.redaction))
