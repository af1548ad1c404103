"""When the last calls of a program are written: what happens to it, and what it asks for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from opgrip.capture.recording.flight.ahead import AheadRecorder
from opgrip.capture.recording.flight.recording import FlightRecorder
from opgrip.capture.recording.flight.signals import SignalWatch
from opgrip.capture.recording.recorder import Recorder
from opgrip.capture.session.ranks import with_mark
from opgrip.cli.plural import counted
from opgrip.errors import one_line
from opgrip.traces.io.writer import TraceWriter

BeginFile = Callable[[Path, dict[str, Any]], TraceWriter]
"""Begins a trace: its path, and fields of its header."""

WRITTEN = "_opgrip_written"
"""Attribute of errors that were met before: by which process and capture, as errors can be pickled, and whether the
last calls were written then."""


class Flights:
    """Tells the recorder of the last calls what happens, from the beginning of a capture to its end.

    Parameters
    ----------
    last : how many are kept
    """

    def __init__(self, recorder: Recorder, last: int) -> None:
        self.signals = SignalWatch(self._at_signal, self._at_handled)
        self._recorder = recorder
        self._last = last
        self._flight: FlightRecorder | None = None
        self._was_signalled = False
        # each of its files has what its calls need, and numbers value models in its own way
        recorder.redacts_late = True

    @property
    def dumps(self) -> list[Path]:
        """The traces that were written."""
        return [] if self._flight is None else self._flight.dumps

    def recorder_to(self, path: str | Path, begin_file: BeginFile) -> FlightRecorder:
        """What keeps the calls of this process.

        Parameters
        ----------
        path : of the first trace
        """

        def open_dump(number: int, fields: dict[str, Any]) -> TraceWriter:
            return begin_file(dump_path(Path(path), number), fields)

        make = AheadRecorder if self._recorder.write_ahead else FlightRecorder
        self._flight = make(self._recorder, open_dump, self._last)
        return self._flight

    def begin(self) -> None:
        """Watch what happens to the program."""
        self._was_signalled = False
        self._recorder.module_raised = self.dump_for_error
        self.signals.__enter__()

    def end(self) -> None:
        """Watch no more."""
        self._recorder.module_raised = None
        self.signals.__exit__(None, None, None)

    def dump(self, reason: str, always: bool = True) -> Path | None:
        """Write the last calls; None where there are none, they cannot be written, or enough have been.

        Parameters
        ----------
        always : also where enough have been, as for what was asked for and what the program does not survive
        """
        return None if self._flight is None else self._flight.dump(reason, always)

    def dump_for_error(self, error: BaseException, always: bool = False) -> None:
        """Write them for an error that leaves a step or the program, once on its way."""
        # what a signal's handler raises, as for Ctrl-C, was written for the signal
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
            # not in a table: its id, and its traceback's, are those of the next one that a loop handles; held there,
            # it would hold the frames that it left, and errors of C have no weak references
            setattr(error, WRITTEN, (*own, path is not None))

    def notes(self) -> Iterator[str]:
        """What was asked for and could not be."""
        if self.signals.refused is not None:
            yield f"signals were not watched: {self.signals.refused}"
        if self._flight is not None and self._flight.left_out:
            more = counted(self._flight.left_out, "other time", "other times")
            yield f"{more} that something happened, nothing was written: {len(self.dumps)} traces are enough"

    def _at_signal(self, name: str, is_last: bool, again: Callable[[], None]) -> bool:
        if self._flight is None:
            return True
        self._was_signalled = True
        return self._flight.dump_for_signal(name, is_last, again)

    def _at_handled(self) -> None:
        self._was_signalled = False


def dump_path(path: Path, number: int) -> Path:
    """Where a dump goes: the first one to the path, others beside it under a number that is free."""
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
    """An error, and those that it came from."""
    visited: set[int] = set()
    here: BaseException | None = error
    while here is not None and id(here) not in visited:
        visited.add(id(here))
        yield here
        here = here.__cause__ or here.__context__
