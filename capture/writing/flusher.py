"""Writing of a recorder's data every half second, so that a program which is killed leaves a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from os import getpid
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread, get_ident, get_native_id

from opgrip.capture.program.accelerators import describe_devices, started_devices
from opgrip.capture.recording.recorder import Recorder
from opgrip.capture.recording.thread_mode import ThreadCalls
from opgrip.capture.signatures.signatures import forget_outlines
from opgrip.capture.writing.blocks import Blocks
from opgrip.capture.writing.definitions import Definitions, RecordingLimits, parts_within
from opgrip.cli.command import counted
from opgrip.cli.output_files import reason_of
from opgrip.errors import UserError
from opgrip.platform import monotonic, perf_counter, perf_counter_ns, sleep, thread_time_ns
from opgrip.platform.contention import Contention
from opgrip.traces.io.writer import TraceWriter, encode_line
from opgrip.traces.schema.records import End, Record, Signature, listed
from opgrip.traces.table.accelerators import describe_accelerators

INTERVAL_S = 0.5
SPAN_NS = 100_000_000  # interval in ns between checks whether other processes use the processors
ALIVE_S = 1.0  # interval in seconds between checks whether the writing thread still runs
PAUSE_S = 50e-6
PATIENCE = 12  # length of the pauses between fits, relative to a fit; the program needs the interpreter lock
UNLIMITED = RecordingLimits()


class Flusher:
    """A thread that writes a recorder's data to a file until its context ends."""

    def __init__(
        self,
        recorder: Recorder,
        open_writer: Callable[[], TraceWriter],
        limits: RecordingLimits = UNLIMITED,
        learns: bool = False,
    ) -> None:
        self.recorder = recorder
        self.limits = limits
        self.writer: TraceWriter | None = None
        self.failure: Exception | None = None
        self.discarded = False
        self.discards_empty = False
        self.reached: str | None = None
        self.blocks = Blocks(recorder)
        self._contended_ns = self._recorded_ns = 0
        self._contention: Contention | None = None
        self._looked_ns = perf_counter_ns()
        self.learning = False
        self._learns = learns
        self._held = Definitions(keeps_written=False) if limits or learns else None
        self._open_writer = open_writer
        self._writing = Lock()
        self._stop = Event()
        # the thread's `is_alive` cannot be used: it returns False forever after an exception interrupts it
        self._running_in: int | None = None
        self._jobs: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name="opgrip-flusher", daemon=True)

    def open(self) -> TraceWriter:
        if self.writer is None:
            self.writer = self._open_writer()
        return self.writer

    def prepare(self) -> None:
        self.open()

    def __enter__(self) -> Flusher:
        self._running_in = getpid()
        self._thread.start()
        return self

    def __exit__(self, *ignored: object) -> None:
        self._stop.set()
        try:
            self.run_job(self.finish)
        except BaseException:
            # the interrupt hit the program and not the writing thread; the trace is complete once that thread ran
            # another job
            self.run_job(lambda: None)
            raise
        finally:
            self._jobs.put(None)
            if self._thread.is_alive():
                self._thread.join()
            if self._contention is not None:
                self._contention.close()

    def run_job(self, job: Callable[[], object]) -> None:
        """Run a function in the writing thread and wait for it."""
        if not self._is_running() or self._thread.ident == get_ident():
            job()
            return
        done: SimpleQueue[Exception | None] = SimpleQueue()

        def run() -> None:
            failure: Exception | None = None
            try:
                job()
            except Exception as error:
                failure = error
            done.put(failure)

        self._jobs.put(run)
        while True:
            try:
                failure = done.get(timeout=ALIVE_S)
                break
            except Empty:
                if not self._is_running():
                    return
        if failure is not None:
            raise failure

    def _is_running(self) -> bool:
        return self._running_in == getpid()

    def write_now(self) -> None:
        if not self.recorder.pending.is_held_here():
            self.run_job(self._write_now)

    def _write_now(self) -> None:
        self.flush()
        self.write_running()

    def flush(self, pause_s: float = 0.0) -> None:
        if getpid() != self.recorder.pid or self.failure is not None:
            return
        if self.recorder.graphs.is_ongoing and not self._stop.is_set():
            # device times cannot be queried until the program has finished capturing its graph
            return
        with self._writing:
            try:
                self._check_contention()
                kernels = self.recorder.kernels
                # take the windows first: all of their calls are then available
                windows = [] if kernels is None else kernels.take_windows()
                while self.reached is None and (blocks := self.blocks.take(self._room())):
                    for block in self._within_limit(blocks):
                        self._write(self.blocks.records(block, self.learning))
                        if self._at_limit():
                            break
                        if pause_s:
                            sleep(pause_s)
                    if pause_s:
                        # leave the calls that arrived meanwhile to the next flush; a busy program would otherwise never
                        # let this loop end
                        break
                if kernels is not None and windows and self.writer is not None:
                    self._write(kernels.records(windows))
                self._fit_deferred(pause_s)
                if self.writer is not None or self.recorder.pending.lines:
                    self._write(())
                    self.open().flush()
            except Exception as error:
                self.failure = error
                # data that cannot be written should not be kept in memory
                self.recorder.stop()

    def set_learning(self, learning: bool) -> None:
        """Discard the calls made from now on if `learning` is True, else write them; earlier calls are not affected."""
        if learning is not self.learning:
            self.run_job(lambda: self._set_learning(learning))

    def _set_learning(self, learning: bool) -> None:
        self.flush()
        self.learning = learning
        self.recorder.observations.set_learning(learning)

    def problem_with(self, path: str | Path) -> UserError | None:
        """Return the error to report if writing failed, which names the cause and the incomplete file."""
        if self.failure is None:
            return None
        reason = reason_of(self.failure)
        unfinished = None if self.writer is None else self.writer.unfinished
        if unfinished is not None:
            reason += f"; {Path(path).with_name(unfinished.name)} contains what was written: read it with --partial"
        return UserError(f"{path} could not be written", reason)

    @property
    def calls(self) -> int:
        if self.learning or self.reached is not None or self.failure is not None:
            return self.blocks.own_written
        calls = self.blocks.count_own()
        return calls if self.limits.calls is None else min(calls, self.limits.calls)

    @property
    def signatures(self) -> int:
        signatures = self.recorder.signatures
        if self._held is None or not (self._learns or self.reached is not None):
            return len(signatures) - len(signatures.marks)
        return self._held.file.signatures - len(self.blocks.marks)

    def write_running(self) -> None:
        with self._writing:
            try:
                running = list(self.blocks.running())
                if running and self.reached is None and not self.learning:
                    self._write(running)
                    self.open().flush()
            except Exception as error:
                self.failure = error

    def finish(self) -> None:
        if self.discards_empty and not self.discarded:
            self.flush()
            self.discarded = not self.blocks.own_written and not self.recorder.lost.dropped and self.failure is None
        if self.discarded:
            if self.writer is not None:
                self.writer.discard()
        else:
            self._close()
        if self.recorder.fitter.full is not None:
            self.recorder.fitter.full.discard()

    def _close(self) -> None:
        self._fit_deferred(wait=True)
        self.flush()
        if self.failure is not None or self.writer is None:
            return
        recorder = self.recorder
        if self._held is not None and self.reached is None and not self._learns:
            self.writer.write_lines(self._held.other_lines())
        try:
            # threads that still run may have described signatures of calls that are not written
            with recorder.pending.lock:
                unwritten = sum(isinstance(record, Signature) for record, _ in recorder.pending.lines)
                closed = recorder.signatures.closed - unwritten
            end = self._end(closed if self._held is None else self._held.file.signatures)
            self.writer.write_lines(b"".join(map(encode_line, recorder.pending.outgoing(end))))
            if recorder.fitter.full is not None:
                # finish the values first, so that a trace with its final name always has its values
                recorder.fitter.full.finish()
            self.writer.close()
        except Exception as error:
            self.failure = error
        recorder.storages.close()
        forget_outlines()

    def _end(self, signatures: int) -> End:
        recorder = self.recorder
        return End(
            calls=self.blocks.calls,
            signatures=signatures,
            duration_ns=perf_counter_ns() - recorder.started_ns,
            dropped=listed(recorder.lost.dropped),
            passed_by=listed(recorder.lost.passed_by),
            without_values=listed(recorder.lost.without_values),
            without_work=listed(recorder.lost.without_work),
            stopped=self.reached,
            thinned={"steps": budget.left_out} if (budget := recorder.budget) and budget.left_out else {},
            contended=self.contended,
            step_starts_ns=[] if recorder.threads.by_steps else recorder.steps.starts_ns(),
            devices=describe_devices(),
            accelerator=describe_accelerators(started_devices()),
        )

    def _fit_deferred(self, pause_s: float = 0.0, wait: bool = False) -> None:
        fitter = self.recorder.fitter
        until_s, began_s = monotonic() + INTERVAL_S, perf_counter()
        try:
            for _ in fitter.fit_deferred(self.recorder.graphs, wait):
                if pause_s:
                    sleep(PATIENCE * (perf_counter() - began_s))
                    if monotonic() > until_s or not self._jobs.empty():
                        break
                    began_s = perf_counter()
        except Exception as error:
            fitter.forget_deferred()
            self.recorder.lost.drop("values on a device", error)

    def _write(self, records: Iterable[Record]) -> None:
        records = [item for record in records for item in self.recorder.pending.outgoing(record)]
        # these include everything the records refer to, and are written before them
        pending = self.recorder.pending.take()
        if self._held is None:
            needed = b"".join(line for _, line in pending)
        else:
            self._held.add(pending)
            needed = self._held.lines_for(records)
        self.open().write_lines(needed)
        self.open().write_lines(b"".join(map(encode_line, records)))

    def _within_limit(self, blocks: Iterable[ThreadCalls]) -> Iterator[ThreadCalls]:
        if self.limits.bytes is None or self._held is None:
            yield from blocks
            return
        for block in blocks:
            remaining = block
            while len(remaining):
                self._held.add(self.recorder.pending.take())
                room = self.limits.bytes - self.open().bytes_written
                part, remaining = parts_within(remaining, self.recorder.scopes.pairs, self._held, room)
                yield part

    def _room(self) -> int | None:
        return None if self.limits.calls is None else self.limits.calls - self.blocks.calls

    def _at_limit(self) -> bool:
        calls, size, full = self.limits.calls, self.limits.bytes, self.recorder.fitter.full
        whole = 0 if full is None else full.bytes_written
        if self.limits.is_over_memory(self.recorder):
            self.reached = f"{self.limits.memory} bytes of memory"
        elif calls is not None and self.blocks.calls >= calls:
            self.reached = counted(calls, "call")
        elif size is not None and (self.open().bytes_written + whole >= size or (full is not None and full.over)):
            self.reached = f"{size} bytes"
        if self.reached is not None:
            self.recorder.stop()
        return self.reached is not None

    def _check_contention(self) -> None:
        span = perf_counter_ns() - self._looked_ns
        if self._contention is None or (span < SPAN_NS and not self._stop.is_set()):
            return
        self._looked_ns += span
        self.blocks.is_contended = self._contention.is_contended()
        if self.recorder.threads.waiting:
            self._recorded_ns += span
            self._contended_ns += span if self.blocks.is_contended else 0

    @property
    def contended(self) -> float:
        """Share of the recorded time in intervals in which other processes probably slowed the program."""
        return round(self._contended_ns / max(self._recorded_ns, 1), 3)

    def _run(self) -> None:
        try:
            self._run_jobs()
        finally:
            self._running_in = None

    def _run_jobs(self) -> None:
        # this thread only waits while the program uses the processors; that is not contention
        self._contention = Contention(ignored=get_native_id())
        with self.recorder.own_calls.lock:
            due_s = monotonic() + INTERVAL_S
            while True:
                try:
                    job = self._jobs.get(timeout=max(0.0, due_s - monotonic()))
                    if job is None:
                        return
                    job()
                except Empty:
                    # `finish` writes the rest
                    if not self._stop.is_set():
                        self.flush(PAUSE_S)
                        self.write_running()
                    due_s = monotonic() + INTERVAL_S
                if (budget := self.recorder.budget) is not None:
                    budget.writing_ns = thread_time_ns()
                    budget.update()
