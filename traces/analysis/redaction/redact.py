"""Redacts a trace file, record by record."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from opgrip.errors import UserError
from opgrip.traces.analysis.redaction.leftovers import Leftovers
from opgrip.traces.analysis.redaction.policy import Policy
from opgrip.traces.analysis.redaction.redaction import Redaction
from opgrip.traces.codec.call_blocks import CallBlock, encode_block
from opgrip.traces.io.reader import TraceReader
from opgrip.traces.io.tensor_file import HEADER_FIELD
from opgrip.traces.io.writer import TraceWriter
from opgrip.traces.schema.records import Header


@dataclass(frozen=True, slots=True)
class RedactedFile:
    """What became of a trace.

    Attributes
    ----------
    calls, records : that went out
    leftovers : what they still say
    values : operator, argument and reason of the values that stayed, with how many there are
    passed_over : types of records and fields that a later version wrote, which do not go out
    whole_values : names of the files of whole values beside the trace, which do not go out either
    missing : what a cut file lacks
    """

    calls: int
    records: int
    leftovers: Leftovers
    values: dict[tuple[str, str, str], int]
    passed_over: dict[str, int]
    whole_values: tuple[str, ...]
    missing: str | None

    def as_json(self) -> dict[str, object]:
        """What a report holds."""
        values = [
            {"op": op, "argument": argument, "why": why, "count": count}
            for (op, argument, why), count in sorted(self.values.items())
        ]
        passed_over, beside = self.passed_over, list(self.whole_values)
        return {**self.leftovers.as_json(), "values": values, "passed_over": passed_over, "whole_values": beside}


def redact(
    path: str | Path, output: Path, policy: Policy, force: bool = False, partial: bool = False, unbounded: bool = False
) -> RedactedFile:
    """Write a trace without what tells whose it is. Memory grows with its signatures and value models, not its calls.

    Parameters
    ----------
    force : replace an existing file
    partial : take what there is of a cut or damaged trace
    unbounded : as `TraceReader` has it

    Raises
    ------
    UserError : where the trace cannot be read, or a text would go out that nothing explains; nothing is written then
    """
    reader = TraceReader(path, unbounded)
    redaction, leftovers = Redaction(policy), Leftovers(policy)
    calls = records = 0
    whole_values: list[str] = []
    writer: TraceWriter | None = None
    try:
        for record in reader.columns():
            if isinstance(record, CallBlock):
                assert writer is not None
                writer.write_lines(encode_block(record))
                calls += len(record)
                continue
            if isinstance(record, Header):
                whole_values = _whole_values(record)
            for item in redaction.records(record):
                leftovers.see(item)
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
        *(calls, records, leftovers, dict(redaction.kept), dict(reader.unknown), tuple(whole_values), reader.missing)
    )


def _whole_values(header: Header) -> list[str]:
    """Names of the files beside a trace that hold whole values."""
    processes = header.fields.get("processes")
    headers = [header.fields, *(item for item in processes or () if isinstance(item, dict))]
    return [str(fields[HEADER_FIELD]) for fields in headers if fields.get(HEADER_FIELD) is not None]
