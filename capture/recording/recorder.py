"""One recording: the tables that all threads of a process share, and their lifetime.

Nothing here raises an exception into the recorded program, except the program's own exceptions, for example from signal
handlers. Such an exception loses at most the call that it interrupts, which is then counted as lost.
"""

from __future__ import annotations

import functools
import os
from array import array
from collections.abc import Callable, Hashable, Iterable
from time import perf_counter_ns
from typing import Any
from weakref import ref

from torch import nn

from opgrip.capture.program.accelerators import GraphCaptures
from opgrip.capture.program.capture_choices import VALUE_SHARE
from opgrip.capture.program.places import ModulePaths, Places, SourceLines
from opgrip.capture.recording.graph_templates import GraphTemplates, KeptGraph
from opgrip.capture.recording.observations import Observations
from opgrip.capture.recording.pending_records import LostCalls, OwnCalls, PendingRecords
from opgrip.capture.recording.scope_table import Generations, ScopeTable
from opgrip.capture.recording.signature_table import SignatureTable
from opgrip.capture.recording.storages import StorageNumbers
from opgrip.capture.recording.thread_mode import ThreadMode, ThreadModes
from opgrip.capture.signatures.fitting import Fitter
from opgrip.capture.timing.budget import Budget
from opgrip.capture.timing.kernel_times import KernelTimes
from opgrip.capture.timing.page_faults import SlowMemory
from opgrip.platform.contention import usual_fault_ns
from opgrip.traces.analysis.redaction import Policy
from opgrip.traces.schema.records import NO_STORAGE, Context, Graph, Scope, Signature, Values
from opgrip.traces.table.step_starts import MOST_STEPS


