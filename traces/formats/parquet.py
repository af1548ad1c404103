"""Traces of opgrip as Parquet files with one row per call, for pandas, DuckDB and Polars, without loss.

Other records of a trace, such as its header, signatures and scopes, are JSON Lines in the column `records`, in the row
of the first call after them. The column also holds members of a block that are not columns. Files are written and read
in trace order, in memory proportional to the number of signatures.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import IO, Any

import numpy as np

from opgrip.cli.command import counted
from opgrip.errors import one_line
from opgrip.traces.codec.call_blocks import (
    NONE,
    CallBlock,
    Integers,
    Pairs,
    check_places,
    check_tensors,
    check_times,
    decode_storages,
)
from opgrip.traces.codec.record_forms import from_json
from opgrip.traces.formats.parquet_files import MAGIC, MARK, ParquetFile, footer_of, open_parquet
from opgrip.traces.formats.parquet_table import ALONE, NUMBERS, RECORDS, STORAGES, ParquetTable
from opgrip.traces.io.foreign_files import ForeignFile, Format, Head, Losses, formats
from opgrip.traces.io.reader import TraceReader
from opgrip.traces.schema.arguments import FormatError
from opgrip.traces.schema.json_values import convert, integer, integers
from opgrip.traces.schema.records import NO_STORAGE, Header, Record
from opgrip.traces.table.step_starts import find_step_starts

MOST_TEXT = 64 << 20  # maximum number of characters of the records between two blocks of calls


def recognizes(head: Head) -> bool:
    """Return True for a Parquet file whose metadata mark it as a trace."""
    return head.start.startswith(MAGIC) and MARK in footer_of(head.path)


def write_records(records: Iterable[Record], file: IO[bytes], losses: Losses) -> None:
    """Write the records of a trace to a Parquet file; they are iterated up to three times if the trace has steps."""
    columns = records.columns if isinstance(records, TraceReader) else records.__iter__
    table = ParquetTable(file, None if isinstance(records, Iterator) else find_step_starts(columns))
    for record in columns():
        table.add(record)
    table.close()


def read(file: ForeignFile) -> Iterator[Record | CallBlock]:
    """Yield the records of a trace from a Parquet file, in order."""
    kinds = {**dict.fromkeys(NUMBERS, "int64"), RECORDS: "string"}
    with open_parquet(file, kinds, (STORAGES,), batch_texts=MOST_TEXT, is_streamed=True) as content:
        records = _records(file, content)
        first = next(records, None)
        if not isinstance(first, Header):
            raise file.damage("it does not begin with the header of a trace")
        yield first
        for record in records:
            if isinstance(record, Header):
                raise file.damage("it has a second header")
            yield record


def _records(file: ForeignFile, content: ParquetFile) -> Iterator[Record | CallBlock]:
    _check_storages(file, content)
    for written in (content.schema.metadata or {}).get(ALONE, b"").splitlines():
        yield from _known(file, file.parse(written))
    block: _Block | None = None
    for batch in content.batches():
        places = np.flatnonzero(batch.column(RECORDS).is_valid().to_numpy(zero_copy_only=False)).tolist()
        for first, stop in _parts(places, batch.num_rows):
            rows = batch.slice(first, stop - first)
            try:
                text = rows.column(RECORDS)[0].as_py()
            except ValueError as error:
                # not valid UTF-8
                raise file.damage(one_line(error)) from error
            if text is not None:
                if block is not None:
                    raise block.too_short()
                before, block = _open_block(file, text)
                yield from before
            if block is None:
                raise file.damage("its first calls have no record of the type calls")
            block.add(rows)
            if block.rows == block.count:
                try:
                    yield block.block()
                except FormatError as error:
                    raise file.damage(str(error)) from error
                yield from block.after()
                block = None
    if block is not None:
        raise block.too_short()


def _check_storages(file: ForeignFile, content: ParquetFile) -> None:
    """Raise `UserError` if the column `storages` has an unexpected type; files of earlier versions lack the column."""
    if STORAGES in content.schema.names:
        kind = str(content.schema.field(STORAGES).type)
        if kind.partition("<")[0] != "list" or not kind.endswith(": int64>"):
            raise file.damage(f"its column {STORAGES} is {kind[:40]}, not lists of int64")


def _parts(places: list[int], count: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of rows into which `places` divide `count` rows; the first range begins at row 0."""
    bounds = [*([] if places[:1] == [0] else [0]), *places, count]
    yield from ((first, stop) for first, stop in pairwise(bounds) if stop > first)


def _known(file: ForeignFile, form: Any) -> Iterator[Record]:
    """Yield the record that a JSON value describes, or nothing if this version does not know its type."""
    if not isinstance(form, dict):
        raise file.damage(f"a line is not a record of a trace: {str(form)[:60]}")
    try:
        record = from_json(form)
    except (FormatError, RecursionError) as error:
        raise file.damage(str(error)) from error
    if record is not None:
        yield record


