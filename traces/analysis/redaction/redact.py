"""Redaction of a trace file, record by record."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from opgrip.errors import UserError
from opgrip.traces.analysis.redaction.policy import Policy, RedactionReport
from opgrip.traces.analysis.redaction.redaction import Redaction
from opgrip.traces.codec.call_blocks import CallBlock
from opgrip.traces.io.reader import TraceReader
from opgrip.traces.io.tensor_file import HEADER_FIELD
from opgrip.traces.io.writer import TraceWriter
from opgrip.traces.schema.records import Header


@dataclass(frozen=True, slots=True)
class RedactedFile:
    """A redacted file.

    Attributes
    ----------
    calls, records : how many were written
    values : number of value models that stayed, by operator, argument and reason
    passed_over : types of records and fields of a later version, which were left out
    whole_values : names of the files with whole values next to the trace, which were left out
    missing : what a cut file lacks
    """

    calls: int
    records: int
    report: RedactionReport
    values: dict[tuple[str, str, str], int]
    passed_over: dict[str, int]
    whole_values: tuple[str, ...]
    missing: str | None

    def as_json(self) -> dict[str, object]:
        """Return the report as JSON."""
        values = [
            {"op": op, "argument": argument, "why": why, "count": count}
            for (op, argument, why), count in sorted(self.values.items())
        ]
        others = {"passed_over": self.passed_over, "whole_values": list(self.whole_values)}
        return {**self.report.as_json(), "values": values, **others}


def redact(
    path: str | Path, output: Path, policy: Policy, force: bool = False, partial: bool = False, unbounded: bool = False
) -> RedactedFile:
    """Write a redacted trace. Memory grows with its signatures and value models, not with its calls.

    Parameters
    ----------
    force : replace an existing file
    partial : accept a cut or damaged trace
    unbounded : as in `TraceReader`

    Raises
    ------
    UserError : if the trace cannot be read; nothing is written then
    """
    reader = TraceReader(path, unbounded)
    report = RedactionReport()
    redaction = Redaction(policy, report)
    calls = records = 0
    whole_values: list[str] = []
    writer: TraceWriter | None = None
    try:
        for record in reader.columns():
            if isinstance(record, CallBlock):
                assert writer is not None
                writer.write(record)
                calls += len(record)
                continue
            if isinstance(record, Header):
                whole_values = _whole_values(record)
            for item in redaction.records(record):
                if isinstance(item, Header):
                    writer = TraceWriter(output, item, force)
                else:
                    assert writer is not None
                    writer.write(item)
                records += 1
        if reader.missing is not None and not partial:
            raise UserError(reader.missing, "--partial takes it so")
        assert writer is not None
        writer.close()
    except BaseException:
        if writer is not None:
            writer.discard()
        raise
    return RedactedFile(
        *(calls, records, report, dict(redaction.kept), dict(reader.unknown), tuple(whole_values), reader.missing)
    )


def _whole_values(header: Header) -> list[str]:
    """Return the names of the files of whole values next to a trace."""
    processes = header.fields.get("processes")
    headers = [header.fields, *(item for item in processes or () if isinstance(item, dict))]
    return [str(fields[HEADER_FIELD]) for fields in headers if fields.get(HEADER_FIELD) is not None]
