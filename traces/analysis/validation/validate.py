"""Holds a trace against its format, to its end: a finding does not keep what follows from being looked at."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from opgrip.cli.compressed_files import Damage
from opgrip.cli.plural import counted
from opgrip.errors import FormatError, one_line
from opgrip.traces.analysis.validation.findings import FORM, SCHEMA, TOTAL, Validation
from opgrip.traces.analysis.validation.references import References
from opgrip.traces.analysis.validation.schema import NOT_INSTALLED, Schema
from opgrip.traces.analysis.validation.times import Times
from opgrip.traces.codec.record_forms import from_json, unknown_fields
from opgrip.traces.io.foreign_files import format_of, once
from opgrip.traces.io.reader import TraceReader, read_header, refuse_constant
from opgrip.traces.schema.limits import check_nesting
from opgrip.traces.schema.records import Calls, End, Header, Record, Signature


def validate(path: str | Path, unbounded: bool = False) -> Validation:
    """What is wrong in a file; of one of another tool, in the trace that it is read as.

    Raises
    ------
    UserError : where the file is not there, is no trace, of a newer major version, or beyond a bound
    """
    reader = TraceReader(path, unbounded)
    validation = Validation(reader.path)
    read_header(path, unbounded)
    references, times, totals = References(validation), Times(validation), _Totals(validation)
    name = format_of(reader.path)
    if name is not None:
        validation.notes.append(f"a file of {name}, validated as the trace that it is read as")
    records = enumerate(reader, 1) if name is not None else _records(reader, validation)
    for place, record in records:
        validation.records = place
        totals.see(place, record)
        references.see(place, record)
        if isinstance(record, Calls):
            times.see(place, record)
    references.end()
    totals.end()
    validation.findings.sort(key=lambda finding: finding.record)
    return validation


def _records(reader: TraceReader, validation: Validation) -> Iterator[tuple[int, Record]]:
    """The records of a trace of ours that are whole, with their numbers."""
    schema = Schema()
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
                reason = "it nests too deep" if isinstance(error, RecursionError) else _reason(error)
                validation.add(place, FORM, reason)
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
        validation.notes.append(f"passed over, of a newer version: {names}")


def _parse(line: bytes) -> dict[str, Any]:
    try:
        form = json.loads(line, parse_constant=refuse_constant, object_pairs_hook=once)
    except json.JSONDecodeError as error:
        raise FormatError(f"a line is cut or is not JSON ({error.msg} at character {error.pos})") from error
    if not isinstance(form, dict) or not isinstance(form.get("type"), str):
        raise FormatError("a line is not a record")
    check_nesting(line, form)
    return form


def _reason(error: Exception) -> str:
    return str(error)[:200] if isinstance(error, FormatError) else one_line(error)


class _Totals:
    """Checks that there is one header, and that the end tells what stands before it."""

    def __init__(self, validation: Validation) -> None:
        self._validation = validation
        self._counts: Counter[str] = Counter()
        self._last = 0
        self._end: int | None = None

    def see(self, place: int, record: Record) -> None:
        self._last = place
        if self._end is not None:
            self._validation.add(place, TOTAL, f"a record behind the end, which is record {self._end}")
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
                message = f"{counted(total, noun)}, and the records before have {self._counts[noun]:,}"
                self._validation.add(place, TOTAL, message)

    def end(self) -> None:
        if self._end is None:
            self._validation.add(self._last, TOTAL, "the file has no end: it was cut, or its program killed")
