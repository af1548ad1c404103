"""Files and results of a capture, and messages about failures and about requested data that the trace lacks."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from opgrip.capture.grip.gripping import Grips
from opgrip.capture.hooks.extensions import ExtensionWatch
from opgrip.capture.program.processes import ChildFiles, unused
from opgrip.capture.recording.recorder import Recorder
from opgrip.capture.session.schedule import ALWAYS, Schedule
from opgrip.capture.signatures.full_values import FullValues
from opgrip.capture.writing.flight_triggers import Flights
from opgrip.capture.writing.flusher import Flusher
from opgrip.cli.command import did_you_mean
from opgrip.errors import UserError
from opgrip.traces.table.accelerators import time_doubts


class Counts(NamedTuple):
    """Counts of a recording; the attributes of `CaptureReport` with the same names explain them."""

    calls: int = 0
    signatures: int = 0
    dropped: int = 0
    bytes_written: int = 0


class CaptureReport:
    """Base class of `Capture`, with the files and results of the capture.

    Attributes
    ----------
    path : trace file
    calls, signatures, dropped : numbers so far of recorded calls, distinct calls, and calls that could not be recorded.
        With `last`, the first two are counted in the last trace; after warm-up steps, distinct calls are counted when
        they are written, up to half a second later
    marks : number of recorded `record_function` labels
    perturbed : number of calls that ran right after the capture's own work and are marked as perturbed
    doubts : reasons why the measured times are doubtful, as sentences; empty on a quiet machine
    stopped : name of the limit that ended the recording before the program ended, or None
    bytes_written : number of bytes written so far, before compression; calls are written every half second
    failure, problem : error that prevented the trace from being written, and a message that also names the written
        part; None if writing succeeded
    full_values : after the block, the store of full values, with its size and error; None if none were requested
    child_files : after the block, traces of the forked processes that have ended; `old_child_files` are traces of an
        earlier program, which `force` removes; `cut_child_files` are incomplete traces of killed processes
    dumps : with `last`, paths of the written traces
    grips : gripped functions; `written` lists the samples' folders, and `refused` the reasons why functions were not
        gripped
    """

    grips: Grips
    extensions: ExtensionWatch
    _recorder: Recorder
    _flights: Flights | None
    _child_files: ChildFiles | None
    _force: bool
    _options: dict[str, Any]
    _details: dict[str, Any]

    if not TYPE_CHECKING:

        def __new__(cls, *values: Any, **options: Any) -> Any:
            """Return a new object; raise TypeError with the most similar parameter if a name is unknown."""
            parameters = signature(cls.__init__).parameters
            for name in options.keys() - parameters.keys():
                if all(parameter.kind != Parameter.VAR_KEYWORD for parameter in parameters.values()):
                    hint = did_you_mean(name, parameters, "see help(opgrip.Capture)", "{}=")
                    raise TypeError(f"{cls.__name__}() has no parameter {name}: {hint}")
            return super().__new__(cls)

    def __init__(self, path: str | Path, schedule: Schedule) -> None:
        self.path, self.schedule = path, schedule
        # the program may change its working directory
        self._file = self._asked_file = path if str(path) == "-" else Path(path).absolute()
        # in a spawned process, the trace of the process that runs the program
        self._root: Path | None = None
        self._counted: Flusher | None = None
        self._counts = Counts()
        self.marks = self.perturbed = 0
        self.doubts: tuple[str, ...] = ()
        self.stopped: str | None = None
        self.failure: Exception | None = None
        self.problem: UserError | None = None
        self.full_values: FullValues | None = None
        self.child_files: tuple[Path, ...] = ()
        self.old_child_files: tuple[Path, ...] = ()
        self.cut_child_files: tuple[Path, ...] = ()
        self._step = 0
        self._has_recorded = False

    @property
    def calls(self) -> int:
        return self._count().calls

    @property
    def signatures(self) -> int:
        return self._count().signatures

    @property
    def dropped(self) -> int:
        return self._count().dropped

    @property
    def bytes_written(self) -> int:
        return self._count().bytes_written

    def _choose_file(self) -> None:
        """Add a number to the trace's path if the trace exists, because a job that starts again must not stop here."""
        requested_file = self._asked_file
        if self._force or not isinstance(requested_file, Path) or not requested_file.is_file():
            return
        self._file = unused(requested_file)
        self.path = Path(self.path).with_name(self._file.name)
        warnings.warn(f"{requested_file} exists: the trace goes to {self._file.name}", RuntimeWarning, stacklevel=4)

    def _describe_spawned(self) -> dict[str, Any] | None:
        """Return the settings with which a process that the program spawns now is recorded; None if it is not recorded.

        It is not if only steps are recorded, or if the trace goes to standard output.
        """
        if self.schedule is not ALWAYS or self._recorder.threads.by_steps or str(self.path) == "-":
            return None
        options = {**self._options, "details": self._details | {"parent_pid": os.getpid()}}
        return {"root": self._root or self._file, "policy": self._recorder.privacy, "options": options}

    def _count(self) -> Counts:
        flusher = self._counted
        if flusher is None:
            return self._counts
        # the program may read these in any thread, so nothing may change the table while it is summed up
        dropped = sum(tuple(self._recorder.lost.dropped.values()))
        bytes_written = 0 if flusher.writer is None else flusher.writer.bytes_written
        return Counts(flusher.calls, flusher.signatures, dropped, bytes_written)

    @property
    def dumps(self) -> list[Path]:
        return [] if self._flights is None else self._flights.dumps

    @property
    def keeps_last(self) -> bool:
        """True if only the latest calls are kept, as with the option `last`."""
        return self._flights is not None

    @property
    def custom_operators(self) -> list[str]:
        """Names of the operators that a private trace contains although they belong to the program."""
        return self._recorder.pending.custom_operators

    def notes(self) -> Iterator[str]:
        """Yield messages for the user about requested data that the trace lacks."""
        for name, reason in self.grips.refused.items():
            yield f"{name} was not gripped: {reason}"
        for name, reason in self.extensions.refused().items():
            yield f"the extension {name} was not recorded: {reason}"
        if self._flights is not None:
            yield from self._flights.notes()
        kernels, budget = self._recorder.kernels, self._recorder.budget
        if kernels is not None and kernels.failure is not None:
            yield f"the trace lacks the times of kernels: {kernels.failure}"
        if kernels is not None and kernels.is_cut:
            yield "the trace lacks times of some kernels: torch's profiler had no memory for more; record fewer steps"
        if kernels is not None and kernels.fallback is not None:
            yield (f"calls on the device are timed with events, not with records of their kernels: {kernels.fallback}")
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
        """Copy the results of the writing thread to this object, and warn about failures."""
        recorder = self._recorder
        if not was_discarded:
            self.grips.finish()
        blocks = flusher.blocks
        self._counts, self._counted = self._count(), None
        self.marks, self.perturbed = blocks.marks.total(), blocks.perturbed
        slow_memory = recorder.slow_memory.excess_ns / max(blocks.duration_ns, 1)
        self.doubts = tuple(time_doubts(flusher.contended, slow_memory))
        self.stopped = flusher.reached
        self.failure, self.problem = flusher.failure, flusher.problem_with(self.path)
        self.full_values = recorder.fitter.full
        if self._child_files is not None:
            self.child_files, self.cut_child_files = self._child_files.new(), self._child_files.cut()
            if self._force and not flusher.discarded and self.failure is None:
                self._child_files.remove_old()
            self.old_child_files = self._child_files.old()
        self._warn()

    def _warn(self) -> None:
        if self.problem is not None:
            warnings.warn(f"the trace {self.problem}", RuntimeWarning, stacklevel=7)
        elif self.full_values is not None and self.full_values.failure is not None:
            text = f"the trace {self.path} could not be written with full values: {self.full_values.failure}"
            warnings.warn(text, RuntimeWarning, stacklevel=7)
        for text in self.notes():
            warnings.warn(text, RuntimeWarning, stacklevel=7)
