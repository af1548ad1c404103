"""`Capture`, which records a program, or some of its steps, to a trace."""

from __future__ import annotations

import atexit
import functools
import os
import pickle
import sys
import warnings
from _thread import start_new_thread
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from inspect import Parameter, signature
from multiprocessing import process, spawn, util
from pathlib import Path
from threading import Event
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar, cast

from torch import nn

from opgrip.capture.grip.gripping import Grips
from opgrip.capture.grip.patterns import parse_pattern
from opgrip.capture.hooks.compiled import CompiledWatch, OpaqueMode, TracingWatch
from opgrip.capture.hooks.extensions import ExtensionWatch, TritonWatch
from opgrip.capture.hooks.graphs import GraphWatch, StreamWatch
from opgrip.capture.hooks.scopes import ScopeWatch, ThreadWatch
from opgrip.capture.program.capture_choices import (
    AUTO,
    EVENTS,
    FULL,
    KERNELS,
    KNOWN_EXTENSIONS,
    OPAQUE,
    OPERATORS,
    SKETCH,
    VALUE_SHARE,
    check_choices,
    check_flight,
    check_private,
    policy_of,
)
from opgrip.capture.program.environment import describe_environment
from opgrip.capture.program.patches import LateModules, Patches
from opgrip.capture.program.processes import ChildFiles, ForkWatch, child_path, own_path, unused
from opgrip.capture.recording.recorder import Recorder
from opgrip.capture.recording.thread_mode import ThreadMode
from opgrip.capture.session.graph_keeper import GraphKeeper
from opgrip.capture.session.schedule import ALWAYS, Schedule, Watching
from opgrip.capture.signatures import full_values
from opgrip.capture.signatures.full_values import FullValues
from opgrip.capture.timing.kernel_times import KernelTimes, check_kernels
from opgrip.capture.torch_compat.torch_private import load_private
from opgrip.capture.writing.definitions import RecordingLimits
from opgrip.capture.writing.flight_recorder import Flights
from opgrip.capture.writing.flusher import Flusher
from opgrip.cli.command import counted, did_you_mean
from opgrip.errors import UserError, in_words_of_python, one_line
from opgrip.platform import perf_counter_ns, time_ns
from opgrip.traces.analysis.redaction import Policy
from opgrip.traces.io.tensor_file import HEADER_FIELD
from opgrip.traces.io.writer import TraceWriter
from opgrip.traces.schema.records import Header
from opgrip.traces.table.accelerators import time_doubts
from opgrip.traces.values import value_models

_BEGIN = """
try:
    from {module} import begin
except Exception:
    # another Python, without opgrip
    pass
else:
    begin({settings!r})
"""


class SpawnWatch:
    """Between `start` and `stop`, sends the capture's settings to the processes that this process spawns."""

    def __init__(self, describe: Callable[[], Mapping[str, Any] | None], failed: Callable[[Exception], None]) -> None:
        self._describe, self._failed = describe, failed
        self._patches = Patches()

    def start(self) -> None:
        self._patches.replace(spawn, "get_preparation_data", self._adding)

    def stop(self) -> None:
        self._patches.undo()

    def _adding(self, original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        def prepared(name: str) -> dict[str, Any]:
            data = original(name)
            try:
                settings = self._describe()
                if settings is not None:
                    # `prepare` ignores keys that it does not know
                    data["opgrip"] = _Beginning(pickle.dumps(dict(settings)))
            except Exception as error:
                self._failed(error)
            return data

        return prepared


class _Beginning:
    def __init__(self, settings: bytes) -> None:
        self._settings = settings

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str]]:
        return exec, (_BEGIN.format(module=__name__, settings=self._settings),)


