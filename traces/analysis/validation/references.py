"""Numbers that records refer to each other by: each stands once, and before what refers to it."""

from __future__ import annotations

from collections.abc import Iterable

from opgrip.traces.analysis.validation.findings import NUMBER, REFERENCE, Validation
from opgrip.traces.schema.arguments import numbers_of, tensors
from opgrip.traces.schema.records import (
    Calls,
    Context,
    DeviceTimes,
    Effects,
    Entered,
    Kernels,
    Observed,
    Record,
    Scope,
    Signature,
    Thread,
    Values,
)

SHOWN = 5
"""Numbers of a record that refer to nothing which its finding lists."""


class References:
    """Checks the numbers of records in their order."""

    def __init__(self, validation: Validation) -> None:
        self._validation = validation
        self._numbers: dict[str, set[int]] = {name: set() for name in ("signature", "scope", "context", "thread")}
        self._values: set[int] = set()
        self._models_of: dict[int, int] = {}
        self._tensors_of: dict[int, int] = {}
        self._calls_of_thread: dict[int, int] = {}
        self._newest = -1
        self._op_of_signature: dict[int, str] = {}
        self._opened_signatures: list[tuple[int, Signature]] = []
        # value models that come from a device stand behind what refers to them
        self._awaited_values: dict[int, int] = {}
        self._device_times: list[tuple[int, DeviceTimes]] = []

    def see(self, place: int, record: Record) -> None:
        """Check a record."""
        match record:
            case Signature():
                self._define(place, "signature", record.number)
                self._op_of_signature[record.number] = record.op
                arguments = (record.args, record.kwargs)
                self._models_of[record.number] = len(numbers_of(arguments))
                self._tensors_of[record.number] = sum(1 for _ in tensors(arguments))
                self._await_values(place, numbers_of((*arguments, record.outputs)))
            case Scope():
                self._define(place, "scope", record.number)
                self._refer(place, "context", [record.context])
                self._refer(place, "scope", [record.forward])
            case Context():
                self._define(place, "context", record.number)
            case Thread():
                self._define(place, "thread", record.number)
            case Values():
                self._values.add(record.number)
            case Observed():
                self._refer(place, "signature", [record.signature])
                self._await_values(place, record.values)
                expected = self._models_of.get(record.signature, len(record.values))
                if len(record.values) != expected:
                    message = f"{len(record.values)} values, and its signature has {expected} tensors"
                    self._validation.add(place, REFERENCE, message)
            case Effects():
                self._refer(place, "signature", [record.signature])
                self._await_values(place, numbers_of((record.after, record.random_state)))
            case Kernels():
                self._refer(place, "signature", [record.signature])
            case Calls():
                self._calls(place, record)
            case DeviceTimes():
                self._device_times.append((place, record))
            case Entered():
                self._refer(place, "thread", [record.thread])
                self._refer(place, "scope", [record.scope])
                if record.opened is None:
                    self._refer(place, "signature", [record.signature])
                else:
                    self._opened(place, record.signature, record.opened)

    def end(self) -> None:
        """Check what later records could have had."""
        for number, place in self._awaited_values.items():
            if number not in self._values:
                self._validation.add(place, REFERENCE, f"no record has the values {number}")
        for place, record in self._device_times:
            calls, last = self._calls_of_thread.get(record.thread, 0), record.first + len(record.device_ns)
            if last > calls:
                message = f"device times of {last:,} calls of thread {record.thread}, which made {calls:,}"
                self._validation.add(place, REFERENCE, message)

        for place, opened in self._opened_signatures:
            op = self._op_of_signature.get(opened.number, opened.op)
            if op != opened.op:
                message = f"signature {opened.number} was entered as {opened.op[:60]}, and is one of {op[:60]}"
                self._validation.add(place, REFERENCE, message)

    def _opened(self, place: int, number: int, opened: Signature) -> None:
        if opened.number != number:
            message = f"it entered signature {number}, and describes signature {opened.number}"
            self._validation.add(place, REFERENCE, message)
        self._await_values(place, numbers_of((opened.args, opened.kwargs)))
        self._opened_signatures.append((place, opened))

    def _calls(self, place: int, record: Calls) -> None:
        self._refer(place, "thread", [record.thread])
        self._refer(place, "signature", record.signature)
        self._refer(place, "scope", record.scope)
        count = len(record.signature)
        self._calls_of_thread[record.thread] = self._calls_of_thread.get(record.thread, 0) + count
        if record.storages and record.newest != self._newest:
            message = f"storages that count from {record.newest}, and the largest before is {self._newest}"
            self._validation.add(place, REFERENCE, message)
        self._newest = max(self._newest, record.newest, *record.storages) if record.storages else self._newest
        lacking = [
            signature
            for signature, given in zip(record.signature, record.tensors, strict=False)
            if given and given < self._tensors_of.get(signature, 0)
        ]
        if lacking:
            message = f"calls with fewer tensors than their signatures have: {_listed(lacking)}"
            self._validation.add(place, REFERENCE, message)

    def _define(self, place: int, kind: str, number: int) -> None:
        if number in self._numbers[kind]:
            self._validation.add(place, NUMBER, f"a second {kind} {number}")
        self._numbers[kind].add(number)

    def _refer(self, place: int, kind: str, numbers: Iterable[int | None]) -> None:
        missing = {number for number in numbers if number is not None} - self._numbers[kind]
        if missing:
            self._validation.add(place, REFERENCE, f"no record before has the {kind} {_listed(missing)}")

    def _await_values(self, place: int, numbers: Iterable[int | None]) -> None:
        for number in numbers:
            if number is not None and number not in self._values:
                self._awaited_values.setdefault(number, place)


def _listed(numbers: Iterable[int]) -> str:
    ordered = sorted(set(numbers))
    others = f" and {len(ordered) - SHOWN} others" if len(ordered) > SHOWN else ""
    return ", ".join(map(str, ordered[:SHOWN])) + others
