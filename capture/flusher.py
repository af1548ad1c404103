"""Writes a recorder's buffers every half second, so that a killed program leaves a trace."""

from __future__ import annotations

import os
import threading
from time import perf_counter_ns, sleep
from types import TracebackType

from opgrip.capture.blocks import Blocks
from opgrip.capture.recorder import Recorder, listed
from opgrip.traces.records import End
from opgrip.traces.writer import TraceWriter

INTERVAL_S = 0.5
PAUSE_S = 50e-6


class Flusher:
    """A thread that writes what a recorder has while it is entered, and the rest at the end.

    Attributes
    ----------
    failure : what stopped the writing, None where nothing did
    discarded : leave no file
    """

    def __init__(self, recorder: Recorder, writer: TraceWriter) -> None:
        self.recorder = recorder
        self.writer = writer
        self.failure: Exception | None = None
        self.discarded = False
        self.blocks = Blocks(recorder)
        self._writing = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="opgrip-flusher", daemon=True)

    def __enter__(self) -> Flusher:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if os.getpid() != self.recorder.pid:
            # a fork has neither the thread nor the file
            return
        self._stop.set()
        self._thread.join()
        self.finish()

    def flush(self, pause_s: float = 0.0) -> None:
        """Write what has come since the last time. Does nothing in a forked child, whose file is the parent's.

        Parameters
        ----------
        pause_s : rest after each block of calls, so that the program's threads never wait long for Python's lock:
            writing in one go would lengthen a call that it meets by the interpreter's switch interval of 5 ms
        """
        if os.getpid() != self.recorder.pid or self.failure is not None:
            return
        with self._writing:
            try:
                more = True
                while more:
                    more = False
                    for mode, rows, flows in self.blocks.take():
                        more = True
                        records = list(self.blocks.records(mode, rows, flows))
                        # after the calls are known: what they refer to is in these
                        self.writer.write_lines(self.recorder.take_pending())
                        for record in records:
                            self.writer.write(record)
                        if pause_s:
                            sleep(pause_s)
                self.writer.write_lines(self.recorder.take_pending())
                self.writer.flush()
            except Exception as error:
                self.failure = error

    def write_running(self) -> None:
        """Write which calls the threads are in."""
        with self._writing:
            try:
                records = list(self.blocks.running())
                self.writer.write_lines(self.recorder.take_pending())
                for record in records:
                    self.writer.write(record)
                self.writer.flush()
            except Exception as error:
                self.failure = error

    def finish(self) -> None:
        """Write all that is left and the closing record; or leave no file, where the capture was discarded."""
        if self.discarded:
            self.writer.discard()
            return
        self.flush()
        if self.failure is not None:
            return
        recorder = self.recorder
        end = End(
            calls=self.blocks.calls,
            signatures=recorder.signatures_closed,
            duration_ns=perf_counter_ns() - recorder.started_ns,
            dropped=listed(recorder.dropped),
            passed_by=listed(recorder.passed_by),
            without_values=listed(recorder.without_values),
        )
        try:
            self.writer.write(end)
            self.writer.close()
        except Exception as error:
            self.failure = error
        recorder.storages.close()

    def _run(self) -> None:
        with self.recorder.own_work():
            while not self._stop.wait(INTERVAL_S):
                self.flush(PAUSE_S)
                self.recorder.storages.sweep()
                self.write_running()