def begin(settings: bytes) -> None:
    """Prepare this spawned process so that it is recorded from the start of its work.

    settings : pickled dictionary with `root` (trace of the main process), `policy` (how records are redacted) and
        `options` (of `Capture`)
    """
    original = process.BaseProcess._bootstrap  # type: ignore[attr-defined]

    def bootstrap(self: Any, *args: Any, **kwargs: Any) -> Any:
        # processes that this one forks run it too
        process.BaseProcess._bootstrap = original  # type: ignore[attr-defined]
        # as the original does first, so that a worker of a pool is known as one
        process._current_process = self  # type: ignore[attr-defined]
        if "torch" in sys.modules:
            _record(settings)
        else:
            late = LateModules("torch".__eq__, lambda torch: _record(settings, late))
            late.__enter__()
        return original(self, *args, **kwargs)

    process.BaseProcess._bootstrap = bootstrap  # type: ignore[attr-defined]


def _record(settings: bytes, late: LateModules | None = None) -> None:
    try:
        if late is not None and late in sys.meta_path:
            late.__exit__()
        capture = _capture_of(**pickle.loads(settings))
        capture.__enter__()
        capture.discard(if_empty=True)
        # at the start of the work, `multiprocessing` forgets this, and calls what `ForkWatch` has registered
        util.Finalize(None, capture.close, exitpriority=100)
    except Exception as error:
        print(f"opgrip: process {os.getpid()} is not recorded: {one_line(error)}", file=sys.stderr)


def _capture_of(root: Path, policy: Policy | None, options: Mapping[str, Any]) -> Capture:

    class ChildCapture(Capture):
        def __init__(self) -> None:
            path = child_path(root)
            super().__init__(path, **options)
            # neither number nor rank are added to this name
            self.path = self._file = self._asked_file = path
            self._root = root

        def _policy(self, *ignored: object) -> Policy | None:
            return policy

        def _warn(self) -> None:
            # the process that runs the program reports only its own problems, as for forked processes
            pass

    return ChildCapture()


Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class Counts(NamedTuple):
    calls: int = 0
    signatures: int = 0
    dropped: int = 0
    bytes_written: int = 0


