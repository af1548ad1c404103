"""Validation of a trace file: schema, references between records, times of calls, and totals."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from opgrip.cli.command import counted
from opgrip.cli.output_files import Damage
from opgrip.errors import FormatError, one_line, shortened
from opgrip.traces.codec.record_forms import from_json, unknown_fields
from opgrip.traces.io.foreign_files import format_of
from opgrip.traces.io.json_stream import once
from opgrip.traces.io.reader import TraceReader, read_header, refuse_constant
from opgrip.traces.schema.arguments import numbers_of, tensors
from opgrip.traces.schema.json_values import check_nesting
from opgrip.traces.schema.records import (
    Calls,
    Context,
    DeviceTimes,
    Effects,
    End,
    Entered,
    Graph,
    GraphTimes,
    Header,
    Kernels,
    Observed,
    Record,
    Scope,
    Signature,
    Thread,
    Values,
)

MOST = 10_000  # maximum number of findings that are listed; others are only counted

FORM, SCHEMA, NUMBER, REFERENCE, TIME, TOTAL = "form", "schema", "number", "reference", "time", "total"


@dataclass(frozen=True, slots=True)
class Finding:
    """Problem found in a trace.

    record : number of the record in the file, counted from 1
    kind : `form` (unreadable line), `schema` (invalid by the JSON Schema), `number` (duplicate number), `reference`
        (dangling reference), `time` (calls overlap without nesting, or are out of order), `total` (wrong total)
    """

    record: int
    kind: str
    message: str


@dataclass(slots=True)
class Validation:
    """Problems found in a trace file: the first `MOST` of them, and the number of each kind."""

    path: Path
    records: int = 0
    findings: list[Finding] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)

    def add(self, record: int, kind: str, message: str) -> None:
        self.counts[kind] += 1
        if len(self.findings) < MOST:
            self.findings.append(Finding(record, kind, message))

    def as_json(self) -> dict[str, Any]:
        return {
            "trace": str(self.path),
            "records": self.records,
            "counts": dict(sorted(self.counts.items())),
            "notes": self.notes,
            "findings": [asdict(item) for item in self.findings],
        }


SHOWN = 5  # maximum number of dangling references that a finding lists


class References:
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
        # value models of tensors on a device come after the records that refer to them
        self._awaited_values: dict[int, int] = {}
        self._device_times: list[tuple[int, DeviceTimes]] = []

    def see(self, place: int, record: Record) -> None:
        if isinstance(record, Signature | Scope | Context | Thread):
            kind = type(record).__name__.lower()
            if record.number in self._numbers[kind]:
                self._validation.add(place, NUMBER, f"a second {kind} {record.number}")
            self._numbers[kind].add(record.number)
        if isinstance(record, Observed | Effects | Kernels | Graph | GraphTimes):
            self._refer(place, "signature", [record.signature])
        match record:
            case Signature():
                self._op_of_signature[record.number] = record.op
                arguments = (record.args, record.kwargs)
                self._models_of[record.number] = len(numbers_of(arguments))
                self._tensors_of[record.number] = sum(1 for _ in tensors(arguments))
                self._await_values(place, numbers_of((*arguments, record.outputs)))
            case Scope():
                self._refer(place, "context", [record.context])
                self._refer(place, "scope", [record.forward])
            case Values():
                self._values.add(record.number)
            case Observed():
                self._await_values(place, record.values)
                expected = self._models_of.get(record.signature, len(record.values))
                if len(record.values) != expected:
                    message = f"it has {len(record.values)} values, but its signature has {expected} tensors"
                    self._validation.add(place, REFERENCE, message)
            case Effects():
                self._await_values(place, numbers_of((record.after, record.random_state)))
            case Graph():
                self._refer(place, "signature", record.calls)
                self._refer(place, "scope", record.scope)
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
        for number, place in self._awaited_values.items():
            if number not in self._values:
                self._validation.add(place, REFERENCE, f"no record has the values {number}")
        for place, record in self._device_times:
            calls, last = self._calls_of_thread.get(record.thread, 0), record.first + len(record.device_ns)
            if last > calls:
                message = f"device times of {last:,} calls of thread {record.thread}, which made only {calls:,} calls"
                self._validation.add(place, REFERENCE, message)

        for place, opened in self._opened_signatures:
            op = self._op_of_signature.get(opened.number, opened.op)
            if op != opened.op:
                start = f"an unfinished call describes signature {opened.number} as {opened.op[:60]}"
                message = f"{start}, but its record says {op[:60]}"
                self._validation.add(place, REFERENCE, message)

    def _opened(self, place: int, number: int, opened: Signature) -> None:
        if opened.number != number:
            message = f"it refers to signature {number}, but describes signature {opened.number}"
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
            message = f"its storage numbers are relative to {record.newest}, but the largest before is {self._newest}"
            self._validation.add(place, REFERENCE, message)
        self._newest = max(self._newest, record.newest, *record.storages) if record.storages else self._newest
        lacking = [
            signature
            for signature, tensor_count in zip(record.signature, record.tensors, strict=False)
            if tensor_count and tensor_count < self._tensors_of.get(signature, 0)
        ]
        if lacking:
            message = f"calls with fewer tensors than their signatures have: {_listed(lacking)}"
            self._validation.add(place, REFERENCE, message)

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


NOT_INSTALLED = "not checked with the JSON Schema, which requires the package jsonschema"
COLUMN = 32  # number of items of a column that the JSON Schema checks; the reader checks all of them
MOST_ERRORS = 3  # maximum number of errors listed for a record


class SchemaCheck:
    def __init__(self) -> None:
        self._validators: dict[str, Any] = {}
        self.is_available = find_spec("jsonschema") is not None
        if self.is_available:
            from jsonschema import Draft202012Validator

            schema = json.loads((Path(__file__).parents[1] / "schema.json").read_text(encoding="utf-8"))
            names = [branch["$ref"].rpartition("/")[2] for branch in schema["oneOf"]]
            self._validators = {
                name: Draft202012Validator({**schema["$defs"][name], "$defs": schema["$defs"]}) for name in names
            }

    def errors(self, form: Mapping[str, Any]) -> Iterator[str]:
        validator = self._validators.get(form["type"])
        if validator is None:
            return
        if form["type"] == "calls":
            form = {name: value[:COLUMN] if isinstance(value, list) else value for name, value in form.items()}
        errors = validator.iter_errors(form)
        for _, error in zip(range(MOST_ERRORS), errors, strict=False):
            place = "".join(f"[{part!r}]" if isinstance(part, int) else f".{part}" for part in error.absolute_path)
            yield f"{place.removeprefix('.') or 'the record'}: {shortened(error.message, 160)}"


MOST_OPEN = 1 << 16  # maximum number of unfinished calls of a thread with which later calls are compared


class TimeCheck:
    def __init__(self, validation: Validation) -> None:
        self._validation = validation
        # by thread, start and end of its outermost calls, in order
        self._open: dict[int, deque[tuple[int, int]]] = {}

    def see(self, place: int, record: Calls) -> None:
        open_calls = self._open.setdefault(record.thread, deque(maxlen=MOST_OPEN))
        crossing: list[int] = []
        disordered: list[int] = []
        for index, (start, duration) in enumerate(zip(record.start_ns, record.duration_ns, strict=True)):
            end = start + duration
            if open_calls and end < open_calls[-1][1]:
                disordered.append(index)
                continue
            while open_calls and open_calls[-1][0] >= start:
                open_calls.pop()
            if open_calls and open_calls[-1][1] > start:
                crossing.append(index)
            open_calls.append((start, end))
        self._add_time_finding(place, record, crossing, "overlaps an earlier call, but is not inside it")
        self._add_time_finding(place, record, disordered, "ends before the previous call in the file")

    def _add_time_finding(self, place: int, record: Calls, indices: list[int], what: str) -> None:
        if indices:
            first = indices[0]
            others = f", and {len(indices) - 1:,} others of the block" if len(indices) > 1 else ""
            at = f"at {record.start_ns[first]} ns of thread {record.thread}"
            self._validation.add(place, TIME, f"call {first} of the block, {at}, {what}{others}")


def validate(path: str | Path, unbounded: bool = False) -> Validation:
    reader = TraceReader(path, unbounded)
    validation = Validation(reader.path)
    read_header(path, unbounded)
    references, times, totals = References(validation), TimeCheck(validation), _Totals(validation)
    name = format_of(reader.path)
    if name is not None:
        validation.notes.append(f"a file of {name}, converted to a trace and then validated")
    records = enumerate(reader, 1) if name is not None else _records(reader, validation)
    for place, record in records:
        validation.records = place
        totals.see(place, record)
        references.see(place, record)
        # times of a file without durations are those of its conversion
        if isinstance(record, Calls) and (name is None or any(record.duration_ns)):
            times.see(place, record)
    references.end()
    totals.end()
    validation.findings.sort(key=lambda finding: finding.record)
    return validation


def _records(reader: TraceReader, validation: Validation) -> Iterator[tuple[int, Record]]:
    schema = SchemaCheck()
    if not schema.is_available:
        validation.notes.append(NOT_INSTALLED)
    unknown: Counter[str] = Counter()
    place = 0
    try:
        for place, line in enumerate(reader.lines(), 1):
            validation.records = place
            try:
                form = _parse(line)
                record = from_json(form)
            except (ValueError, RecursionError) as error:
                message = str(error)[:200] if isinstance(error, FormatError) else one_line(error)
                validation.add(place, FORM, "it is nested too deeply" if isinstance(error, RecursionError) else message)
                continue
            for message in schema.errors(form):
                validation.add(place, SCHEMA, message)
            unknown.update([form["type"]] if record is None else [f"{form['type']}.{n}" for n in unknown_fields(form)])
            if record is not None:
                yield place, record
    except Damage as damage:
        validation.add(place + 1, FORM, str(damage))
    if unknown:
        names = ", ".join(f"{count:,} {name[:60]}" for name, count in unknown.most_common(20))
        validation.notes.append(f"ignored, because a newer version wrote them: {names}")


def _parse(line: bytes) -> dict[str, Any]:
    try:
        form = json.loads(line, parse_constant=refuse_constant, object_pairs_hook=once)
    except json.JSONDecodeError as error:
        raise FormatError(f"a line is cut or is not JSON ({error.msg} at character {error.pos})") from error
    if not isinstance(form, dict) or not isinstance(form.get("type"), str):
        raise FormatError("a line is not a JSON object with a `type`")
    check_nesting(line, form)
    return form


class _Totals:
    def __init__(self, validation: Validation) -> None:
        self._validation = validation
        self._counts: Counter[str] = Counter()
        self._last = 0
        self._end: int | None = None

    def see(self, place: int, record: Record) -> None:
        self._last = place
        if self._end is not None:
            self._validation.add(place, TOTAL, f"a record after the closing record, which is record {self._end}")
        match record:
            case Header() if place > 1:
                self._validation.add(place, TOTAL, "a second header: two traces were joined")
            case Calls():
                self._counts["call"] += len(record.signature)
            case Signature():
                self._counts["signature"] += 1
            case End():
                self._end = place
                self._compare(place, record)

    def _compare(self, place: int, end: End) -> None:
        for noun, total in (("call", end.calls), ("signature", end.signatures)):
            if total != self._counts[noun]:
                message = f"it counts {counted(total, noun)}, but the records before have {self._counts[noun]:,}"
                self._validation.add(place, TOTAL, message)

    def end(self) -> None:
        if self._end is None:
            self._validation.add(
                self._last, TOTAL, ("the closing record is missing: the file was cut, or its program killed")
            )