@dataclass(slots=True)
class _Block:
    """A block of calls whose rows are being read, possibly from several batches.

    rest : members of the block that are not columns
    count : number of calls in the block
    lines : unparsed records after the block
    rows, pieces : number of rows added so far, and these rows
    """

    file: ForeignFile
    rest: Mapping[str, Any]
    count: int
    lines: list[str]
    rows: int = 0
    pieces: list[Any] = field(default_factory=list)

    def add(self, rows: Any) -> None:
        self.rows += rows.num_rows
        self.pieces.append(rows)
        if self.rows > self.count:
            raise self.file.damage(f"a block has {counted(self.rows, 'call')}, not {self.count}")

    def too_short(self) -> Exception:
        """Return the error to raise if the file's rows end before the block is complete."""
        return self.file.damage(f"a block has {counted(self.rows, 'call')}, not {self.count}")

    def after(self) -> Iterator[Record]:
        for line in self.lines:
            yield from _known(self.file, self.file.parse(line))

    def block(self) -> CallBlock:
        """Return the complete block; raise `FormatError` if its columns are inconsistent."""
        if any(piece.column("start_ns").null_count for piece in self.pieces):
            raise self.file.damage("a call has no start_ns")
        rest = self.rest
        start_ns, duration_ns = self._column("start_ns"), self._column("duration_ns")
        check_times(start_ns, duration_ns)
        tensors, storages = self._storages()
        streams = self._column("stream")
        return CallBlock(
            integer(rest.get("thread")),
            self._column("signature"),
            self._column("scope"),
            start_ns,
            duration_ns,
            tensors,
            storages,
            integer(rest.get("newest", NO_STORAGE)),
            self._column("device_ns", null=-1) if rest.get("device_ns") is True else NONE,
            self._pairs("page_faults"),
            streams if streams.any() else NONE,
            self._pairs("perturbed"),
            self._pairs("slow_memory"),
        )

    def _pairs(self, name: str) -> list[tuple[int, int]]:
        pairs: list[tuple[int, int]] = convert(self.rest.get(name, []), Pairs, name)
        check_places(pairs, self.count)
        return pairs

    def _column(self, name: str, null: int | None = None) -> Integers:
        pieces = [piece.column(name) for piece in self.pieces]
        if null is not None:
            pieces = [piece.fill_null(null) for piece in pieces]
        if any(piece.null_count for piece in pieces):
            raise self.file.damage(f"a call has no {name}")
        return np.concatenate([piece.to_numpy(zero_copy_only=False) for piece in pieces])

    def _storages(self) -> tuple[Integers, Integers]:
        """Return the number of tensors of each call, and the storage numbers of all these tensors."""
        tensors = self.rest.get("tensors")
        if isinstance(tensors, list):
            # files of an earlier version
            newest = integer(self.rest.get("newest", NO_STORAGE))
            codes = integers(self.rest.get("storages", []))
            storages = np.array(integers(decode_storages(codes, newest)), dtype=np.int64)
            counts = np.array(integers(tensors), dtype=np.int64)
            if len(counts) not in (0, self.count):
                raise FormatError(f"a block has {self.count} calls and {len(counts)} numbers of tensors")
            check_tensors(counts, storages)
            return counts, storages
        if tensors is not True:
            return NONE, NONE
        lists = [piece.column(STORAGES) for piece in self.pieces if STORAGES in piece.schema.names]
        numbers = [piece.flatten() for piece in lists]
        if not lists or any(piece.null_count for piece in (*lists, *numbers)):
            raise FormatError(f"the column {STORAGES} is missing or has no value for a call")
        counts = np.concatenate([piece.value_lengths().to_numpy(zero_copy_only=False) for piece in lists])
        return counts.astype(np.int64), np.concatenate([piece.to_numpy(zero_copy_only=False) for piece in numbers])


def _open_block(file: ForeignFile, text: str) -> tuple[Iterator[Record], _Block]:
    """Return the records before a block and the block itself, from the JSON Lines in the row of its first call."""
    lines = text.split("\n")
    for place, line in enumerate(lines):
        # blocks without Parquet rows, and other records, lack this name
        form = file.parse(line) if '"rows"' in line else None
        if isinstance(form, dict) and form.get("type") == "calls" and "rows" in form:
            count = form["rows"]
            if type(count) is not int or count < 1:
                raise file.damage(f"the number of calls in a block is not a positive integer: {str(count)[:40]}")
            before = (record for earlier in lines[:place] for record in _known(file, file.parse(earlier)))
            return before, _Block(file, form, count, lines[place + 1 :])
    for line in lines:
        file.parse(line)
    raise file.damage("a call that begins a block has no record of the type calls")


formats.register("parquet")(
    Format(
        "a trace of opgrip as Parquet, with one row per call, for pandas, DuckDB and Polars",
        recognizes,
        read,
        write_records=write_records,
        suffixes=(".parquet",),
    )
)
