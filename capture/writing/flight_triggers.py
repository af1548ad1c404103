"""Events on which the flight recorder writes the latest calls: signals, failures and requests."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from opgrip.capture.program.patches import Patches
from opgrip.capture.program.processes import with_mark
from opgrip.capture.recording.recorder import Recorder
from opgrip.capture.writing.flight_recorder import FlightRecorder
from opgrip.cli.command import counted
from opgrip.errors import one_line, raise_if_from_program
from opgrip.traces.io.writer import TraceWriter
from opgrip.traces.schema.records import Header

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)  # they end a program by default


class SignalWatch:
    """A context in which the function `stopped` is called when a signal arrives, before the program's handler.

    The program may set its handler later, and `signal.getsignal` returns the program's handler. Ignored signals stay
    ignored, and handlers that are not in Python stay in place.

    stopped : gets the name, True if the signal ends the program, and a function that raises the signal again; returns
        True if the program's handler should run now
    handled : called after the program's handler has returned

    refused : reason why signals are not watched, or None
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

    def _watching_getsignal(self, original: Callable[..., Any]) -> Callable[..., Any]:
        # use `in`: a handler may be SIG_DFL, which is 0
        return lambda signalnum: self._own[signalnum] if signalnum in self._own else original(signalnum)

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
        os.kill(os.getpid(), number)
        return None

    def _notify(self, number: int, is_last: bool) -> bool:
        try:
            return self._stopped(signal.Signals(number).name, is_last, partial(signal.raise_signal, number))
        except Exception as error:
            # the exception may come from the handler of another signal
            raise_if_from_program(error)
            return True


# function that opens a trace, given its path and fields of its header
BeginFile = Callable[[Path, dict[str, Any]], TraceWriter]

# attribute of a handled error: the process and the capture, because errors can be pickled, and if calls were written
WRITTEN = "_opgrip_written"


class Flights:
    """Makes the flight recorder of a capture write the latest calls on signals, failures and requests."""

    def __init__(self, recorder: Recorder, last: int) -> None:
        self.signals = SignalWatch(self._at_signal, self._at_handled)
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
        """Return a flight recorder for this process, whose first trace gets the path `path`."""

        def open_dump(number: int, fields: dict[str, Any]) -> TraceWriter:
            return begin_file(dump_path(Path(path), number), fields)

        self._flight = FlightRecorder(self._recorder, open_dump, self._last, Path(path), make_header)
        return self._flight

    def begin(self) -> None:
        self._was_signalled = False
        self._is_active = True
        self.signals.__enter__()

    def end(self) -> None:
        self._is_active = False
        self.signals.__exit__(None, None, None)

    def dump(self, reason: str, always: bool = True) -> Path | None:
        """Write the latest calls; return the path of the trace, or None if nothing was written.

        always : True to write even if the maximum number of traces is reached
        """
        return self._flight.dump(reason, always) if self._flight is not None and self._is_active else None

    def dump_for_error(self, error: BaseException, always: bool = False) -> None:
        """Write the latest calls because an error ended a step or the program; this happens only once for each
        error.
        """
        # for an exception raised by a signal's handler, such as Ctrl-C, the calls were already written for the signal
        is_of_signal = self._was_signalled and isinstance(error, KeyboardInterrupt | SystemExit)
        if is_of_signal or not _is_failure(error):
            return
        own = (os.getpid(), id(self))
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
            more = counted(self._flight.left_out, "other time", "other times")
            yield f"nothing was written {more} that an event occurred: {len(self.dumps)} traces are the limit"

    def _at_signal(self, name: str, is_last: bool, again: Callable[[], None]) -> bool:
        if self._flight is None:
            return True
        self._was_signalled = True
        return self._flight.dump_for_signal(name, is_last, again)

    def _at_handled(self) -> None:
        self._was_signalled = False


def dump_path(path: Path, number: int) -> Path:
    """Return the path for a trace of the latest calls: `path` for the first, later ones with a number that is free."""
    if number == 1:
        return path
    while (other := with_mark(path, f"dump{number}")).exists():
        number += 1
    return other


def _is_failure(error: BaseException) -> bool:
    if isinstance(error, SystemExit):
        return error.code not in (None, 0)
    return not isinstance(error, GeneratorExit)


def _chain(error: BaseException) -> Iterator[BaseException]:
    visited: set[int] = set()
    here: BaseException | None = error
    while here is not None and id(here) not in visited:
        visited.add(id(here))
        yield here
        here = here.__cause__ or here.__context__
