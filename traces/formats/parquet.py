"""A trace of ours as Parquet: one row a call, for pandas, DuckDB and Polars, with all else that the trace holds.

Every row is a call. What stands between the blocks of calls of a trace, its header, signatures, scopes and so on, is
JSON Lines in the column `records`, at the first call of the block that follows, with what a block has besides its
columns. So a file is written and read in the order of the trace, in memory that its signatures bound, and gives the
same records again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import IO, Any

import torch

from opgrip.traces.arguments import FormatError, TensorSpec, encode
from opgrip.traces.extras import needed
from opgrip.traces.foreign import ForeignFile, Format, Head, Losses, formats
from opgrip.traces.formats.parquet_files import EXTRA, MAGIC, MARK, footer_of, open_parquet, rows_of
from opgrip.traces.names import plain_name, tensor_outline
from opgrip.traces.record_forms import from_json, to_json
from opgrip.traces.records import Calls, Header, Record, Scope, Signature, Thread
from opgrip.traces.words import counted

ALONE = b"opgrip.records"
"""Key of the note that has the records of a trace without calls."""
NUMBERS = ("signature", "scope", "start_ns", "duration_ns", "device_ns", "stream")
NAMES = ("op", "kind", "arguments", "module", "function", "file", "phase", "inside", "thread")
RECORDS = "records"
GROUP = 1 << 16
"""Calls that are written at a time."""
MOST_TEXT = 64 << 20
"""Bytes of the records between two blocks."""
MOST_OUTLINE = 1000
"""Characters of the arguments of a call, for people."""


def recognizes(head: Head) -> bool:
    """Whether it is a Parquet file that says it is one of these."""
    return head.start.startswith(MAGIC) and MARK in footer_of(head.path)


def write_records(records: Iterable[Record], file: IO[bytes], losses: Losses) -> None:
    """A trace's records as they come."""
    table = _Table(file)
    for record in records:
        table.add(record)
    table.close()


class _Table:
    """A file that is being written. The last block is held back, as what follows it stands with it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._arrow = needed("pyarrow", EXTRA)
        self._parquet = needed("pyarrow.parquet", EXTRA)
        self._file = file
        self._writer: Any = None
        self._columns: dict[str, list[Any]] = {name: [] for name in (*NUMBERS, *NAMES, RECORDS)}
        self._lines: list[str] = []
        self._block: Calls | None = None
        self._signatures: dict[int, Signature] = {}
        self._outlines: dict[int, str] = {}
        self._scopes: dict[int, Scope] = {}
        self._threads: dict[int, str] = {}

    def add(self, record: Record) -> None:
        """Add a record."""
        match record:
            case Signature():
                self._signatures[record.number] = record
                self._outlines[record.number] = outline(record)
            case Scope():
                self._scopes[record.number] = record
            case Thread():
                self._threads[record.number] = record.name
        form = to_json(record)
        if isinstance(record, Calls) and record.signature:
            self._end_block()
            self._block = record
            for name in ("start_ns", "signature", "scope", "after_ns", "duration_ns", "streams"):
                form.pop(name, None)
            form["device_ns"] = bool(record.device_ns)
            form["rows"] = len(record.signature)
        self._lines.append(json.dumps(form, allow_nan=False, separators=(",", ":")))

    def close(self) -> None:
        """Write what remains."""
        self._end_block()
        if self._columns[RECORDS] or self._writer is None:
            self._write()
        self._writer.close()

    def _end_block(self) -> None:
        """Move the block that was held back to the rows, with the records around it."""
        block = self._block
        if block is None:
            return
        columns = self._columns
        columns["signature"] += block.signature
        columns["scope"] += block.scope
        columns["start_ns"] += block.start_ns
        columns["duration_ns"] += block.duration_ns
        count = len(block.signature)
        columns["device_ns"] += [None if time < 0 else time for time in block.device_ns] or [None] * count
        columns["stream"] += block.streams or [0] * count
        self._add_names(block)
        columns[RECORDS] += ["\n".join(self._lines), *[None] * (count - 1)]
        self._lines.clear()
        self._block = None
        if len(columns[RECORDS]) >= GROUP:
            self._write()

    def _add_names(self, block: Calls) -> None:
        columns = self._columns
        empty_scope, empty = Scope(0, "", "", ""), Signature(0, "", "", (), {})
        for number in block.signature:
            signature = self._signatures.get(number, empty)
            columns["op"].append(signature.op)
            columns["kind"].append(signature.kind)
            columns["arguments"].append(self._outlines.get(number, ""))
        for number in block.scope:
            scope = self._scopes.get(number, empty_scope)
            # as `Trace.calls` has it: a backward call is of the module that its forward call was of
            origin = self._scopes.get(scope.forward, scope) if scope.forward is not None else scope
            for name in ("module", "function", "file"):
                columns[name].append(getattr(origin, name))
            columns["phase"].append(scope.phase)
            columns["inside"].append(scope.inside)
        columns["thread"] += [self._threads.get(block.thread, str(block.thread))] * len(block.scope)

    def _write(self) -> None:
        arrow = self._arrow
        fields = [arrow.field(name, arrow.int64()) for name in NUMBERS]
        fields += [arrow.field(name, arrow.string()) for name in (*NAMES, RECORDS)]
        if self._writer is None:
            notes = {MARK: b"1"}
            if not self._columns[RECORDS]:
                notes[ALONE] = "\n".join(self._lines).encode("utf-8", "backslashreplace")
            self._writer = self._parquet.ParquetWriter(
                self._file, arrow.schema(fields, metadata=notes), compression="zstd"
            )
        self._writer.write_table(arrow.table(self._columns, arrow.schema(fields)))
        for column in self._columns.values():
            column.clear()


def outline(signature: Signature) -> str:
    """A call's arguments in short: `float32[2,3], 1, alpha=2`."""
    named = (f"{name}={_outline(value)}" for name, value in signature.kwargs.items())
    text = ", ".join([*map(_outline, signature.args), *named])
    return text if len(text) <= MOST_OUTLINE else f"{text[: MOST_OUTLINE - 1]}…"


