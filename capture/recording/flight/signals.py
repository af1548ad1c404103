"""Does something before a signal that ends the program is handled as the program has it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import FrameType, TracebackType
from typing import Any

from opgrip.capture.hooks.patches import Patches
from opgrip.hook_errors import raise_if_from_program

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
"""Those that end a program, unless it says otherwise."""


class SignalWatch:
    """While it is entered, `stopped` is called with a signal's name before the handler that the program has.

    A program that sets its handler later is asked for none the less, and sees its own where it asks. Signals that it
    ignores stay ignored, and handlers that are not Python's stay in place.

    Parameters
    ----------
    stopped : gets the name, whether the signal ends the program, and what sends it once more; whether the program's
        handler is to run now
    handled : is called where a handler of the program has returned, so that it goes on

    Attributes
    ----------
    refused : why signals are not seen; None where they are
    """

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
        if threading.current_thread() is not threading.main_thread():
            self.refused = "it did not begin in the main thread"
            return self
        self._set, self._active = signal.signal, True
        for number in STOPPING:
            self._watch(number, signal.getsignal(number))
        self._patches.replace(signal, "signal", self._watching_signal)
        self._patches.replace(signal, "getsignal", self._watching_getsignal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._active:
            return
        self._active = False
        self._patches.undo()
        for number, handler in self._own.items():
            # elsewhere than in the main thread there is no way; the handler then does as the program's would
            with suppress(ValueError):
                self._set(number, handler)

    def _watch(self, number: int, handler: Any) -> None:
        if handler == self._handle:
            # whatever the program took it for, it is what stands there already
            return
        self._own.pop(number, None)
        if handler is None or handler == signal.SIG_IGN:
            return
        self._set(number, self._handle)
        self._own[number] = handler

    def _watching_signal(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def watched(signalnum: int, handler: Any) -> Any:
            before = self._own.get(signalnum)
            # raises where the program may not, or there is no such handler
            previous = original(signalnum, handler)
            if self._active and signalnum in STOPPING:
                try:
                    self._watch(signalnum, handler)
                except Exception as error:
                    raise_if_from_program(error)
            return previous if before is None else before

        return watched

    def _watching_getsignal(self, original: Callable[..., Any]) -> Callable[..., Any]:
        # a handler may be SIG_DFL, which is 0
        return lambda signalnum: self._own[signalnum] if signalnum in self._own else original(signalnum)

    def _handle(self, number: int, frame: FrameType | None) -> Any:
        handler = self._own.get(number, signal.SIG_DFL)
        is_last = not callable(handler) or handler is signal.default_int_handler
        if self._active and not self._tell(number, is_last):
            return None
        if callable(handler):
            result = handler(number, frame)
            self._handled()
            return result
        self._set(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        return None

    def _tell(self, number: int, is_last: bool) -> bool:
        try:
            return self._stopped(signal.Signals(number).name, is_last, partial(signal.raise_signal, number))
        except Exception as error:
            # another signal may have come meanwhile
            raise_if_from_program(error)
            return True
