"""Threads that the program starts: each gets a mode of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

from opgrip.capture.program.patches import Patches
from opgrip.capture.recording.recorder import Recorder


class ThreadWatch:
    """While it is entered, threads that are started with `threading.Thread` record their calls.

    Those that ran before are not seen, nor those of other libraries' own making.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._patches = Patches()

    def __enter__(self) -> ThreadWatch:
        self._patches.replace(threading.Thread, "start", self._watching)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._patches.undo()

    def _watching(self, start: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
        def watched(thread: threading.Thread) -> None:
            if not self.recorder.at_own_work():
                self._watch(thread)
            start(thread)

        return watched

    def _watch(self, thread: threading.Thread) -> None:
        run = thread.run

        def recorded() -> None:
            # as it was: a thread that holds itself would live on
            thread.__dict__.pop("run", None)
            mode = None
            try:
                mode = self.recorder.mode_here()
                mode.__enter__()
            except Exception as error:
                self.recorder.drop(f"thread {thread.name}", error)
                mode = None
            if mode is None:
                run()
                return
            try:
                run()
            finally:
                mode.__exit__(None, None, None)
                mode.ended = True

        thread.run = recorded  # type: ignore[method-assign]
