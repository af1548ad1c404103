"""Parquet files of strangers: what they are, without reading them, and their rows, some at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from opgrip.cli.plugins import needed
from opgrip.errors import one_line
from opgrip.traces.formats.parquet_pages import chunks_of, page_bytes
from opgrip.traces.io.foreign_files import MOST_BYTES, ForeignFile
from opgrip.traces.schema.limits import DECOMPRESSED, Allowance

MAGIC = b"PAR1"
MARK = b"opgrip.trace"
"""Key of the note of a file that is a trace of ours."""
EXTRA = "results"
FOOTER_BYTES = 64 << 20
ROWS = 256
"""Rows that are in memory at a time."""
BLOCK_ROWS = 1 << 14
"""The same, where they stay columns."""
MOST_ROWS = Allowance("rows", 10_000_000, 1)
"""Of a file; rows that repeat cost it nothing."""


def footer_of(path: Path) -> bytes:
    """The end of a Parquet file, which has the names of its columns and its notes; empty where there is none."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            file.seek(max(size - 8, 0))
            end = file.read(8)
            length = int.from_bytes(end[:4], "little")
            if end[4:] != MAGIC or length > min(size - 8, FOOTER_BYTES):
                return b""
            file.seek(size - 8 - length)
            return file.read(length)
    except OSError:
        return b""


def open_parquet(file: ForeignFile, kinds: Mapping[str, str], texts: Sequence[str] = (), streamed: bool = False) -> Any:
    """A file whose columns were checked, as pyarrow's `ParquetFile`.

    Parameters
    ----------
    kinds : of the columns that it must have, `string`, `int64` or `double`
    texts : columns whose texts are read as numbers of a dictionary, so that one text in many rows stays one
    streamed : whether what was read is given away, so that only what a compressed file may hold bounds its size

    Raises
    ------
    UserError : where it is none, lacks a column or has one of another kind, or goes beyond a bound
    """
    parquet = needed("pyarrow.parquet", EXTRA)
    arrow, broken = needed("pyarrow", EXTRA), parquet_errors()
    file_bytes = file.path.stat().st_size
    most = DECOMPRESSED.of(file_bytes) if streamed else min(MOST_BYTES, DECOMPRESSED.of(file_bytes))
    try:
        # what is read ahead would stay in memory until the file ends
        content = parquet.ParquetFile(file.path, read_dictionary=list(texts), pre_buffer=False)
        fields = {field.name: field.type for field in content.schema_arrow}
        metadata = content.metadata
        with file.path.open("rb") as raw:
            size = 0 if file.unbounded else page_bytes(raw, chunks_of(raw), most)
    except broken as error:
        raise file.damage(one_line(error)) from error
    if len(fields) < len(content.schema_arrow):
        raise file.damage("two of its columns have one name")
    for name, kind in kinds.items():
        field = fields.get(name)
        if field is not None and arrow.types.is_dictionary(field):
            field = field.value_type
        if str(field) not in (kind, f"large_{kind}"):
            raise file.damage(f"its column {name} is {'missing' if field is None else str(field)[:40]}, not {kind}")
    if size > most:
        raise file.refusal(f"it holds more than {most >> 20:,} MB")
    if not file.unbounded and metadata.num_rows > MOST_ROWS.of(file_bytes):
        raise file.refusal(f"it has more than {MOST_ROWS.of(file_bytes):,} rows")
    return content


def rows_of(file: ForeignFile, content: Any, columns: Sequence[str], most_text: int) -> Iterator[dict[str, Any]]:
    """The rows of an open file, as plain values by column.

    Parameters
    ----------
    most_text : bytes of the texts in `ROWS` rows of a column

    Raises
    ------
    UserError : where a part of it cannot be read, or its texts are longer
    """
    for batch in batches_of(file, content, columns, most_text, ROWS):
        try:
            lists = {name: batch.column(name).to_pylist() for name in batch.schema.names}
        except parquet_errors() as error:
            raise file.damage(one_line(error)) from error
        for place in range(batch.num_rows):
            yield {name: values[place] for name, values in lists.items()}


def batches_of(
    file: ForeignFile, content: Any, columns: Sequence[str], most_text: int, rows: int = BLOCK_ROWS
) -> Iterator[Any]:
    """The same as batches of Arrow, of at most so many rows.

    A text that stands in the file once counts in each row that has it: whoever reads it takes it in each time.
    """
    arrow, compute, broken = needed("pyarrow", EXTRA), needed("pyarrow.compute", EXTRA), parquet_errors()
    batches = content.iter_batches(rows, columns=list(columns))
    most, total = DECOMPRESSED.of(file.path.stat().st_size), 0
    while True:
        try:
            batch = next(batches, None)
            if batch is None:
                return
            for column in batch.columns if not file.unbounded else ():
                size = _text_bytes(arrow, compute, column)
                total += size
                if size > most_text:
                    raise file.refusal(f"the texts of {rows} rows have more than {most_text:,} bytes")
            if total > most:
                raise file.refusal(f"the texts of its rows have more than {most:,} bytes")
        except broken as error:
            raise file.damage(one_line(error)) from error
        yield batch


def parquet_errors() -> tuple[type[Exception], ...]:
    """What pyarrow raises for files that are not what they should be, exceptions of its C++ among them.

    A text that is no UTF-8 is a `ValueError`; of C++ come, by what Cython makes of them, all but the first two.
    """
    plain = (ValueError, LookupError, TypeError, ArithmeticError, MemoryError, RuntimeError)
    return (needed("pyarrow", EXTRA).ArrowException, OSError, *plain)


def _text_bytes(arrow: Any, compute: Any, column: Any) -> int:
    """Bytes of the texts of a column, before they are made; 0 for another one."""
    is_coded = arrow.types.is_dictionary(column.type)
    values = column.dictionary if is_coded else column
    if not (arrow.types.is_string(values.type) or arrow.types.is_large_string(values.type)):
        return 0
    lengths = compute.cast(compute.binary_length(values), arrow.int64())
    return compute.sum(lengths.take(column.indices) if is_coded else lengths).as_py() or 0
