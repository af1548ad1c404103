"""Writes a recorder's buffers every half second, so that a killed program leaves a trace."""

from __future__ import annotations

import threading
from types import TracebackType

from opgrip.capture.recorder import Recorder

INTERVAL_S = 0.5
PAUSE_S = 50e-6


class Flusher:
    """A thread that flushes a recorder while it is entered, and finishes it at the end."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="opgrip-flusher", daemon=True)

    def __enter__(self) -> Flusher:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self.recorder.finish()

    def _run(self) -> None:
        with self.recorder.own_work():
            while not self._stop.wait(INTERVAL_S):
                self.recorder.flush(PAUSE_S)
