"""One capture's tables: numbers for what is met again, and what is to be written of it."""

from __future__ import annotations

import functools
import os
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from time import perf_counter_ns
from typing import Any

from torch import nn

from opgrip.capture.program.capture_choices import VALUE_SHARE
from opgrip.capture.program.graph_captures import GraphCaptures
from opgrip.capture.program.places import CallSites, Places
from opgrip.capture.program.step_marks import StepMarks
from opgrip.capture.recording.observations import Observations
from opgrip.capture.recording.scope_table import Epochs, ScopeTable
from opgrip.capture.recording.storages import Storages
from opgrip.capture.recording.thread_mode import ThreadMode
from opgrip.capture.signatures.fitting import Fitter, varies_by_values
from opgrip.capture.signatures.layouts import with_groups
from opgrip.capture.signatures.signatures import call_key, describe_result
from opgrip.capture.timing.budget import Budget, Thinning
from opgrip.capture.timing.kernels import KernelTimes
from opgrip.capture.timing.page_faults import LARGE, SlowMemory
from opgrip.capture.torch_compat.torch_private import without_functions, without_modes
from opgrip.errors import interrupted_by, is_from_program, one_line, raise_if_from_program
from opgrip.platform.page_fault_cost import usual_fault_ns
from opgrip.traces.analysis.redaction import Policy, Redaction
from opgrip.traces.io.writer import encode_line
from opgrip.traces.schema.arguments import Opaque, numbers_of, tensors
from opgrip.traces.schema.records import NO_STORAGE, OPERATOR, Context, Observed, Record, Scope, Signature, Values
from opgrip.traces.table.profiler_labels import is_mark


class _OwnWork(threading.local):
    def __init__(self) -> None:
        self.lock = threading.RLock()


