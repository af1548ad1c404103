"""Results of a capture, and messages about failures and about requested data that the trace lacks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

from opgrip.capture.grip.gripping import Grips
from opgrip.capture.hooks.extensions import ExtensionWatch
from opgrip.capture.program.processes import ChildFiles
from opgrip.capture.recording.recorder import Recorder
from opgrip.capture.session.schedule import ALWAYS, Schedule
from opgrip.capture.signatures.full_values import FullValues
from opgrip.capture.writing.flight_triggers import Flights
from opgrip.capture.writing.flusher import Flusher
from opgrip.errors import UserError
from opgrip.traces.table.accelerators import time_doubts


class CaptureReport:
    """Base class of `Capture` with its results.

    Attributes
    ----------
    path : trace file
    calls, signatures, dropped : after the block, the number of recorded calls, of distinct calls, and of calls that
        could not be recorded
    marks : number of recorded `record_function` marks
    perturbed : number of calls that ran right after the capture's own work and are marked as perturbed
    doubts : reasons why the measured times are doubtful, as sentences; empty on a quiet machine
    stopped : limit that ended the recording before the program ended, or None
    bytes_written : size of the trace before compression
    failure, problem : error that kept the trace from being written, and a message that also says which part was
        written; None if writing succeeded
    full_values : after the block, the result of keeping whole values, or None if they were not requested
    child_files : after the block, traces of the forked processes that have ended; `old_child_files` are traces of an
        earlier program, which `force` removes
    dumps : with `last`, the traces that were written
    grips : gripped functions; `written` lists the samples' folders, and `refused` the reasons why functions were not
        gripped
    """

    grips: Grips
    extensions: ExtensionWatch
    _recorder: Recorder
    _flights: Flights | None
    _child_files: ChildFiles | None
    _force: bool

    def __init__(self, path: str | Path, schedule: Schedule) -> None:
        self.path, self.schedule = path, schedule
        self.calls = self.signatures = self.dropped = self.bytes_written = 0
        self.marks = self.perturbed = 0
        self.doubts: tuple[str, ...] = ()
        self.stopped: str | None = None
        self.failure: Exception | None = None
        self.problem: UserError | None = None
        self.full_values: FullValues | None = None
        self.child_files: tuple[Path, ...] = ()
        self.old_child_files: tuple[Path, ...] = ()
        self._step = 0
        self._has_recorded = False

    @property
    def dumps(self) -> list[Path]:
        """Traces of the last calls that were written."""
        return [] if self._flights is None else self._flights.dumps

    @property
    def keeps_last(self) -> bool:
        """True if only the last calls are kept."""
        return self._flights is not None

    @property
    def custom_operators(self) -> list[str]:
        """Names of the program's own operators that a private trace contains."""
        return self._recorder.pending.custom_operators

    def notes(self) -> Iterator[str]:
        """Yield messages about requested data that is not in the trace."""
        for name, reason in self.grips.refused.items():
            yield f"{name} was not gripped: {reason}"
        for name, reason in self.extensions.refused().items():
            yield f"the extension {name} was not recorded: {reason}"
        if self._flights is not None:
            yield from self._flights.notes()
        kernels, budget = self._recorder.kernels, self._recorder.budget
        if kernels is not None and kernels.failure is not None:
            yield f"the trace lacks times of kernels: {kernels.failure}"
        if kernels is not None and kernels.is_cut:
            yield "the trace lacks times of some kernels: torch's profiler had no memory for more; record fewer steps"
        if kernels is not None and kernels.fallback is not None:
            yield f"calls on the device are timed by events, not by their kernels: {kernels.fallback}"
        if budget is not None and budget.is_overdrawn:
            yield (
                f"the recording took more than {budget.share:.3g} of the program's time: call step() after each "
                "step, so that the recording can skip steps"
            )
        if self.schedule != ALWAYS and not self._step:
            yield "step() was never called: for the schedule, the whole program was one step"
        elif self.schedule != ALWAYS and not self._has_recorded:
            yield f"no step was recorded: the program made {self._step}, and the schedule begins after them"

    def _report_end(self, flusher: Flusher, was_discarded: bool) -> None:
        """Copy the results of the writer, and warn about failures."""
        recorder = self._recorder
        if not was_discarded:
            self.grips.finish()
        blocks = flusher.blocks
        self.marks, self.perturbed = blocks.marks.total(), blocks.perturbed
        self.calls, self.signatures = blocks.calls - self.marks, flusher.signatures - len(blocks.marks)
        slow_memory = recorder.slow_memory.excess_ns / max(blocks.duration_ns, 1)
        self.doubts = tuple(time_doubts(flusher.contended, slow_memory))
        self.stopped = flusher.reached
        self.dropped = sum(recorder.lost.dropped.values())
        self.bytes_written = 0 if flusher.writer is None else flusher.writer.bytes_written
        self.failure, self.problem = flusher.failure, flusher.problem_with(self.path)
        self.full_values = recorder.fitter.full
        if self._child_files is not None:
            self.child_files = self._child_files.new()
            if self._force and not flusher.discarded and self.failure is None:
                self._child_files.remove_old()
            self.old_child_files = self._child_files.old()
        self._warn()

    def _warn(self) -> None:
        if self.problem is not None:
            warnings.warn(f"the trace {self.problem}", RuntimeWarning, stacklevel=7)
        elif self.full_values is not None and self.full_values.failure is not None:
            text = f"the trace {self.path} could not be written with whole values: {self.full_values.failure}"
            warnings.warn(text, RuntimeWarning, stacklevel=7)
        for text in self.notes():
            warnings.warn(text, RuntimeWarning, stacklevel=7)