class Recorder:
    """The tables and threads of one process's recording.

    model : module to which module paths are relative; without it, each outermost module that is called starts its own
        path
    stack_depth : number of source lines kept per scope
    write_ahead : function called before every call runs, or None
    redacts_late : True to redact and encode records only when they are written to a file
    kernels : source of device times from kernel records, or None to time calls with events
    by_steps : True to record a thread only while it is in a step
    """

    def __init__(
        self,
        make_mode: Callable[[Recorder], ThreadMode],
        *,
        model: nn.Module | None = None,
        stack_depth: int = 1,
        write_ahead: Callable[[], None] | None = None,
        value_share: float = VALUE_SHARE,
        privacy: Policy | None = None,
        redacts_late: bool = False,
        kernels: KernelTimes | None = None,
        by_steps: bool = False,
    ) -> None:
        self.places = Places()
        self.module_paths = ModulePaths(model)
        self.graphs = GraphCaptures()
        self.threads = ThreadModes(lambda: make_mode(self), by_steps)
        self.kernels, self.privacy = kernels, privacy
        self.budget: Budget | None = None
        self.write_ahead = write_ahead
        self._value_share, self._redacts_late = value_share, redacts_late
        self._lines = SourceLines(stack_depth)
        self.begin()

    def begin(self) -> None:
        """Create empty tables and start to record; also used in a forked process, where only this thread exists."""
        self.started_ns = perf_counter_ns()
        self.pid = os.getpid()
        self.uses_streams = False
        self.steps = StepMarks(self.started_ns)
        self.storages = StorageNumbers()
        self.graphs.forget()
        if self.kernels is not None:
            self.kernels.forget()
        self.own_calls = OwnCalls()
        self.generations = Generations()
        self.pending = PendingRecords(self.own_calls, self.privacy, self._redacts_late)
        self.lost = LostCalls(self.pending.lock)
        self.scopes = ScopeTable(self.places, self._lines, self.generations, self.pending, self.module_paths.of)
        next_number = functools.partial(self.generations.next, Values)
        self.fitter = Fitter(self.pending.add, next_number, self.lost.without_values)
        self.observations = Observations(self._value_share)
        self.signatures = SignatureTable(
            self.own_calls,
            self.pending,
            self.lost,
            self.fitter,
            self.observations,
            self.generations,
        )
        self.templates = GraphTemplates(self.signatures.add_launch)
        self._stopped = False
        self.slow_memory = SlowMemory(usual_fault_ns())
        if self.budget is not None:
            # a forked process has spent nothing so far
            self.budget.begin()
        self.threads.begin()

    def set_idle(self, idle: bool) -> None:
        idle = idle or self._stopped
        self.observations.set_idle(idle)
        self.threads.set_idle(idle)

    def use_streams(self) -> None:
        """Record the accelerator stream of each call from now on."""
        self.uses_streams = True
        for mode in self.threads.all:
            mode.forget_calls()

    def stop(self) -> None:
        """Stop recording for good, and discard calls that are not written yet."""
        self._stopped = True
        self.set_idle(True)
        for mode in self.threads.all:
            mode.rows.clear()

    def at_own_work(self) -> bool:
        is_held: bool = self.own_calls.lock._is_owned()  # type: ignore[attr-defined]
        return is_held

    def write_ahead_of(self, signature: int) -> None:
        try:
            if self.write_ahead is not None:
                self.write_ahead()
        except Exception as error:
            self.lost.drop(f"signature {signature}", error)

    def adopt(self, graph_calls: KeptGraph, signature: int) -> Graph:
        """Return the trace's record of a CUDA graph that was captured before the recording began.

        signature : number of the signature of the graph's launches
        """
        graph, records = graph_calls.graph, graph_calls.records
        calls: dict[int, int] = {}
        places: dict[int, int] = {}
        for (_, number), record in records.items():
            if isinstance(record, Signature) and number in graph_calls.keys:
                calls[record.number] = self.signatures.adopt(graph_calls.keys[record.number], record)
            elif isinstance(record, Scope):
                places[record.number] = self.scopes.adopt(record, records)
        memory = {number: next(self.storages.new_number) for number in graph.storages if number != NO_STORAGE}
        return Graph(
            signature,
            [calls[number] for number in graph.calls],
            [places[number] for number in graph.scope],
            graph.tensors,
            [memory.get(number, NO_STORAGE) for number in graph.storages],
        )

    def forget(self) -> None:
        """Start new tables, so that signatures get new numbers; records of the old ones stay until `prune`."""
        with self.pending.lock:
            self.generations.begin()
            for table in (self.signatures, self.scopes, self.fitter, self.observations):
                table.forget()

    def prune(self, generations: set[int], pairs: set[int], running: Iterable[tuple[int, int]]) -> set[Hashable]:
        """Remove old numbers and their records; return type and number of all records to which calls may still refer.

        generations : generations of numbers that a thread may still use
        pairs : (signature, scope) pairs of calls that are not written yet
        running : signature and scope of each call that has not ended
        """
        running = list(running)
        with self.pending.lock:
            self.scopes.prune_pairs(generations, pairs)
            kept_pairs = self.scopes.pairs.values()
            used = (
                self.templates.all_signatures
                | {pair[0] for pair in kept_pairs}
                | {signature for signature, _ in running}
            )
            signatures = self.signatures.prune(used, generations)
            scopes = {pair[1] for pair in kept_pairs} | {scope for _, scope in running}
            scopes.update(self.generations.numbers(Scope, generations))
            self.scopes.prune_scopes(scopes)
            self.fitter.prune(set(self.generations.numbers(Values, generations)))
            self.generations.keep(generations)
        named = (
            (Context, self.generations.numbers(Context, generations)),
            (Values, self.generations.numbers(Values, generations)),
        )
        names: set[Hashable] = {(kind, number) for kind, numbers in named for number in numbers}
        return names | {(Signature, number) for number in signatures} | {(Scope, number) for number in scopes}


class StepMarks:
    """Start times of a program's steps, which the program reports or which follow from its optimizer.

    program_reports : True if the program reports its steps
    in_header : True if the trace's header contains the number of steps; then nothing is collected here
    """

    def __init__(self, started_ns: int) -> None:
        self._started_ns = started_ns
        self._reported = array("q")
        self._optimized = array("q", [0])
        self._optimizer: ref[Any] | None = None
        self.program_reports = self.in_header = False

    def begin_step(self) -> None:
        self._add(self._reported)

    def end_optimizer_step(self, optimizer: Any) -> None:
        """Note that an optimizer has made a step; only those of the first optimizer count."""
        if self._optimizer is None or self._optimizer() is None:
            self._optimizer = ref(optimizer)
        if self._optimizer() is optimizer:
            self._add(self._optimized)

    def starts_ns(self) -> list[int]:
        """Return the start of each step in ns since the start of the capture; empty if no steps are known."""
        starts = self._reported if self.program_reports else self._optimized
        is_known = not self.in_header and (self.program_reports or len(starts) > 1)
        return starts.tolist() if is_known and len(starts) <= MOST_STEPS else []

    def _add(self, starts: array[int]) -> None:
        if len(starts) <= MOST_STEPS and not self.in_header:
            starts.append(perf_counter_ns() - self._started_ns)
