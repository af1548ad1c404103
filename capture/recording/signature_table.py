"""The signatures of a recording: their numbers, and the known parts of signatures whose record is not written yet.

Everything about a signature is available as soon as its number is, and its record is written before any call that
refers to it, even if a thread is interrupted while it adds the signature. A signature is *open* from its first
occurrence until one of its calls has ended. Only then are its outputs known and its record is made.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from typing import Any

import torch

from opgrip.capture.recording.observations import Observations
from opgrip.capture.recording.pending_records import LostCalls, OwnCalls, PendingRecords
from opgrip.capture.recording.scope_table import Generations
from opgrip.capture.signatures.fitting import Fitter, varies_by_values
from opgrip.capture.signatures.layouts import with_groups
from opgrip.capture.signatures.signatures import call_key, describe_result
from opgrip.capture.timing.page_faults import LARGE
from opgrip.capture.torch_compat.torch_private import registered_by, without_functions, without_modes
from opgrip.errors import one_line, raise_if_from_program
from opgrip.traces.schema.arguments import Opaque, numbers_of, tensors, with_numbers
from opgrip.traces.schema.records import EXTENSION, NO_STORAGE, OPERATOR, Observed, Signature
from opgrip.traces.table.accelerators import HOST, device_of
from opgrip.traces.table.profiler_labels import is_mark


class SignatureTable:
    """The signatures of one recording, with their numbers.

    note_new : called before a new signature is added

    closed : number of signatures whose records were made
    marks : signatures of `record_function` labels
    on_accelerator : signatures with a tensor on an accelerator
    families : for each signature, the first signature of the same operator with similar tensors
    """

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
        self.marks: set[int] = set()
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
        """Return the number of a call's signature, which is added if it is new. Call this before the call runs.

        name : operator, or name of a function
        """
        key = call_key(name, args, kwargs)
        number = self._numbers.get(key)
        return self._add(key, kind, args, kwargs) if number is None else number

    def keys(self) -> dict[int, Hashable]:
        return {number: key for key, number in self._numbers.items()}

    def adopt(self, key: Hashable, record: Signature) -> int:
        """Return the number of the signature with this key; add `record` of another recording if there is none."""
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
        """Add a signature for the launches of a CUDA or HIP graph on a device, and return its number."""
        with self._lock:
            number = self._generations.next(Signature)
            self._pending.add(Signature(number, EXTENSION, op, (graph,), {"device": device}, outputs=None))
            self.closed += 1
        return number

    def is_open(self, number: int) -> bool:
        """Return True if no call of the signature has ended yet, so that its record is not made."""
        return number in self._open

    def open_name(self, number: int) -> str:
        """Return the operator name of a signature whose record is not made yet, and `signature N` for others."""
        return str(self._open_names.get(number, f"signature {number}"))

    def open_record(self, number: int) -> Signature | None:
        """Return the known part of a signature's record that is not made yet, and None for other signatures."""
        return self._open.get(number)

    def output_bytes(self, number: int) -> int:
        """Return the size in bytes of the results of a signature's first call; 0 if that is small or unknown."""
        return self._large_outputs.get(number, 0)

    def close(self, number: int, result: Any, raised: BaseException | None) -> None:
        """Make the record of an open signature when the first of its calls has ended or raised an error."""
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
        """Observe the values of a later call of a signature before it runs; return a function that records its result.

        name : operator
        since_ns, storage : start time of the observation, and storage number of the first tensor, by which the trace
            identifies the call; None unless the call was chosen for its call site
        """
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
        """Read the values of a later call, in place of values that could not be read at the signature's first call.

        Return a function to call with the result of the later call.
        """
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
        """Start new tables; the caller must hold the lock. Records to which calls refer stay until `prune`."""
        self._numbers.clear()
        self._first_alike.clear()

    def prune(self, numbers: Iterable[int], generations: set[int]) -> set[int]:
        """Remove all signatures except `numbers`, open ones, and those of the generations; return those kept.

        The caller must hold the lock.
        """
        remaining = {*numbers, *self._open, *self._generations.numbers(Signature, generations)}
        self.families = {number: self.families[number] for number in remaining if number in self.families}
        self._large_outputs = {number: size for number, size in self._large_outputs.items() if number in remaining}
        self._unread = {number: values for number, values in self._unread.items() if number in remaining}
        self.differentiable &= remaining
        self.marks &= remaining
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
                self.marks.add(number)
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
