"""Puts what watches a program on, and takes it off."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from time import perf_counter_ns
from typing import Any

from opgrip.capture.recording.recorder import Recorder


class Watching:
    """Whether a capture's watches, and the mode of the thread that put them on, are on.

    Parameters
    ----------
    watches : in the order in which they are put on
    with_mode : records the thread that puts them on; else threads are recorded by others
    """

    def __init__(
        self, recorder: Recorder, watches: Sequence[AbstractContextManager[Any]], with_mode: bool = True
    ) -> None:
        self.watches = watches
        self._recorder = recorder
        self._with_mode = with_mode
        self._hooks = ExitStack()
        self._is_on = False
        self._thread = 0

    def resume(self) -> None:
        """Record calls from now on."""
        self._recorder.set_idle(False)
        if self._is_on:
            return
        self._is_on, self._thread = True, threading.get_ident()
        began = perf_counter_ns()
        with ExitStack() as hooks:
            for watch in self.watches:
                hooks.enter_context(watch)
            if self._with_mode:
                hooks.enter_context(self._recorder.mode_here())
            self._hooks = hooks.pop_all()
        self._recorder.observations.spent_ns += perf_counter_ns() - began

    def pause(self) -> None:
        """Let calls pass."""
        if self._is_on:
            self._recorder.set_idle(True)
            if not self._with_mode or threading.get_ident() == self._thread:
                # a mode can be taken off by its own thread alone; elsewhere, all of it is idle from now on
                self._is_on = False
                began = perf_counter_ns()
                self._hooks.close()
                self._recorder.observations.spent_ns += perf_counter_ns() - began
