"""One capture's tables: numbers for what is met again, and what is to be written of it."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from time import perf_counter_ns
from typing import Any

from torch import nn

from opgrip.capture.choices import VALUE_SHARE
from opgrip.capture.contexts import describe_context, read_context
from opgrip.capture.fitting import Fitter, varies_by_values
from opgrip.capture.graph_captures import GraphCaptures
from opgrip.capture.kernels import KernelTimes
from opgrip.capture.observations import Observations
from opgrip.capture.page_faults import LARGE
from opgrip.capture.places import CallSites, Place, Places, Site, innermost_module
from opgrip.capture.signatures import call_key, describe_result
from opgrip.capture.storages import Storages
from opgrip.capture.thread_mode import ThreadMode
from opgrip.capture.torch_private import unobserved
from opgrip.traces.arguments import Opaque, numbers_of, tensors
from opgrip.traces.errors import one_line
from opgrip.traces.labels import is_mark
from opgrip.traces.records import NO_STORAGE, OPERATOR, Context, Observed, Record, Scope, Signature
from opgrip.traces.writer import encode_line

Sites = tuple[Site, ...]


class Recorder:
    """What all threads of one process share. Nothing here raises into the program that is watched.

    Parameters
    ----------
    make_mode : makes the mode of a thread that has none
    stack_depth : source lines kept of a scope
    write_ahead : `write_now` is called before every call runs

    Attributes
    ----------
    modes : one for each thread, in the order in which they were met
    pending : records that are to be written before the calls that refer to them, encoded
    path_of : the path of a module
    fitter : finds value models
    observations : which calls are looked at again
    kernels : times calls by their kernels; None where events around them do
    marks : signatures of marks of `record_function`
    families : of each signature, the first one of the operator with such tensors
    pairs : signature, scope and number of tensors that a pair's number stands for
    """

    def __init__(
        self,
        make_mode: Callable[[Recorder], ThreadMode],
        stack_depth: int = 1,
        write_ahead: bool = False,
        value_share: float = VALUE_SHARE,
    ) -> None:
        self.places = Places()
        self.path_of: Callable[[nn.Module], str | None] = lambda module: None
        self.write_ahead = write_ahead
        self.write_now: Callable[[], None] = lambda: None
        self.idle = False
        self.graphs = GraphCaptures()
        self.kernels: KernelTimes | None = None
        self._make_mode = make_mode
        self._value_share = value_share
        self._sites = CallSites(stack_depth)
        self._here = threading.local()
        self.next_mode = count().__next__
        self.modes: list[ThreadMode] = []
        self.begin()

    def begin(self) -> None:
        """Begin with empty tables, as a forked process does, of whose threads this one alone is left."""
        self.started_ns = perf_counter_ns()
        self.pid = os.getpid()
        self.storages = Storages()
        self.graphs.forget()
        if self.kernels is not None:
            self.kernels.forget()
        self.pending: list[tuple[Record, bytes]] = []
        self.pairs: list[tuple[int, int, int]] = []
        self.dropped: Counter[tuple[str, str]] = Counter()
        self.passed_by: Counter[tuple[str, str]] = Counter()
        self.signatures_closed = 0
        self.differentiable: set[int] = set()
        self.marks: set[int] = set()
        self._signatures: dict[Hashable, int] = {}
        self.families: list[int] = []
        self._first_alike: dict[Hashable, int] = {}
        self._open: dict[int, Signature] = {}
        self._open_names: dict[int, Hashable] = {}
        self._large_outputs: dict[int, int] = {}
        self._scopes: dict[Hashable, int] = {}
        self._scope_records: list[Scope] = []
        self._contexts: dict[Hashable, int] = {}
        self._pair_numbers: dict[tuple[int, int, int], int] = {}
        self.fitter = Fitter(self._pend)
        self.observations = Observations(self._value_share)
        self._own_work: set[int] = set()
        self._new = threading.RLock()
        self._stopped = False
        here: ThreadMode | None = getattr(self._here, "mode", None)
        self._here = threading.local()
        self.modes[:] = []
        if here is not None:
            self._here.mode = here
            self.modes.append(here)
            here.begin()

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
            mode = self._here.mode = self._make_mode(self)
            self.modes.append(mode)
        return mode

    @property
    def signatures(self) -> int:
        """How many distinct signatures were met."""
        return len(self._signatures)

    @contextmanager
    def own_work(self) -> Iterator[None]:
        """What this thread calls in the block is the capture's own, and not recorded.

        Else a watched function that describing a call needs would wait for itself.
        """
        ident = threading.get_ident()
        outermost = ident not in self._own_work
        self._own_work.add(ident)
        try:
            yield
        finally:
            if outermost:
                self._own_work.discard(ident)

    def at_own_work(self) -> bool:
        """Whether this thread is inside an `own_work` block."""
        return threading.get_ident() in self._own_work

    def drop(self, op: str, reason: Exception) -> None:
        """Count a call that could not be recorded."""
        self.dropped[op, one_line(reason)] += 1

    def pass_by(self, op: str, types: Sequence[type]) -> None:
        """Count a call that is in the trace as the calls that it was made of."""
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
            self._pend(signature)
            del self._open[number], self._open_names[number]
            self.signatures_closed += 1

    def point(self, signature: int, place: Place, tensors: int) -> tuple[int, int]:
        """Scope and pair of calls that are made from where this thread is."""
        scope = self.scope(self._refine_place(place), self._sites.here(), self._context(place.autocast))
        return scope, self.pair(signature, scope, tensors)

    def pair(self, signature: int, scope: int, tensors: int) -> int:
        """The number of a signature in a scope, for calls that take and give so many tensors."""
        key = (signature, scope, tensors)
        number = self._pair_numbers.get(key)
        if number is None:
            with self._new:
                number = self._pair_numbers.setdefault(key, len(self.pairs))
                if number == len(self.pairs):
                    self.pairs.append(key)
        return number

    def scope(self, place: Place, sites: Sites, context: int) -> int:
        """The number of a scope."""
        key = (place, sites, context)
        number = self._scopes.get(key)
        if number is None:
            with self._new:
                site = sites[0] if sites else Site("", "", 0)
                callers = tuple(f"{item.file}:{item.line} {item.function}" for item in sites[1:])
                where = (place.module, place.module_type, place.phase, place.inside)
                number = len(self._scope_records)
                record = Scope(number, *where, site.function, site.file, site.line, callers, context)
                record = replace(record, gripped=place.gripped)
                self._scopes[key] = number
                self._scope_records.append(record)
                self._pend(record)
        return number

    def backward_scope(self, scope: int, forward: int) -> int:
        """The number of a backward call's scope with that of the forward call that caused it."""
        key = (scope, forward)
        number = self._scopes.get(key)
        if number is None:
            with self._new:
                number = self._scopes[key] = len(self._scope_records)
                record = replace(self._scope_records[scope], number=number, forward=forward)
                self._scope_records.append(record)
                self._pend(record)
        return number

    def take_pending(self) -> list[tuple[Record, bytes]]:
        """The records that are to be written before any call that is known by now."""
        count = len(self.pending)
        taken = self.pending[:count]
        del self.pending[:count]
        return taken

    def _refine_place(self, place: Place) -> Place:
        """The place, in the module whose method runs where that is not the one that was called."""
        module = innermost_module() if place.module_type else None
        path = None if module is None else self.path_of(module)
        if path is None or path == place.module:
            return place
        return self.places.module(place, path, type(module).__name__)

    def _context(self, autocast: str) -> int:
        values = read_context()
        number = self._contexts.get((values, autocast))
        if number is None:
            with self._new:
                number = self._contexts.setdefault((values, autocast), len(self._contexts))
                self._pend(Context(number, describe_context(values) | {"autocast": autocast}))
        return number

    def _add_signature(self, key: tuple[Any, ...], kind: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
        op = str(key[0])
        with self._new, self.own_work(), unobserved():
            described_args, described_kwargs, alike = self.fitter.describe(key[0], args, kwargs)
            number = self._signatures.setdefault(key, len(self._signatures))
            if number == len(self.families):
                self.families.append(self._first_alike.setdefault(alike, number))
            if any(spec.requires_grad for spec in tensors((described_args, described_kwargs))):
                self.differentiable.add(number)
            if is_mark(op):
                self.marks.add(number)
            self._open_names[number] = key[0]
            self._open[number] = Signature(number, kind, op, described_args, described_kwargs)
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
            with self._new, self.own_work(), unobserved():
                described = self.fitter.describe_again(name, args, kwargs)
        except Exception as error:
            self.fitter.without_values[str(name), one_line(error)] += 1
            return lambda result: None

        def record_result(result: Any) -> None:
            with self._new:
                signature = self._refine_signature(
                    Signature(number, OPERATOR, str(name), *described, self._outputs(result)), name
                )
                numbers = numbers_of((signature.args, signature.kwargs))
                self._pend(Observed(number, numbers, signature.outputs, since_ns, storage))

        return record_result

    def _refine_signature(self, signature: Signature, name: Hashable) -> Signature:
        """A signature with what its outputs tell of its values."""
        try:
            with self.own_work(), unobserved():
                signature = self.fitter.refine_by_outputs(signature, name)
                if varies_by_values(signature, name) and signature.kind == OPERATOR:
                    self.observations.want(signature.number)
        except Exception as error:
            self.fitter.without_values[signature.op, one_line(error)] += 1
        return signature

    def _outputs(self, result: Any) -> Any:
        try:
            with self.own_work(), unobserved():
                return describe_result(result)
        except Exception as error:
            # without its outputs, a signature still replays
            return Opaque(one_line(error))

    def _pend(self, record: Record) -> None:
        # encoded here: at the first call of its kind that costs little, later it would hold up other calls
        with self.own_work():
            self.pending.append((record, encode_line(record)))
