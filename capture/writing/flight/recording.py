"""Keep the last calls in a ring in memory, and write them as a whole trace when something happens."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from opgrip.capture.recording.recorder import Recorder
from opgrip.capture.recording.scope_table import PAIR
from opgrip.capture.writing.blocks import Blocks, CallBlock
from opgrip.capture.writing.flight.definitions import Definitions
from opgrip.capture.writing.flusher import Flusher
from opgrip.traces.io.writer import TraceWriter, encode_line
from opgrip.traces.schema.records import Entered, Record, Scope, Signature, Thread


class Ring:
    """The calls that ended last, of all threads together.

    Parameters
    ----------
    last : how many are kept
    """

    def __init__(self, last: int) -> None:
        self.last = last
        self._blocks: list[CallBlock] = []

    def __len__(self) -> int:
        return sum(map(len, self._blocks))

    def add(self, blocks: list[CallBlock]) -> list[CallBlock]:
        """Keep calls in the order in which each thread made them; gives those that no longer have room."""
        self._blocks += blocks
        surplus = len(self) - self.last
        if surplus <= 0:
            return []
        ends = np.concatenate([block.calls[:, 2] for block in self._blocks])
        oldest_ns = int(np.partition(ends, surplus)[surplus])
        forgotten, kept = [], []
        for block in self._blocks:
            # a thread's calls stand in the order of their ends
            first = int(np.searchsorted(block.calls[:, 2], oldest_ns))
            if first:
                forgotten.append(block.part(0, first))
            if first < len(block):
                kept.append(block.part(first, len(block)).copied() if first else block)
        self._blocks = kept
        return forgotten

    def take(self) -> list[CallBlock]:
        """All calls, removed."""
        blocks, self._blocks = self._blocks, []
        return blocks

    def pairs(self) -> set[int]:
        """The numbers of the calls' pairs."""
        return {number for block in self._blocks for number in np.unique(block.calls[:, 0]).tolist()}

    def modes(self) -> Iterator[int]:
        """The numbers of the modes that recorded the calls."""
        return (block.mode.number for block in self._blocks)


MOST_OF_EPOCH = {Signature: 4096, Scope: 8192, PAIR: 16384}
"""Of each, how many are met before the tables begin anew. What it takes to know a signature is some 10 kB."""
MOST_DUMPS = 8
"""For what a program survives: a service whose requests fail all day is not to fill the disk."""
SIGNAL_WAIT_S = 5.0
"""That the handler of a signal waits for another thread that writes."""

OpenDump = Callable[[int, dict[str, Any]], TraceWriter]
"""Begins a file: the number of the dump from 1, and fields of its header."""


