"""Redaction of a trace record by record, in a finished file or during a capture.

Each field is redacted as its type declares (`traces/schema/privacy.py`). This module adds what a declaration cannot
express: names that depend on other fields or earlier records.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from opgrip.errors import UserError
from opgrip.traces.analysis.redaction.arguments import Position, Redactor
from opgrip.traces.analysis.redaction.names import REGION, NameHasher, is_public_operator
from opgrip.traces.analysis.redaction.policy import VALUES, Policy, RedactionReport
from opgrip.traces.codec.call_blocks import CallBlock
from opgrip.traces.io.reader import TraceReader
from opgrip.traces.io.tensor_file import HEADER_FIELD
from opgrip.traces.io.writer import TraceWriter
from opgrip.traces.schema.records import (
    FUNCTION,
    Dropped,
    Effects,
    End,
    Entered,
    Header,
    Kernels,
    Observed,
    Record,
    Scope,
    Signature,
    Values,
)
from opgrip.traces.values.exact import Exact

# names of record types in the file
RECORD_NAMES: dict[type, str] = {cls: re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower() for cls in get_args(Record)}
REDACTED = "redacted"  # header field that marks a redacted trace and lists what was kept
# pattern of kernel names that compilers generate, which contain no path and no text
KERNEL = re.compile(r"[\w<>:,&*\[\]() =.~#{}-]{1,4096}")


class Redaction:
    """Redacts the records of one trace in file order.

    Arguments lose their value models, so that a replay draws default values for the operator (`traces/values`).
    """

    def __init__(self, policy: Policy, report: RedactionReport | None = None) -> None:
        self.policy = policy
        self.names = NameHasher(policy)
        self._report = report
        self._redactor = Redactor(policy, self.names, report)
        self._called: dict[int, tuple[str, str]] = {}  # operator and kind of each signature
        self._kinds: dict[str, str] = {}  # kind of each operator

    @property
    def custom_operators(self) -> list[str]:
        """Names of operators that are not hashed, although not everybody can install their extension."""
        operators = (op for op, kind in self._kinds.items() if kind != FUNCTION and not op.startswith(REGION))
        return [op for op in operators if not is_public_operator(op) and not self.names.hides(op)]

    def records(self, record: Record) -> list[Record]:
        """Return a list with the redacted record; it is empty for removed value models and unknown types of records."""
        name = RECORD_NAMES.get(type(record))
        if name is None:
            return []
        # fields of some records depend on each other or on earlier records
        redact: Callable[[Any], Record | None] = getattr(self, f"_{name}", self._plain)
        redacted = redact(record)
        return [] if redacted is None else [redacted]

    def _plain(self, record: Any, **replacements: Any) -> Any:
        return self._redactor.fields(record, Position(RECORD_NAMES[type(record)]), **replacements)

    def _header(self, record: Header) -> Header:
        marks = {"kept": sorted(self.policy.keep), "operators_hidden": self.policy.hide_operators}
        return Header({**self._redactor.fields(record, Position("header")).fields, REDACTED: marks})

    def _signature(self, record: Signature) -> Signature:
        self._called[record.number] = record.op, record.kind
        self._kinds[record.op] = record.kind
        return self._redactor.signature(record, "signature")

    def _observed(self, record: Observed) -> Any:
        op, _ = self._called.get(record.signature, ("", ""))
        values = record.values if self.policy.keeps(VALUES) else [None] * len(record.values)
        return self._plain(record, values=values, outputs=self._redactor.outputs(op, "observed", record.outputs))

    def _effects(self, record: Effects) -> Any:
        after = None
        if record.after is not None:
            redacted = self._redactor.signature(
                Signature(record.signature, FUNCTION, "", *record.after), "effects.after"
            )
            after = (redacted.args, redacted.kwargs)
        return self._plain(record, after=after)

    def _scope(self, record: Scope) -> Any:
        inside = record.inside
        if inside is not None:
            inside = self._redactor.operator("scope.inside", inside, FUNCTION if record.gripped else "")
        return self._plain(record, inside=inside, line=self.names.line(record.file, record.line))

    def _values(self, record: Values) -> Any:
        if not self.policy.keeps(VALUES):
            return None
        if self._report is not None and isinstance(record.model, Exact):
            self._report.add_values(record.model.data)
        return self._plain(record, number=record.number, model=record.model)

    def _kernels(self, record: Kernels) -> Any:
        op, kind = self._called.get(record.signature, ("", FUNCTION))
        hidden = kind == FUNCTION or self.names.hides(op)
        names = [name if KERNEL.fullmatch(name) and not hidden else self.names.word(name) for name in record.names]
        for name, image in zip(record.names, names, strict=True):
            self._redactor.note("kernels.names", "kernel", name, image, "kernel of an operator whose name stays")
        return self._plain(record, names=names)

    def _entered(self, record: Entered) -> Any:
        opened = record.opened
        return self._plain(record, opened=opened and self._redactor.signature(opened, "entered.opened"))

    def _end(self, record: End) -> Any:
        return self._plain(
            record,
            dropped=self._dropped(record.dropped, "end.dropped"),
            passed_by=self._dropped(record.passed_by, "end.passed_by"),
            without_values=self._dropped(record.without_values, "end.without_values"),
            without_work=self._dropped(record.without_work, "end.without_work"),
        )

    def _dropped(self, items: Iterable[Dropped], field_name: str) -> list[Dropped]:
        redacted = []
        for item in items:
            kind = self._kinds.get(item.op)
            op = self.names.unrecorded(item.op) if kind is None else self.names.operator(item.op, kind)
            self._redactor.note(field_name, "operator", item.op, op, self.names.reason_of_operator(op))
            redacted.append(self._redactor.fields(item, Position(field_name), op=op))
        return redacted


@dataclass(frozen=True, slots=True)
class RedactedFile:
    """Result of redacting a file.

    passed_over : number of records and fields of a later version that were left out, by type
    whole_values : names of the files with full values next to the trace, which were left out
    missing : description of what is missing in a cut file
    """

    calls: int
    report: RedactionReport
    passed_over: dict[str, int]
    whole_values: tuple[str, ...]
    missing: str | None

    def as_json(self) -> dict[str, object]:
        others = {"passed_over": self.passed_over, "whole_values": list(self.whole_values)}
        return {**self.report.as_json(), **others}


def redact(
    path: str | Path, output: Path, policy: Policy, force: bool = False, partial: bool = False, unbounded: bool = False
) -> RedactedFile:
    """Write a redacted copy of a trace; memory grows with its signatures, not with its calls."""
    reader = TraceReader(path, unbounded)
    report = RedactionReport()
    redaction = Redaction(policy, report)
    incoming = iter(reader.columns())
    header = next(incoming)
    assert isinstance(header, Header)
    (redacted,) = redaction.records(header)
    assert isinstance(redacted, Header)
    calls = 0
    with TraceWriter(output, redacted, force) as writer:
        for record in incoming:
            if isinstance(record, CallBlock):
                writer.write(record)
                calls += len(record)
                continue
            for item in redaction.records(record):
                writer.write(item)
        if reader.missing is not None and not partial:
            raise UserError(reader.missing, "redact it with --partial")
    return RedactedFile(calls, report, dict(reader.unknown), _whole_values(header), reader.missing)


def _whole_values(header: Header) -> tuple[str, ...]:
    processes = header.fields.get("processes")
    headers = [header.fields, *(item for item in processes or () if isinstance(item, dict))]
    return tuple(str(fields[HEADER_FIELD]) for fields in headers if fields.get(HEADER_FIELD) is not None)