class Capture:
    """Context manager that records the operator calls in its block, with scopes and calls of extension functions.

    ::

        with Capture("step.jsonl"):
            model(images)

        with Capture("steps.jsonl", schedule=Schedule(skip=1000, active=1, repeat=2)) as capture:
            for batch in batches:
                train(batch)
                capture.step()

    Used as a decorator, it records the calls of the function, until `close` or the end of the program. Failures after
    the start become a warning at the end of the block, and raise nothing.

    Parameters
    ----------
    path : trace file, compressed if its name ends in `.gz` or `.zst`; `-` for standard output. `%t`, `%p`, `%h` and
        `%r` are the time, process, host and rank. If the file exists and `force` is False, a number is added. A rank
        started by torchrun adds its number, and a forked process its process id, as in `step.rank1.jsonl`
    model : module to which module paths are relative; without it, each outermost module that is called starts its own
        path
    extensions : names of extension modules whose functions are recorded, also if the program loads them later
    schedule : steps to record; the program calls `step` at the end of each. Between recorded steps it runs at full
        speed
    max_calls, max_bytes : stop recording, but not the program, after this number of calls, or of bytes before
        compression
    max_memory : stop recording when the data that the capture keeps in memory reaches about this size in bytes
    max_overhead : share of the program's time that the capture may take; beyond it, whole steps are left out if the
        program calls `step`
    stack_depth : number of frames of the program recorded per call, each with function, file and line, innermost first
    compiled : `operators` runs regions of torch.compile as their original operators; `opaque` runs the compiled regions
        and records each run as one call
    write_ahead : True to write every call before it runs, so that the trace of a crash ends with the call that caused
        it; slow
    device_time : `kernels` times calls on an accelerator by the kernels, copies and fills that they launch, and adds
        the kernels' names to the trace; `events` times them with an event before and one after each, which includes
        the launch if the device waits for it; `auto` uses kernels if the accelerator keeps records of them
    values : `sketch` keeps value models of tensors; `full` also keeps the values of every signature's first call in a
        separate file, `step.values.safetensors`, which may contain private data
    value_share : maximum share of the program's time for observing values of later calls
    private : True to write no names, paths, texts or values of the program, as with `opgrip trace redact`, so that they
        never reach the disk
    salt_file : file with the salt for hashed names, created if missing; traces with the same salt can be compared. None
        for a random salt that is not stored
    grip : names of functions to record with the operators below them, as patterns `module:function` with shell
        wildcards
    grip_to : folder for a sample of each gripped function, written by the end of the capture; None for no samples
    last : number of latest calls to keep in memory; they are written when the block or an outermost module raises an
        exception, a signal arrives, or the program calls `dump`; otherwise no file is left. Until then, the calls are
        also in a ring file of constant size, which remains if the process dies
    details : fields to add to the trace's header
    force : replace an existing file

    Attributes
    ----------
    path : trace file
    calls, signatures, dropped : numbers so far of recorded calls, distinct calls, and calls that could not be recorded.
        With `last`, the first two are counted in the last trace; after warm-up steps, distinct calls are counted when
        they are written, up to half a second later
    marks : number of recorded `record_function` labels
    perturbed : number of calls that are marked as perturbed, such as those right after the capture's own work
    doubts : reasons why the measured times are doubtful, as sentences; empty on a quiet machine
    stopped : name of the limit that ended the recording before the program ended, or None
    bytes_written : number of bytes written so far, before compression; calls are written every half second
    failure, problem : error that prevented the trace from being written, and a message that also names the written
        part; None if writing succeeded
    full_values : after the block, the store of full values, with its size and error; None if none were requested
    child_files : after the block, traces of child processes that have ended; `old_child_files` are those of an earlier
        program, which `force` removes; `cut_child_files` are incomplete traces of killed processes
    dumps : with `last`, paths of the written traces
    grips : gripped functions; `written` lists the samples' folders, and `refused` the reasons why functions were not
        gripped

    Raises
    ------
    UserError : on entering, if the file cannot be written, no device records its kernels for `kernels`, or the capture
        is already running; on construction, if `values` or `device_time` is not a valid choice, `grip` contains an
        invalid pattern, or `last` or `private` conflicts with another option
    """

    marks = perturbed = 0
    doubts: tuple[str, ...] = ()
    stopped: str | None = None
    failure: Exception | None = None
    problem: UserError | None = None
    full_values: FullValues | None = None
    child_files: tuple[Path, ...] = ()
    old_child_files: tuple[Path, ...] = ()
    cut_child_files: tuple[Path, ...] = ()
    # in a spawned process, the trace of the process that runs the program
    _root: Path | None = None
    _flusher: Flusher | None = None
    _closed: Event | None = None
    _counted: Flusher | None = None
    _child_files: ChildFiles | None = None
    _counts = Counts()
    _step = 0
    _has_recorded = False
    _policy = staticmethod(policy_of)
    _by_steps = False  # True to record each thread only during its steps

    if not TYPE_CHECKING:

        def __new__(cls, *values: Any, **options: Any) -> Any:
            parameters = signature(cls.__init__).parameters
            for name in options.keys() - parameters.keys():
                if all(parameter.kind != Parameter.VAR_KEYWORD for parameter in parameters.values()):
                    hint = did_you_mean(name, parameters, "see help(opgrip.Capture)", "{}=")
                    raise TypeError(f"{cls.__name__}() has no parameter {name}: {hint}")
            return super().__new__(cls)

    def __init__(
        self,
        path: str | Path,
        *,
        model: nn.Module | None = None,
        extensions: Iterable[str] = KNOWN_EXTENSIONS,
        schedule: Schedule = ALWAYS,
        max_calls: int | None = None,
        max_bytes: int | None = None,
        max_memory: int | None = None,
        max_overhead: float | None = None,
        stack_depth: int = 1,
        compiled: str = OPERATORS,
        write_ahead: bool = False,
        values: str = SKETCH,
        value_share: float = VALUE_SHARE,
        device_time: str = AUTO,
        private: bool = False,
        salt_file: str | Path | None = None,
        grip: Iterable[str] = (),
        grip_to: str | Path | None = None,
        last: int | None = None,
        details: Mapping[str, Any] | None = None,
        force: bool = False,
    ) -> None:
        extensions, grip = tuple(extensions), tuple(grip)
        # spawned processes get these
        others = ("self", "__class__", "path", "model", "schedule", "details")
        self._options = {name: value for name, value in locals().items() if name not in (*others, "others")}
        check_choices(model, values, device_time)
        check_private(private, salt_file, values, grip_to)
        self._limits = RecordingLimits(max_calls, max_bytes, max_memory)
        check_flight(last, path, values, device_time, bool(self._limits))
        self.path, self.schedule = own_path(path), schedule
        # the program may change its working directory
        self._file = self._asked_file = self.path if str(path) == "-" else Path(self.path).absolute()
        self._full, self._force = values == FULL, force
        self._details, self._requires_kernels, self._depth = dict(details or {}), device_time == KERNELS, 0
        self._recorder = Recorder(
            OpaqueMode if compiled == OPAQUE else ThreadMode,
            model=model,
            stack_depth=stack_depth,
            write_ahead=self._write_now if write_ahead else None,
            value_share=value_share,
            privacy=self._policy(private, salt_file),
            redacts_late=last is not None,
            # only the last calls are kept, and most records would be of others
            kernels=None if device_time == EVENTS or last is not None else KernelTimes(device_time == KERNELS),
            by_steps=self._by_steps,
            max_overhead=max_overhead,
            knows_steps="steps" in self._details,
        )
        self._flights = None if last is None else Flights(self._recorder, last)
        samples = None if grip_to is None else Path(grip_to)
        self.grips = Grips([parse_pattern(text) for text in grip], to=samples, recorder=self._recorder)
        self.extensions = ExtensionWatch(self._recorder, extensions)
        self._watching = Watching(self._recorder, self._make_watches(compiled), with_mode=not self._by_steps)
        self._forks = ForkWatch(self._begin_in_child, self.close, self._write_now)
        self._spawns = SpawnWatch(self._describe_spawned, lambda error: self._recorder.lost.drop("a process", error))
        self._keeper = GraphKeeper() if schedule is not ALWAYS else nullcontext()

    def _make_watches(self, compiled: str) -> list[AbstractContextManager[Any]]:
        recorder = self._recorder
        return [
            *(() if recorder.kernels is None else (recorder.kernels,)),
            ScopeWatch(recorder, None if self._flights is None else self._flights.dump_for_error),
            self.grips,
            self.extensions,
            TritonWatch(recorder),
            ThreadWatch(recorder),
            GraphWatch(recorder),
            StreamWatch(recorder),
            CompiledWatch(recorder, compiled),
            TracingWatch(recorder),
        ]

    def discard(self, if_empty: bool = False) -> None:
        """Leave no trace file at the end of the block; an older file with the same path is kept.

        Parameters
        ----------
        if_empty : True to discard the file only if the block makes no call
        """
        if self._flusher is None:
            return
        self._flusher.discards_empty |= if_empty
        self._flusher.discarded |= not if_empty

    def step(self) -> None:
        """Mark the end of a step of the program, by which the schedule decides whether to record the next one."""
        if self._flusher is None:
            return
        self._step += 1
        self._recorder.steps.program_reports = True
        budget = self._recorder.budget
        if self.schedule is ALWAYS and budget is not None and budget.passes_step():
            return
        self._follow_schedule()

    def dump(self, reason: str = "asked") -> Path | None:
        """Write the latest calls that were not written yet to a trace, and continue to record.

        Return the path of the trace, or None if there are no such calls or writing failed. The first trace has the
        capture's path; later ones have a number in their names.

        Parameters
        ----------
        reason : reason to record in the trace's header

        Raises
        ------
        UserError : the capture was created without `last`
        """
        if self._flights is None:
            raise UserError("this capture does not keep its last calls", "create it with last=N")
        return self._flights.dump(reason)

    def note_error(self, error: BaseException, is_last: bool = True) -> None:
        """Write the latest calls, if `last` was set, because an error ended the program (`is_last`) or a step."""
        if self._flights is not None:
            self._flights.dump_for_error(error, always=is_last)

    def close(self) -> None:
        """Stop recording and write the rest of the trace. Further calls do nothing."""
        flusher, self._flusher = self._flusher, None
        if flusher is None:
            if not self._recorder.pending.is_held_here():
                self._wait_until_closed()
                # if another thread has closed the capture, only this one can remove its own mode
                self._watching.pause()
            return
        if not self._recorder.pending.is_held_here():
            self._close(flusher)
            return
        # a signal handler has interrupted the capture's own work: the writing thread waits for a lock of this thread
        self._closed = Event()
        self._recorder.set_idle(True)
        atexit.register(self._wait_until_closed)
        start_new_thread(self._close, (flusher,))

    def _wait_until_closed(self) -> None:
        # a forked child does not have the thread that closes
        if self._closed is not None and os.getpid() == self._recorder.pid:
            self._closed.wait()

    def _close(self, flusher: Flusher) -> None:
        # all callbacks run, even if one of them is interrupted
        with ExitStack() as stages:
            if self._closed is not None:
                stages.callback(self._closed.set)
            stages.callback(self._report_end, flusher, flusher.discarded)
            stages.callback(flusher.__exit__, None, None, None)
            if self._flights is not None:
                stages.callback(self._flights.end)
            stages.callback(self._recorder.set_idle, True)
            self._forks.active = False
            self._spawns.stop()
            self._keeper.__exit__(None, None, None)
            self._watching.pause()

    def __enter__(self) -> Capture:
        self._open()
        try:
            self._follow_schedule()
        except BaseException:
            self.discard()
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self.note_error(error)
        self.close()

    def __call__(self, function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        """Return a wrapper of a function; the wrapper records the operator calls that the function makes."""

        @functools.wraps(function)
        def captured(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            if self._flusher is None and not self._step:
                self._open()
                atexit.register(self.close)
            self._depth += 1
            if self._depth == 1 and self._flusher is not None:
                self._recorder.steps.program_reports = True
                self._follow_schedule()
            try:
                return function(*args, **kwargs)
            except BaseException as error:
                if self._depth == 1:
                    self.note_error(error, is_last=False)
                raise
            finally:
                self._depth -= 1
                if self._depth == 0 and self._flusher is not None:
                    self._watching.pause()
                    if self._recorder.budget is not None:
                        self._recorder.budget.leave_steps()
                    self._step += 1

        return captured

    def __repr__(self) -> str:
        state = "not running" if self._flusher is None else "running"
        return f"<Capture to {self.path}, {state}: {self.calls:,} calls of {self.signatures:,} signatures>"

    def _open(self) -> None:
        if self._flusher is not None:
            raise UserError(f"the capture to {self.path} is already running", "make another Capture for an inner block")
        if self.schedule is not ALWAYS or self._recorder.budget is not None:
            load_private()
        # load the value models of other packages now and not at the first call
        value_models.names()
        if self._requires_kernels:
            check_kernels()
        with in_words_of_python():
            self._choose_file()
            self._begin_recorder(self._file)
            flusher = self._make_flusher(self._file, self._details)
            flusher.prepare()
            try:
                if self._full:
                    full_values.check(self._file, self._force)
                if self._flights is not None:
                    self._flights.begin()
            except BaseException:
                if flusher.writer is not None:
                    flusher.writer.discard()
                raise
        flusher.__enter__()
        self._flusher = self._counted = flusher
        self._child_files = None if str(self.path) == "-" else ChildFiles(self._file)
        self._forks.active = True
        self._spawns.start()
        self._keeper.__enter__()

    def _begin_recorder(self, path: str | Path) -> None:
        full = FullValues(full_values.path_beside(path), self._force, self._limits.bytes) if self._full else None
        self._recorder.begin(full)

    def _make_flusher(self, path: str | Path, details: Mapping[str, Any]) -> Flusher:
        if self._flights is not None:
            return self._flights.recorder_to(
                path,
                lambda file, fields: self._begin_file(file, {**details, **fields}),
                lambda fields: self._make_header({**details, **fields}),
            )
        begin_file = functools.partial(self._begin_file, path, details)
        return Flusher(self._recorder, begin_file, self._limits, learns=self.schedule.warmup > 0)

    def _begin_file(self, path: str | Path, details: Mapping[str, Any]) -> TraceWriter:
        return TraceWriter(path, self._make_header(details), self._force)

    def _make_header(self, details: Mapping[str, Any]) -> Header:
        recorder = self._recorder
        started = time_ns() - (perf_counter_ns() - recorder.started_ns)
        named = {} if recorder.fitter.full is None else {HEADER_FIELD: recorder.fitter.full.path.name}
        fields = describe_environment() | {"started_unix_ns": started, **details, **named}
        (header,) = recorder.pending.outgoing(Header(fields))
        return cast("Header", header)

    def _follow_schedule(self) -> None:
        learns, budget = self.schedule.learns(self._step), self._recorder.budget
        if self._flusher is not None:
            self._flusher.set_learning(learns)
        if learns or self.schedule.records(self._step):
            if budget is not None and budget.leaves_out_step():
                self._watching.pause()
                return
            self._watching.resume()
            self._has_recorded = self._has_recorded or not learns
            if not learns:
                self._recorder.steps.begin_step()
        else:
            self._watching.pause()
            if budget is not None:
                budget.leave_steps()
            if self.schedule.is_over(self._step):
                self.close()

    def _write_now(self) -> None:
        if (flusher := self._flusher) is not None:
            flusher.write_now()

    def _begin_in_child(self) -> None:
        if (parent := self._flusher) is None:
            return
        if parent.writer is not None:
            parent.writer.abandon()
        if self._recorder.fitter.full is not None:
            self._recorder.fitter.full.abandon()
        path = Path(os.devnull) if str(self.path) == "-" else child_path(self._root or self._file)
        self._child_files = None
        self._begin_recorder(path)
        self._flusher = self._counted = self._make_flusher(path, self._details | {"parent_pid": os.getppid()})
        self._flusher.__enter__()

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
        # a job that starts again must not stop here
        requested_file = self._asked_file
        if self._force or not isinstance(requested_file, Path) or not requested_file.is_file():
            return
        self._file = unused(requested_file)
        self.path = Path(self.path).with_name(self._file.name)
        warnings.warn(
            f"{requested_file} exists: the trace is written to {self._file.name}", RuntimeWarning, stacklevel=4
        )

    def _describe_spawned(self) -> dict[str, Any] | None:
        if self.schedule is not ALWAYS or self._by_steps or str(self.path) == "-":
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
        return self._flights is not None

    @property
    def custom_operators(self) -> list[str]:
        """Names of custom operators that `private` leaves readable, because a replay needs them."""
        return self._recorder.pending.custom_operators

    def notes(self) -> Iterator[str]:
        """Yield messages for the user about requested data that the trace lacks, and options without effect."""
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
            steps = counted(self._step, "step")
            yield f"no step was recorded: the program made {steps}, and the schedule records none of them"

    def remarks(self) -> Iterator[str]:
        if (budget := self._recorder.budget) is not None and budget.left_out:
            yield f"{counted(budget.left_out, 'step')} left out, to take at most {budget.share:.3g} of the time"

    def _report_end(self, flusher: Flusher, was_discarded: bool) -> None:
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