class FlightRecorder(Flusher):
    """A thread that takes what a recorder has, and keeps the last calls.

    Parameters
    ----------
    open_dump : begins a file
    last : calls that are kept

    Attributes
    ----------
    dumps : files that were written
    left_out : how many more there would have been, had there not been enough
    """

    def __init__(self, recorder: Recorder, open_dump: OpenDump, last: int) -> None:
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

    def prepare(self) -> None:
        """Raise what keeps a file from being written by now; there is none until something happens."""
        self._open_next().discard()

    def flush(self, pause_s: float = 0.0) -> None:
        """Keep what has come since the last time. Nothing in it reaches the program."""
        if os.getpid() != self.recorder.pid or self._is_broken:
            return
        with self._turn():
            try:
                self._collect()
            except Exception as error:
                self._break(error)

    def write_running(self) -> None:
        """Nothing is written while all is well."""

    def dump(self, reason: str, always: bool = False, wait: bool = True) -> Path | None:
        """Write the calls that are kept, each once; None where there are none, or they cannot or are not to be written.

        Parameters
        ----------
        reason : as the trace's header has it
        always : also where there were enough files for what the program survives
        wait : for values that an accelerator still has
        """
        if not wait:
            # a signal's handler, which may have interrupted what the thread that writes waits for
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
                    self._fit_what_is_left()
                if self._is_broken or not self._has_calls():
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
            return path

    def dump_for_signal(self, name: str, always: bool, again: Callable[[], None]) -> bool:
        """Write them before a signal's own handler runs; whether that may run now.

        Parameters
        ----------
        always : as for `dump`
        again : sends the signal once more, for a later time: this thread is writing already
        """
        if self._holder == threading.get_ident():
            self._later = again
            return False
        # not for ever: the thread that writes may wait for what this one holds
        if self._writing.acquire(timeout=SIGNAL_WAIT_S):
            self._writing.release()
            self.dump(name, always, wait=False)
        return True

    def finish(self) -> None:
        """Nothing happened that was not written by now."""
        self.recorder.storages.close()

    @property
    def signatures(self) -> int:
        """How many are in the last file."""
        return self._signatures

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

    def _break(self, error: Exception) -> None:
        """Record no more, after a fault of the capture's own."""
        self.failure, self._is_broken = error, True
        self.recorder.stop()

    def _collect(self) -> None:
        epochs = self._epochs_in_use()
        ended = [mode for mode in self.recorder.threads.all if mode.ended]
        self._keep_calls()
        self._keep_pending()
        self.recorder.fitter.fit_deferred(self.recorder.graphs)
        for mode in ended:
            self.recorder.threads.forget(mode)
            self.blocks.forget_thread(mode.number)
        met = self.recorder.epochs
        if any(met.size(kind) >= most for kind, most in MOST_OF_EPOCH.items()):
            running = [(record.signature, record.scope) for record in self._running()]
            names = self.recorder.prune(epochs, self.ring.pairs(), running)
            self.definitions.prune(names | self._names_in_use())
            self.recorder.forget()

    def _keep_calls(self) -> None:
        blocks = self.blocks.take()
        self._seen += sum(map(len, blocks))
        for block in blocks if self.learning else self.ring.add(blocks):
            self.blocks.pass_over(block)

    def _keep_pending(self) -> None:
        self.definitions.add(self.recorder.pending.take())

    def _names_in_use(self) -> set[Hashable]:
        """What is referred to besides what the recorder knows of."""
        return set()

    def _epochs_in_use(self) -> set[int]:
        """Epochs of the recorder's tables whose numbers a thread may still use."""
        current = self.recorder.epochs.current
        epochs = {current}
        for first, last in [mode.epochs for mode in self.recorder.threads.all]:
            epochs.update(range(first, (current if last is None else last) + 1))
        return epochs

    def _running(self) -> list[Entered]:
        return [record for record in self.blocks.running() if isinstance(record, Entered)]

    def _has_calls(self) -> bool:
        return len(self.ring) > 0

    def _open_next(self) -> TraceWriter:
        return self._open_dump(len(self.dumps) + 1, self._flight(None))

    def _flight(self, reason: str | None, kept: int = 0) -> dict[str, Any]:
        """What a header says of it."""
        happened = {} if reason is None else {"reason": reason}
        return {"flight": {"last": self.ring.last, "before": self._seen - kept, **happened}}

    def _write_dump(self, reason: str) -> Path:
        blocks = self.ring.take()
        kept = sum(map(len, blocks))
        self.definitions.begin_file()
        self.blocks.begin_file()
        try:
            self.writer = writer = self._open_dump(len(self.dumps) + 1, self._flight(reason, kept))
            for block in blocks:
                self._write(self.blocks.records(block))
            self._write(self.blocks.running())
            self._close_dump(writer, self._seen - kept)
        except BaseException:
            self.ring.add(blocks)
            if self.writer is not None:
                self.writer.discard()
            raise
        finally:
            self.writer = None
        assert writer.path is not None
        return writer.path

    def _close_dump(self, writer: TraceWriter, before: int) -> None:
        self._signatures = self.definitions.file.signatures
        end = replace(self._end(self._signatures), before=before, step_starts_ns=[])
        writer.write_lines(self.definitions.encode([end]))
        writer.close()

    def _write(self, records: Iterable[Record]) -> None:
        records = list(records)
        threads = [record for record in records if isinstance(record, Thread)]
        others = [record for record in records if not isinstance(record, Thread)]
        self.definitions.add((record, encode_line(record)) for record in threads)
        self._keep_pending()
        writer = self.open()
        writer.write_lines(self.definitions.lines_for(others))
        writer.write_lines(self.definitions.encode(others))