class Recorder:
    """What all threads of one process share. Nothing here raises into the program that is watched.

    Parameters
    ----------
    make_mode : makes the mode of a thread that has none
    stack_depth : source lines kept of a scope
    write_ahead : `write_now` is called before every call runs
    privacy : how records are redacted before they are encoded; None where they are written as they are

    Attributes
    ----------
    modes : one for each thread, in the order in which they were met
    pending : records that are to be written before the calls that refer to them, encoded
    privacy : as above
    redacts_late : what is pending is redacted and encoded only when it goes to a file
    path_of : the path of a module
    module_raised : is told what an outermost module raises; None where nobody asks
    fitter : finds value models
    observations : which calls are looked at again
    kernels : times calls by their kernels; None where events around them do
    marks : signatures of marks of `record_function`
    families : of each signature, the first one of the operator with such tensors
    scopes : numbers of scopes, and of signatures in them
    epochs : how often the tables were begun anew, and the numbers of what each epoch met
    budget : of the program's time; None for no such limit
    thinning : what is left out to keep within it
    slow_memory : finds calls whose page faults were slow
    taken, taken_integers : calls that were taken from the threads, and how many integers were in their rows
    passed, writing_ns : calls of modules in threads that are not recorded, and what the thread that writes has taken
    steps : when the program's steps began
    by_steps : a thread is recorded only while it is in a step, in which its mode is not idle
    """

    def __init__(
        self,
        make_mode: Callable[[Recorder], ThreadMode],
        stack_depth: int = 1,
        write_ahead: bool = False,
        value_share: float = VALUE_SHARE,
        privacy: Policy | None = None,
    ) -> None:
        self.places = Places()
        self.path_of: Callable[[nn.Module], str | None] = lambda module: None
        self.write_ahead = write_ahead
        self.write_now: Callable[[], None] = lambda: None
        self.module_raised: Callable[[BaseException], None] | None = None
        self.idle = self.by_steps = False
        self.graphs = GraphCaptures()
        self.kernels: KernelTimes | None = None
        self.budget: Budget | None = None
        self._make_mode = make_mode
        self._value_share = value_share
        self.privacy = privacy
        self.redacts_late = False
        self._sites = CallSites(stack_depth)
        self._here = threading.local()
        self.next_mode = count().__next__
        self.modes: list[ThreadMode] = []
        self.begin()

    def begin(self) -> None:
        """Begin with empty tables, as a forked process does, of whose threads this one alone is left."""
        self.started_ns = perf_counter_ns()
        self.pid = os.getpid()
        self.steps = StepMarks(self.started_ns)
        self.storages = Storages()
        self.graphs.forget()
        if self.kernels is not None:
            self.kernels.forget()
        self.pending: list[tuple[Record, bytes]] = []
        self._redaction = None if self.privacy is None else Redaction(self.privacy)
        self.epochs = Epochs()
        self._new = threading.RLock()
        self.scopes = ScopeTable(
            self.places, self._sites, self.epochs, self._new, self._pend, lambda module: self.path_of(module)
        )
        self.dropped: Counter[tuple[str, str]] = Counter()
        self.passed_by: Counter[tuple[str, str]] = Counter()
        self.signatures_closed = 0
        self.differentiable: set[int] = set()
        self.marks: set[int] = set()
        self._signatures: dict[Hashable, int] = {}
        self.families: dict[int, int] = {}
        self._first_alike: dict[Hashable, int] = {}
        self._open: dict[int, Signature] = {}
        self._open_names: dict[int, Hashable] = {}
        self._large_outputs: dict[int, int] = {}
        self.fitter = Fitter(self._pend, functools.partial(self.epochs.next, Values))
        self.observations = Observations(self._value_share)
        self._own_work = _OwnWork()
        self._stopped = False
        self.slow_memory = SlowMemory(usual_fault_ns())
        self.thinning = Thinning.NOTHING
        self.taken = self.taken_integers = self.passed = self.writing_ns = 0
        if self.budget is not None:
            # a forked process has spent nothing
            self.budget.begin()
        here: ThreadMode | None = getattr(self._here, "mode", None)
        self._here = threading.local()
        self.modes[:] = []
        if here is not None:
            self._here.mode = here
            self.modes.append(here)
            here.begin()

    def thin(self) -> Thinning:
        """Leave out from now on what there is no budget for; gives what that is."""
        if self.budget is not None:
            self.thinning = self.budget.thinning()
            self.scopes.refines = self.thinning < Thinning.SCOPES
            self.fitter.spared = self.observations.suspended = self.thinning >= Thinning.VALUES
        return self.thinning

    def leave_out(self, what: Thinning) -> bool:
        """Whether something is left out now; it is counted then."""
        if self.thinning < what or self.budget is None:
            return False
        self.budget.leave_out(what)
        return True

    def leaves_out_step(self) -> bool:
        """Whether there is no budget for the step that begins now in this thread."""
        if self.passes_step():
            return True
        began = perf_counter_ns()
        self.thin()
        is_left_out = self.leave_out(Thinning.STEPS)
        self.observations.spent_ns += perf_counter_ns() - began
        if self.budget is not None:
            self.budget.begin_step(is_left_out)
        return is_left_out

    def passes_step(self) -> bool:
        """As `Budget.passes_step`."""
        return self.budget is not None and self.budget.passes_step()

    def leave_steps(self) -> None:
        """Tell that what this thread does from now on is no step that the budget was asked for."""
        if self.budget is not None:
            self.budget.spending.begin_step(None)

    def set_idle(self, idle: bool) -> None:
        """Record calls, or let them pass."""
        self.idle = idle or self._stopped
        self.observations.set_idle(self.idle)
        for mode in self.modes:
            mode.idle = self.idle

    def stop(self) -> None:
        """Record no more, and forget what was not written."""
        self._stopped = True
        self.set_idle(True)
        for mode in self.modes:
            mode.rows.clear()

    def mode_here(self) -> ThreadMode:
        """The mode that records this thread."""
        mode: ThreadMode | None = getattr(self._here, "mode", None)
        if mode is None:
            mode = self._make_mode(self)
            mode.idle = mode.idle or self.by_steps
            # first: what interrupts this must not leave a thread with a mode that nobody reads
            self.modes.append(mode)
            self._here.mode = mode
        return mode

    def mode_in_step(self) -> ThreadMode | None:
        """The mode that records this thread; None where the thread is in no step, and only those are recorded."""
        if not self.by_steps:
            return self.mode_here()
        mode: ThreadMode | None = getattr(self._here, "mode", None)
        return None if mode is None or mode.idle else mode

    def mode_of_engine(self) -> ThreadMode:
        """The mode of this thread, which autograd runs for one that is recorded."""
        mode = self.mode_here()
        mode.idle = self.idle
        return mode

    @property
    def signatures(self) -> int:
        """How many distinct signatures were met."""
        return self.epochs.count(Signature)

    @property
    def waiting(self) -> int:
        """How many integers are in the rows of calls that nobody has taken."""
        return sum(len(mode.rows) for mode in tuple(self.modes))

    def own_work(self) -> threading.RLock:
        """Return a context in which the calls of this thread are the capture's own, and not recorded.

        Else a watched function that describing a call needs would wait for itself. It is a lock that no other thread
        has: Python enters and leaves one without a moment at which an exception could leave it held.
        """
        lock: threading.RLock = self._own_work.lock
        return lock

    def holds_tables(self) -> bool:
        """Return True if this thread holds the lock of the tables, for which another thread may wait."""
        is_held: bool = self._new._is_owned()  # type: ignore[attr-defined]
        return is_held

    def at_own_work(self) -> bool:
        """Whether this thread is inside an `own_work` block."""
        is_held: bool = self._own_work.lock._is_owned()  # type: ignore[attr-defined]
        return is_held

    def drop(self, op: str, reason: BaseException) -> None:
        """Count a call that could not be recorded; raise the reason again if it is an exception of the program."""
        raise_if_from_program(reason)
        self.count_lost(op, one_line(reason))

    def lose(self, op: str, reason: BaseException) -> None:
        """Count a call that has run, whose record something kept from being made; raise that as `drop` does."""
        is_own = not is_from_program(reason)
        self.count_lost(op, one_line(reason) if is_own else interrupted_by(reason))
        if not is_own:
            raise reason

    def count_lost(self, op: str, reason: str) -> None:
        """Count a call that ran and is not in the trace."""
        with self._new:
            self.dropped[op, reason] += 1

    def lose_values(self, op: str, reason: Exception) -> None:
        """Count a tensor whose values could not be had; raise the reason again if it is an exception of the program."""
        raise_if_from_program(reason)
        with self._new:
            self.fitter.without_values[op, one_line(reason)] += 1

    def pass_by(self, op: str, types: Sequence[type]) -> None:
        """Count a call that is in the trace as the calls that it was made of."""
        with self._new:
            self.passed_by[op, f"run by {', '.join(kind.__name__ for kind in types)}"] += 1

    def write_ahead_of(self, signature: int) -> None:
        """Write all that is known, before a call runs."""
        try:
            self.write_now()
        except Exception as error:
            self.drop(f"signature {signature}", error)

    def signature(self, name: Hashable, kind: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
        """The number of a call's signature, to be asked for before it runs.

        Parameters
        ----------
        name : what `str` turns into the operator's name
        """
        key = call_key(name, args, kwargs)
        number = self._signatures.get(key)
        return self._add_signature(key, kind, args, kwargs) if number is None else number

    def is_open(self, signature: int) -> bool:
        """Whether no call of a signature has ended yet."""
        return signature in self._open

    def output_bytes(self, signature: int) -> int:
        """Bytes of the results of a signature's first call; 0 where they are few or not known."""
        return self._large_outputs.get(signature, 0)

    def name_of(self, signature: int) -> str:
        """Return the name of the operator of a signature of which no call has ended."""
        return str(self._open_names.get(signature, f"signature {signature}"))

    def open_signature(self, signature: int) -> Signature | None:
        """A signature of which no call has ended yet, as far as it is known."""
        return self._open.get(signature)

    def close_signature(self, number: int, result: Any, raised: BaseException | None) -> None:
        """Tell what the first call of a signature that has ended gave."""
        with self._new:
            signature = self._open.get(number)
            if signature is None:
                return
            if raised is not None:
                signature = replace(signature, raised=one_line(raised))
            else:
                signature = replace(signature, outputs=self._outputs(result))
                signature = self._refine_signature(signature, self._open_names[number])
                size = sum(spec.extent for spec in tensors(signature.outputs))
                if size >= LARGE:
                    self._large_outputs[number] = size
            self._append(signature, closes=number)
            self._open_names.pop(number, None)

    def forget_mode(self, mode: ThreadMode) -> None:
        """Forget the mode of a thread that has ended, when its calls were taken."""
        with suppress(ValueError):
            self.modes.remove(mode)

    def forget(self) -> None:
        """Begin anew with what was met; what calls refer to by number stays until `prune`."""
        with self._new:
            self.epochs.begin()
            self._signatures.clear()
            self._first_alike.clear()
            self.scopes.forget()
            self.fitter.forget()
            self.observations.forget()

    def prune(self, epochs: set[int], pairs: set[int], running: Iterable[tuple[int, int]]) -> set[Hashable]:
        """Forget all numbers but these, and what they refer to; gives the names of what calls may still refer to.

        Parameters
        ----------
        epochs : whose numbers some thread may still use
        pairs : of calls that were not written yet
        running : signatures and scopes of calls that have not ended
        """
        with self._new:
            self.scopes.prune_pairs(epochs, pairs)
            kept_pairs = self.scopes.pairs.values()
            signatures = {pair[0] for pair in kept_pairs} | {signature for signature, _ in running}
            scopes = {pair[1] for pair in kept_pairs} | {scope for _, scope in running}
            signatures.update(self._open, self.epochs.numbers(Signature, epochs))
            scopes.update(self.epochs.numbers(Scope, epochs))
            self.families = {number: self.families[number] for number in signatures if number in self.families}
            self.scopes.prune_scopes(scopes)
            self._large_outputs = {number: size for number, size in self._large_outputs.items() if number in signatures}
            self.differentiable &= signatures
            self.marks &= signatures
            self.fitter.prune(set(self.epochs.numbers(Values, epochs)))
            self.epochs.keep(epochs)
        named = ((Context, self.epochs.numbers(Context, epochs)), (Values, self.epochs.numbers(Values, epochs)))
        names: set[Hashable] = {(kind, number) for kind, numbers in named for number in numbers}
        return names | {(Signature, number) for number in signatures} | {(Scope, number) for number in scopes}

    def take_pending(self) -> list[tuple[Record, bytes]]:
        """The records that are to be written before any call that is known by now."""
        count = len(self.pending)
        taken = self.pending[:count]
        del self.pending[:count]
        return taken

    @property
    def custom_operators(self) -> list[str]:
        """Of a private capture, the operators of the program whose names are in the trace."""
        return [] if self._redaction is None else self._redaction.custom_operators

    def outgoing(self, record: Record) -> Sequence[Record]:
        """What is written of a record: itself, or what its redaction makes of it."""
        if self._redaction is None:
            return (record,)
        # values are redacted by operators, which are no calls of the program
        with self._new, without_modes(), without_functions():
            return self._redaction.records(record)

    def _add_signature(self, key: tuple[Any, ...], kind: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
        op = str(key[0])
        with self._new, self.own_work(), without_modes(), without_functions():
            number = self._signatures.get(key)
            if number is not None:
                # another thread was faster
                return number
            self.leave_out(Thinning.VALUES)
            described_args, described_kwargs, alike = self.fitter.describe(key[0], args, kwargs)
            described_args = with_groups(key[0], described_args)
            number = self.epochs.next(Signature)
            self.families[number] = self._first_alike.setdefault(alike, number)
            if any(spec.requires_grad for spec in tensors((described_args, described_kwargs))):
                self.differentiable.add(number)
            if is_mark(op):
                self.marks.add(number)
            self._open_names[number] = key[0]
            signature = Signature(number, kind, op, described_args, described_kwargs)
            # last: whoever finds the number finds all that belongs to it
            self._open[number], self._signatures[key] = signature, number
        return number

    def observe(
        self,
        number: int,
        name: Hashable,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        call: tuple[int, int] | None = None,
    ) -> Callable[[Any], None]:
        """Look at the values of a later call of a signature, before it runs; gives what is to be told its result.

        Parameters
        ----------
        name : the operator
        call : what tells it from others, where the look is for its place: when the look began, and the memory of the
            first tensor
        """
        since_ns, storage = (None, None) if call is None else (call[0] - self.started_ns, call[1])
        if storage == NO_STORAGE:
            storage = None
        try:
            with self._new, self.own_work(), without_modes(), without_functions():
                described = self.fitter.describe_again(name, args, kwargs)
        except Exception as error:
            self.lose_values(str(name), error)
            return lambda result: None

        def record_result(result: Any) -> None:
            try:
                with self._new:
                    signature = self._refine_signature(
                        Signature(number, OPERATOR, str(name), *described, self._outputs(result)), name
                    )
                    numbers = numbers_of((signature.args, signature.kwargs))
                    self._pend(Observed(number, numbers, signature.outputs, since_ns, storage))
            except Exception as error:
                self.lose_values(str(name), error)

        return record_result

    def _refine_signature(self, signature: Signature, name: Hashable) -> Signature:
        """A signature with what its outputs tell of its values."""
        try:
            with self.own_work(), without_modes(), without_functions():
                signature = self.fitter.refine_by_outputs(signature, name)
                if varies_by_values(signature, name) and signature.kind == OPERATOR:
                    self.observations.want(signature.number)
        except Exception as error:
            self.lose_values(signature.op, error)
        return signature

    def _outputs(self, result: Any) -> Any:
        try:
            with self.own_work(), without_modes(), without_functions():
                return describe_result(result)
        except Exception as error:
            raise_if_from_program(error)
            # without its outputs, a signature still replays
            return Opaque(one_line(error))

    def _pend(self, record: Record) -> None:
        with self._new:
            self._append(record)

    def _append(self, record: Record, closes: int | None = None) -> None:
        """Append a record to `pending`; the caller holds the lock.

        Parameters
        ----------
        closes : number of the open signature that the record is of
        """
        try:
            lines = self._encoded(record)
            # no call and no loop from here on, so that nothing can interrupt: what is appended is closed and counted
            self.pending += lines
            if closes is not None:
                del self._open[closes]
                self.signatures_closed += 1
        except BaseException:
            if self._redaction is not None:
                # the value models of a record that is not written are written with the next one
                self._redaction.take_back()
            raise

    def _encoded(self, record: Record) -> list[tuple[Record, bytes]]:
        """Return a record as `pending` holds it."""
        # encoded here: at the first call of its kind that costs little, later it would hold up other calls
        with self.own_work():
            if self.privacy is not None and self.redacts_late:
                return [(record, b"")]
            return [(item, encode_line(item)) for item in self.outgoing(record)]
