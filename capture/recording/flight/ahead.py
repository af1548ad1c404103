"""Keeps the last calls in a file that does not grow, each written before it runs, to survive a crash of the process."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import replace
from pathlib import Path

from opgrip.capture.recording.flight.recording import FlightRecorder, OpenDump
from opgrip.capture.recording.recorder import Recorder
from opgrip.capture.recording.recording_limits import references_of
from opgrip.traces.io.writer import TraceWriter
from opgrip.traces.schema.records import Calls, Record


class AheadRecorder(FlightRecorder):
    """Writes every call as it comes; a file with twice as many as are kept gives way to one with the last of them.

    The new file is whole before the old one goes, so whenever the process ends there is one that can be read.
    """

    def __init__(self, recorder: Recorder, open_dump: OpenDump, last: int) -> None:
        super().__init__(recorder, open_dump, last)
        self._kept: deque[Calls] = deque()
        self._kept_calls = 0

    def prepare(self) -> None:
        """Begin the file."""
        self.open()

    def write_running(self) -> None:
        """Write which calls the threads are in."""
        if os.getpid() != self.recorder.pid or self._is_broken:
            return
        with self._turn():
            try:
                if not self.learning:
                    self._write(self.blocks.running())
                    self.open().flush()
            except Exception as error:
                self._break(error)

    def finish(self) -> None:
        """Leave no file: nothing happened that was not written by now."""
        if self.writer is not None:
            self.writer.discard()
        super().finish()

    def _keep_calls(self) -> None:
        for block in self.blocks.take():
            self._seen += len(block)
            if self.learning:
                self.blocks.pass_over(block)
            else:
                self._write(self.blocks.records(block))
        if self._kept_calls >= 2 * self.ring.last:
            self._begin_anew(None)

    def _names_in_use(self) -> set[Hashable]:
        return {name for calls in self._kept for name in references_of(calls)} | self.blocks.threads()

    def _has_calls(self) -> bool:
        return self._kept_calls > 0

    def _write(self, records: Iterable[Record]) -> None:
        records = list(records)
        super()._write(records)
        for record in records:
            if isinstance(record, Calls):
                self._kept.append(record)
                self._kept_calls += len(record.signature)

    def _begin_anew(self, reason: str | None) -> TraceWriter:
        """Begin a file with the last calls, and remove the one before."""
        while self._kept and self._kept_calls - len(self._kept[0].signature) >= self.ring.last:
            self._kept_calls -= len(self._kept.popleft().signature)
        old = self.writer
        self._count_storages_anew()
        new, before = None, self.definitions.file
        self.definitions.begin_file()
        try:
            new = self._open_dump(len(self.dumps) + 1, self._flight(reason, self._kept_calls))
            new.write_lines(self.definitions.lines_for(self._kept))
            new.write_lines(self.definitions.encode(self._kept))
            new.flush()
        except BaseException:
            if new is not None:
                new.discard()
            # the old file goes on
            self.definitions.file = before
            raise
        self.writer = new
        if old is not None:
            old.discard()
        return new

    def _count_storages_anew(self) -> None:
        """Let each block say which storages those before it in the new file have."""
        newest = -1
        for place, calls in enumerate(self._kept):
            self._kept[place] = replace(calls, newest=newest)
            newest = max(newest, max(calls.storages, default=-1))
        self.blocks.newest = newest

    def _write_dump(self, reason: str) -> Path:
        writer = self._begin_anew(reason)
        before = self._seen - self._kept_calls
        super()._write(self.blocks.running())
        self.blocks.calls = self._kept_calls
        self._close_dump(writer, before)
        self._kept.clear()
        self.writer = None
        self.definitions.begin_file()
        self.blocks.begin_file()
        # of this file, for who asks
        self.blocks.calls, self._kept_calls = self._kept_calls, 0
        assert writer.path is not None
        return writer.path
