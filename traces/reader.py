"""Reads a trace as a stream of records, up to wherever it is whole.

Reading executes, imports and evaluates nothing that the file names.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from opgrip.traces.arguments import FormatError
from opgrip.traces.errors import UserError
from opgrip.traces.record_forms import from_json, unknown_fields
from opgrip.traces.records import FORMAT, MAJOR, Calls, End, Header, Record, Signature
from opgrip.traces.shipped import trace_file
from opgrip.traces.streams import Damage, read_chunks


class TraceReader:
    """Iterates over the records of a trace file, in memory that does not grow with it.

    Attributes
    ----------
    missing : after the iteration, what the file lacks, in words; None where it is whole
    unknown : names of record types and fields that were passed over, with their counts
    records : how many records were read, those passed over included
    """

    def __init__(self, path: str | Path) -> None:
        self.path = trace_file(path)
        self.missing: str | None = None
        self.unknown: Counter[str] = Counter()
        self.records = 0
        self._counts: Counter[str] = Counter()

    def __iter__(self) -> Iterator[Record]:
        self.missing, self.records = None, 0
        self._counts.clear()
        self.unknown.clear()
        ended = False
        try:
            for line in self._lines():
                record = self._record(line)
                self.records += 1
                if record is not None:
                    self._count(record)
                    ended = isinstance(record, End)
                    yield record
        except Damage as damage:
            if not self.records:
                raise self._not_a_trace(str(damage)) from damage
            self.missing = f"{self.path} is damaged after record {self.records}: {damage}"
            return
        if not self.records:
            raise UserError(f"{self.path} is empty", "capture it again")
        if not ended:
            self.missing = f"{self.path} is cut after record {self.records}"

    def _count(self, record: Record) -> None:
        if isinstance(record, Calls):
            self._counts["calls"] += len(record.signature)
        elif isinstance(record, Signature):
            self._counts["signatures"] += 1
        elif isinstance(record, Header) and self.records > 1:
            raise Damage("a second header: two traces were joined")
        elif isinstance(record, End):
            expected = {"calls": record.calls, "signatures": record.signatures}
            lost = [
                f"{self._counts[name]} of {count} {name}"
                for name, count in expected.items()
                if self._counts[name] < count
            ]
            if lost:
                raise Damage(f"it holds {' and '.join(lost)}")

    def _lines(self) -> Iterator[bytes]:
        pieces: list[bytes] = []
        for chunk in read_chunks(self.path):
            *whole, rest = chunk.split(b"\n")
            for line in whole:
                yield b"".join((*pieces, line))
                pieces.clear()
            pieces.append(rest)
        if last := b"".join(pieces):
            yield last

    def _record(self, line: bytes) -> Record | None:
        try:
            form = json.loads(line, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise Damage("a line is cut or is not JSON") from error
        if not isinstance(form, dict) or not isinstance(form.get("type"), str):
            raise Damage("a line is not a record")
        if not self.records:
            self._check_header(form)
        try:
            record = from_json(form)
        except (FormatError, RecursionError) as error:
            raise Damage(str(error)) from error
        if record is None:
            self.unknown[form["type"]] += 1
        else:
            self.unknown.update(f"{form['type']}.{name}" for name in unknown_fields(form))
        return record

    def _check_header(self, form: dict[str, object]) -> None:
        if form["type"] != "header" or form.get("format") != FORMAT:
            raise self._not_a_trace("its first line is not the header of one")
        version = str(form.get("version"))
        major = version.partition(".")[0]
        if not major.isdecimal() or len(major) > 9:
            raise self._not_a_trace(f"its version is {version!r}")
        if int(major) > MAJOR:
            raise UserError(
                f"{self.path} has format version {version}, newer than the {MAJOR}.x that this opgrip reads",
                "pip install --upgrade opgrip",
            )

    def _not_a_trace(self, reason: str) -> UserError:
        return UserError(f"{self.path} is not a trace ({reason})", "make one with opcapture")


def read(path: str | Path) -> Iterator[Record]:
    """The records of a trace, one after the other; ends early and quietly where the file is cut.

    Use `TraceReader` to learn what is missing.

    Raises
    ------
    UserError : where the file is not there, empty, of another kind or of a newer major version
    """
    return iter(TraceReader(path))


def read_header(path: str | Path) -> Header:
    """The first record of a trace."""
    for record in TraceReader(path):
        assert isinstance(record, Header)
        return record
    raise AssertionError("a reader that yields nothing raises")


def _refuse_constant(name: str) -> None:
    """Raise for NaN and the infinities, which Python's JSON reader takes and JSON has not."""
    raise ValueError(f"{name} is not JSON")