def _outline(value: Any) -> str:
    match value:
        case TensorSpec():
            return tensor_outline(value.dtype, value.shape)
        case list() | tuple():
            return f"[{', '.join(map(_outline, value))}]"
        case None | bool() | int() | float() | str():
            return repr(value)
        case torch.dtype() | torch.layout() | torch.memory_format() | torch.device():
            return plain_name(value)
    return json.dumps(encode(value))


def read(file: ForeignFile) -> Iterator[Record]:
    """The records of a trace, in their order."""
    content = open_parquet(file, {**dict.fromkeys(NUMBERS, "int64"), RECORDS: "string"}, (RECORDS,))
    notes = content.schema_arrow.metadata or {}
    records = _records(file, content, notes.get(ALONE, b""))
    first = next(records, None)
    if not isinstance(first, Header):
        raise file.damage("it does not begin with the header of a trace")
    yield first
    for record in records:
        if isinstance(record, Header):
            raise file.damage("it has a second header")
        yield record


def _records(file: ForeignFile, content: Any, alone: bytes) -> Iterator[Record]:
    for written in alone.splitlines():
        yield from _known(file, file.parse(written))
    rows = rows_of(file, content, (*NUMBERS, RECORDS), MOST_TEXT)
    for row in rows:
        text = row[RECORDS]
        if not isinstance(text, str):
            raise file.damage("a call stands in no block")
        has_block = False
        for line in text.split("\n"):
            form = file.parse(line)
            if isinstance(form, dict) and form.get("type") == "calls" and "rows" in form and not has_block:
                has_block = True
                form = _block(file, form, row, rows)
            yield from _known(file, form)
        if not has_block:
            raise file.damage("a call stands in no block")


def _known(file: ForeignFile, form: Any) -> Iterator[Record]:
    """The record of a form; none where this version does not know its type."""
    if not isinstance(form, dict):
        raise file.damage("a line is not a record")
    try:
        record = from_json(form)
    except (FormatError, RecursionError) as error:
        raise file.damage(str(error)) from error
    if record is not None:
        yield record


def _block(
    file: ForeignFile, form: Mapping[str, Any], first: Mapping[str, Any], rows: Iterator[dict[str, Any]]
) -> dict[str, Any]:
    """The form of a block with its columns again."""
    count = form["rows"]
    if type(count) is not int or count < 1:
        raise file.damage("a block of no calls")
    block = [first]
    while len(block) < count:
        row = next(rows, None)
        if row is None or row[RECORDS] is not None:
            raise file.damage(f"a block has {counted(len(block), 'call')}, not {count}")
        block.append(row)
    starts = [row["start_ns"] for row in block]
    if not all(type(start) is int for start in starts):
        raise file.damage("a call without a time")
    after = [later - earlier for earlier, later in pairwise(starts)]
    columns: dict[str, Any] = {name: [row[name] for row in block] for name in ("signature", "scope", "duration_ns")}
    columns |= {"start_ns": starts[0], "after_ns": [0, *after]}
    streams = [row["stream"] for row in block]
    if any(streams):
        columns["streams"] = streams
    if form.get("device_ns") is True:
        columns["device_ns"] = [-1 if row["device_ns"] is None else row["device_ns"] for row in block]
    rest = {name: value for name, value in form.items() if name not in ("rows", "device_ns")}
    return {**rest, **columns}


formats.register("parquet")(
    Format(
        "a trace of opgrip as Parquet: one row a call, for pandas, DuckDB and Polars",
        recognizes,
        read,
        write_records=write_records,
        suffixes=(".parquet",),
    )
)
