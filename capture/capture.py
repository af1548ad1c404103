"""`Capture`: watches a block of a program and writes what it runs to a trace."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import nn

from opgrip.capture.dispatch import RecordingMode
from opgrip.capture.environment import describe_environment
from opgrip.capture.extensions import KNOWN_EXTENSIONS, ExtensionWatch
from opgrip.capture.flusher import Flusher
from opgrip.capture.recorder import Recorder
from opgrip.capture.scopes import ScopeWatch
from opgrip.traces.errors import UserError
from opgrip.traces.records import Header
from opgrip.traces.writer import TraceWriter


class Capture:
    """Records every operator call of the block, its extension functions' calls, and their scopes.

    ::

        with Capture("step.jsonl"):
            model(images)

    Parameters
    ----------
    path : the trace file, compressed where it ends in `.gz` or `.zst`; `-` for standard output
    model : the module that module paths begin at; else each outermost module that is called begins its own
    extensions : names of extension modules whose functions are recorded, where the program has loaded them
    details : fields to add to the trace's header
    force : replace an existing file

    Attributes
    ----------
    calls, signatures, dropped : after the block, how many calls were recorded, how many distinct ones there were,
        and how many could not be recorded
    bytes_written : size of the trace before compression

    Raises
    ------
    UserError : when entered, where the file exists or cannot be written, or the capture is running already

    Whatever goes wrong later is a warning at the end of the block, and never reaches the program.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        model: nn.Module | None = None,
        extensions: Iterable[str] = KNOWN_EXTENSIONS,
        details: Mapping[str, Any] | None = None,
        force: bool = False,
    ) -> None:
        self.path = path
        self.calls = self.signatures = self.dropped = self.bytes_written = 0
        self.failure: Exception | None = None
        self._model = model
        self._extensions = tuple(extensions)
        self._details = dict(details or {})
        self._force = force
        self._hooks = ExitStack()
        self._recorder: Recorder | None = None
        self._flusher: Flusher | None = None
        self._entered = False

    def discard(self) -> None:
        """Leave no file at the end of the block; an older one of that name stays."""
        if self._flusher is not None:
            self._flusher.discarded = True

    def __enter__(self) -> Capture:
        if self._entered:
            raise UserError(f"the capture to {self.path} is already running", "make another Capture for an inner block")
        header = Header(describe_environment() | self._details)
        recorder = self._recorder = Recorder(RecordingMode)
        self._flusher = Flusher(recorder, TraceWriter(self.path, header, self._force))
        with ExitStack() as hooks:
            hooks.enter_context(self._flusher)
            hooks.enter_context(ScopeWatch(recorder, self._model))
            hooks.enter_context(ExtensionWatch(recorder, self._extensions))
            hooks.enter_context(recorder.mode_here())
            self._hooks = hooks.pop_all()
        self._entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._entered = False
        self._hooks.__exit__(kind, error, traceback)
        recorder = self._recorder
        assert recorder is not None
        self.calls, self.signatures = self._flusher.blocks.calls, recorder.signatures
        self.dropped = sum(recorder.dropped.values())
        self.bytes_written = self._flusher.writer.bytes_written
        self.failure = self._flusher.failure
        if self.failure is not None:
            warnings.warn(f"the trace {self.path} could not be written: {self.failure}", RuntimeWarning, stacklevel=2)
