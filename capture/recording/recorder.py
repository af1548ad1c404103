"""One recording: the tables that all threads of a process share, and their lifetime."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from os import getpid
from typing import Any
from weakref import ref

import torch
from torch import nn

from opgrip.capture.program.accelerators import GraphCaptures
from opgrip.capture.program.capture_choices import VALUE_SHARE
from opgrip.capture.program.places import ModulePaths, Places, SourceLines
from opgrip.capture.recording.graph_templates import GraphTemplates, KeptGraph
from opgrip.capture.recording.observations import Observations
from opgrip.capture.recording.pending_records import LostCalls, OwnCalls, PendingRecords
from opgrip.capture.recording.scope_table import Generations, ScopeTable
from opgrip.capture.recording.storages import StorageNumbers
from opgrip.capture.recording.thread_mode import ThreadMode, ThreadModes
from opgrip.capture.signatures.fitting import Fitter, varies_by_values
from opgrip.capture.signatures.full_values import FullValues
from opgrip.capture.signatures.layouts import with_groups
from opgrip.capture.signatures.signatures import call_key, describe_result
from opgrip.capture.timing.budget import Budget
from opgrip.capture.timing.kernel_times import KernelTimes
from opgrip.capture.timing.page_faults import LARGE, SlowMemory
from opgrip.capture.torch_compat.torch_private import registered_by, without_functions, without_modes
from opgrip.errors import one_line, raise_if_from_program
from opgrip.platform import perf_counter_ns
from opgrip.platform.contention import usual_fault_ns
from opgrip.traces.analysis.redaction import Policy
from opgrip.traces.schema.arguments import Opaque, numbers_of, tensors, with_numbers
from opgrip.traces.schema.records import (
    EXTENSION,
    NO_STORAGE,
    OPERATOR,
    Context,
    Graph,
    Observed,
    Scope,
    Signature,
    Values,
)
from opgrip.traces.table.accelerators import HOST, device_of
from opgrip.traces.table.profiler_labels import is_mark
from opgrip.traces.table.step_starts import MOST_STEPS


class SignatureTable:
    def __init__(
        self,
        own_calls: OwnCalls,
        pending: PendingRecords,
        lost: LostCalls,
        fitter: Fitter,
        observations: Observations,
        generations: Generations,
    ) -> None:
        self.closed = 0
        self.differentiable: set[int] = set()
        self.marks: dict[int, Any] = {}
        self.on_accelerator: set[int] = set()
        self.families: dict[int, int] = {}
        self._own_calls, self._pending, self._lock = own_calls, pending, pending.lock
        self._lost, self._fitter, self._observations, self._generations = lost, fitter, observations, generations
        self._numbers: dict[Hashable, int] = {}
        self._first_alike: dict[Hashable, int] = {}
        self._open: dict[int, Signature] = {}
        self._open_names: dict[int, Hashable] = {}
        self._large_outputs: dict[int, int] = {}
        self._unread: dict[int, list[int | None]] = {}

    def __len__(self) -> int:
        return self._generations.count(Signature)

    def number(self, name: Hashable, kind: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
        """Return the number of the signature of a call that has not run yet; add the signature if it is new."""
        key = call_key(name, args, kwargs)
        number = self._numbers.get(key)
        return self._add(key, kind, args, kwargs) if number is None else number

    def keys(self) -> dict[int, Hashable]:
        return {number: key for key, number in self._numbers.items()}

    def adopt(self, key: Hashable, record: Signature) -> int:
        """Return the number of the signature with this key; if the key is new, add `record` from another recording."""
        with self._lock:
            number = self._numbers.get(key)
            if number is None:
                number = self._generations.next(Signature)
                args, kwargs, outputs = with_numbers((record.args, record.kwargs, record.outputs), repeat(None))
                self._pending.add(replace(record, number=number, args=args, kwargs=kwargs, outputs=outputs))
                self.closed += 1
                self.families[number] = number
                self.on_accelerator.add(number)
                self._numbers[key] = number
        return number

    def add_launch(self, op: str, device: torch.device, graph: int) -> int:
        with self._lock:
            number = self._generations.next(Signature)
            self._pending.add(Signature(number, EXTENSION, op, (graph,), {"device": device}, outputs=None))
            self.closed += 1
        return number

    def is_open(self, number: int) -> bool:
        return number in self._open

    def open_name(self, number: int) -> str:
        return str(self._open_names.get(number, f"signature {number}"))

    def open_record(self, number: int) -> Signature | None:
        return self._open.get(number)

    def output_bytes(self, number: int) -> int:
        """Return the size in bytes of the results of a signature's first call; 0 if that is small or unknown."""
        return self._large_outputs.get(number, 0)

    def close(self, number: int, result: Any, raised: BaseException | None) -> None:
        """Make the record of a signature when the first of its calls has ended or raised an error."""
        with self._lock:
            signature = self._open.get(number)
            if signature is None:
                return
            if raised is not None:
                signature = replace(signature, raised=one_line(raised))
            else:
                signature = replace(signature, outputs=self._outputs(result))
                signature = self._refine(signature, self._open_names[number])
                size = sum(spec.extent for spec in tensors(signature.outputs))
                if size >= LARGE:
                    self._large_outputs[number] = size
            pending = self._pending
            lines = pending.encoded(signature)
            # No call and no loop may follow, so that nothing can interrupt this: the signature whose lines are added is
            # also closed and counted.
            pending.lines += lines
            del self._open[number]
            self.closed += 1
            self._open_names.pop(number, None)

    def observe(
        self,
        number: int,
        name: Hashable,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        since_ns: int | None = None,
        storage: int | None = None,
    ) -> Callable[[Any], None]:
        where = since_ns, None if storage == NO_STORAGE else storage
        try:
            with self._lock, self._own_calls.lock, without_modes(), without_functions():
                described = self._fitter.describe_again(name, args, kwargs)
        except Exception as error:
            self._lost.lose_values(str(name), error)
            return lambda result: None

        def record_result(result: Any) -> None:
            try:
                with self._lock:
                    outputs = self._outputs(result)
                    signature = self._refine(Signature(number, OPERATOR, str(name), *described, outputs), name)
                    numbers = numbers_of((signature.args, signature.kwargs))
                    self._pending.add(Observed(number, numbers, signature.outputs, *where))
            except Exception as error:
                self._lost.lose_values(str(name), error)

        return record_result

    def is_unread(self, number: int) -> bool:
        return number in self._unread

    def read_again(
        self, number: int, name: Hashable, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Callable[[Any], None]:
        try:
            with self._lock, self._own_calls.lock, without_modes(), without_functions():
                numbers = self._unread.pop(number)
                note_outputs = self._fitter.read_again(name, args, kwargs, numbers)
                if self._fitter.is_unread(numbers):
                    self._unread[number] = numbers
        except Exception as error:
            self._lost.lose_values(str(name), error)
            return lambda result: None
        return lambda result: note_outputs(self._outputs(result))

    def forget(self) -> None:
        self._numbers.clear()
        self._first_alike.clear()

    def prune(self, numbers: Iterable[int], generations: set[int]) -> set[int]:
        remaining = {*numbers, *self._open, *self._generations.numbers(Signature, generations)}
        self.families = {number: self.families[number] for number in remaining if number in self.families}
        self._large_outputs = {number: size for number, size in self._large_outputs.items() if number in remaining}
        self._unread = {number: values for number, values in self._unread.items() if number in remaining}
        self.differentiable &= remaining
        self.marks = {number: label for number, label in self.marks.items() if number in remaining}
        self.on_accelerator &= remaining
        return remaining

    def _add(self, key: tuple[Any, ...], kind: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
        op = str(key[0])
        with self._lock, self._own_calls.lock, without_modes(), without_functions():
            number = self._numbers.get(key)
            if number is not None:
                # another thread was faster
                return number
            described_args, described_kwargs, alike = self._fitter.describe(key[0], args, kwargs)
            described_args = with_groups(key[0], described_args)
            number = self._generations.next(Signature)
            self.families[number] = self._first_alike.setdefault(alike, number)
            if any(spec.requires_grad for spec in tensors((described_args, described_kwargs))):
                self.differentiable.add(number)
            if is_mark(op):
                self.marks[number] = next(iter(args), None)
            self._open_names[number] = key[0]
            signature = Signature(
                number, kind, op, described_args, described_kwargs, registered_by=registered_by(key[0])
            )
            if device_of(signature) not in HOST:
                self.on_accelerator.add(number)
            values = numbers_of((described_args, described_kwargs))
            if kind == OPERATOR and self._fitter.is_unread(values):
                self._unread[number] = values
            # update the lookup last: then everything that belongs to a number exists before the number can be looked up
            self._open[number], self._numbers[key] = signature, number
        return number

    def _refine(self, signature: Signature, name: Hashable) -> Signature:
        try:
            with self._own_calls.lock, without_modes(), without_functions():
                signature = self._fitter.refine_by_outputs(signature, name)
                if varies_by_values(signature, name) and signature.kind == OPERATOR:
                    self._observations.want(signature.number)
        except Exception as error:
            self._lost.lose_values(signature.op, error)
        return signature

    def _outputs(self, result: Any) -> Any:
        try:
            with self._own_calls.lock, without_modes(), without_functions():
                return describe_result(result)
        except Exception as error:
            raise_if_from_program(error)
            # a signature without outputs can still be replayed
            return Opaque(one_line(error))


class Recorder:
    """The signatures, scopes and threads of one recording in this process.

    write_ahead : function called before every call runs, or None
    kernels : source of device times from kernel records, or None to time calls with events
    max_overhead : share of the program's time that the recording may take, or None
    knows_steps : True if the trace's header has the starts of steps
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
        max_overhead: float | None = None,
        knows_steps: bool = False,
    ) -> None:
        self.places = Places()
        self.module_paths = ModulePaths(model)
        self.graphs = GraphCaptures()
        self.threads = ThreadModes(lambda: make_mode(self), by_steps)
        self.kernels, self.privacy = kernels, privacy
        self.budget: Budget | None = None
        self.write_ahead = write_ahead
        self._value_share, self._redacts_late, self._knows_steps = value_share, redacts_late, knows_steps
        self._lines = SourceLines(stack_depth)
        self.begin()
        if max_overhead is not None:
            self.budget = Budget(max_overhead, lambda: self.observations.spent_ns, lambda: self.threads.waiting)

    def begin(self, full: FullValues | None = None) -> None:
        """Begin with empty tables; `full` stores the full values of tensors."""
        self.started_ns = perf_counter_ns()
        self.pid = getpid()
        self.uses_streams = False
        self.steps = StepMarks(self.started_ns, self._knows_steps)
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
        self.fitter = Fitter(self.pending.add, next_number, self.lost.without_values, full)
        self.observations = Observations(self._value_share)
        self.signatures = SignatureTable(
            self.own_calls, self.pending, self.lost, self.fitter, self.observations, self.generations
        )
        self.templates = GraphTemplates(self.signatures.add_launch)
        self._stopped = False
        self.slow_memory = SlowMemory(usual_fault_ns())
        self.threads.begin()
        if self.budget is not None:
            # a forked process has spent nothing so far
            self.budget.begin()

    def set_idle(self, idle: bool) -> None:
        idle = idle or self._stopped
        self.observations.set_idle(idle)
        self.threads.set_idle(idle)

    def use_streams(self) -> None:
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
        """Return the trace's record of a CUDA graph that was captured before the recording began."""
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
        """Give new numbers to signatures and scopes from now on; keep the old records until `prune`."""
        with self.pending.lock:
            self.generations.begin()
            for table in (self.signatures, self.scopes, self.fitter, self.observations):
                table.forget()

    def prune(self, generations: set[int], pairs: set[int], running: Iterable[tuple[int, int]]) -> set[Hashable]:
        """Remove records that no call refers to; return the types and numbers of the other records.

        pairs : numbers of the (signature, scope) pairs of calls that are not written yet
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
    """Start times of steps that the program marks, or if it marks none, of its optimizer's steps."""

    def __init__(self, started_ns: int, in_header: bool) -> None:
        self._started_ns, self._in_header = started_ns, in_header
        self._reported = array("q")
        self._optimized = array("q", [0])
        self._optimizer: ref[Any] | None = None
        self.program_reports = False

    def begin_step(self) -> None:
        self._add(self._reported)

    def end_optimizer_step(self, optimizer: Any) -> None:
        if self._optimizer is None or self._optimizer() is None:
            self._optimizer = ref(optimizer)
        if self._optimizer() is optimizer:
            self._add(self._optimized)

    def starts_ns(self) -> list[int]:
        starts = self._reported if self.program_reports else self._optimized
        is_known = not self._in_header and (self.program_reports or len(starts) > 1)
        return starts.tolist() if is_known and len(starts) <= MOST_STEPS else []

    def _add(self, starts: array[int]) -> None:
        if len(starts) <= MOST_STEPS and not self._in_header:
            starts.append(perf_counter_ns() - self._started_ns)
