"""Reader of untrusted Parquet files, in a child process with limited memory, one batch of rows at a time.

The child streams rows as Arrow IPC. The received rows are checked against limits, so that wrong sizes in the footer
and pages that decompress to gigabytes do no harm.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opgrip.cli.command import own_python
from opgrip.cli.plugins import needed
from opgrip.errors import FormatError, one_line
from opgrip.traces.formats.parquet_child import TOO_MUCH_MEMORY
from opgrip.traces.io.foreign_files import MOST_BYTES, ForeignFile
from opgrip.traces.schema.json_values import DECOMPRESSED, Allowance

MAGIC = b"PAR1"
MARK = b"opgrip.trace"  # metadata key that marks a Parquet file as a trace of opgrip
FOOTER_BYTES = 64 << 20
BLOCK_ROWS = 1 << 14
MOST_ROWS = Allowance("rows", 10_000_000, 1)  # maximum number of rows, because repeated rows take no bytes in the file


def footer_of(path: Path) -> bytes:
    """Return the footer of a Parquet file, which has column names and metadata; empty for any other file."""
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


class TooLargeError(FormatError):
    """Raised if a Parquet file exceeds its limits."""


@dataclass(frozen=True, slots=True)
class ParquetLimits:
    """Limits up to which a Parquet file is read.

    rows, total_bytes : limits of the whole file
    texts : limit of the bytes of texts in the whole file; a text in several rows counts in each of them
    batch_texts : limit of the bytes of texts in one batch of rows
    """

    rows: int
    total_bytes: int
    texts: int
    batch_texts: int


class ParquetFile:
    """Parquet file that a child process reads; a context manager.

    columns : names of columns to read if the file has them; None for all columns
    rows : number of rows per batch
    limits : limits of the file; None for a trusted file, whose reader may use all memory

    schema : Arrow schema of the columns that are read; text columns are dictionary-encoded

    Raise `FormatError` if the file is damaged.
    """

    closed = False  # attribute that Arrow requires of a file-like object

    def __init__(
        self,
        path: Path,
        columns: Sequence[str] | None = None,
        rows: int = BLOCK_ROWS,
        limits: ParquetLimits | None = None,
    ) -> None:
        ipc = needed("pyarrow.ipc")
        self._rows, self._limits, self._bytes = rows, limits, 0
        request = {"path": str(path.absolute()), "columns": columns, "rows": rows, "is_limited": limits is not None}
        self._process = subprocess.Popen(
            own_python("opgrip.traces.formats.parquet_child", json.dumps(request)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Arrow's own allocators reserve more than they use
            env={**os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system", "OPENBLAS_NUM_THREADS": "1"},
        )
        try:
            self._stream = ipc.open_stream(self)
        except _stream_errors() as error:
            raise self._damage(error) from error
        except BaseException:
            self.close()
            raise
        self.schema = self._stream.schema

    def read(self, size: int = -1) -> bytes:
        """Return up to `size` bytes of the child's output, and count them; Arrow calls this."""
        assert self._process.stdout is not None
        data = self._process.stdout.read(size)
        self._bytes += len(data)
        return data

    def __enter__(self) -> ParquetFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()

    def batches(self) -> Iterator[Any]:
        """Yield the rows as Arrow record batches.

        Raise `TooLargeError` if the file exceeds its limits.
        Raise `FormatError` if a part of the file cannot be read.
        """
        total_rows = total_text = 0
        while True:
            try:
                batch = next(self._stream, None)
            except _stream_errors() as error:
                raise self._damage(error) from error
            if batch is None:
                if self._process.wait() != 0:
                    raise self._damage(None)
                return
            if self._limits is not None:
                text = sum(map(_text_bytes, batch.columns))
                total_rows, total_text = total_rows + batch.num_rows, total_text + text
                self._check(total_rows, total_text, text)
            yield batch

    def _check(self, total_rows: int, total_text: int, text: int) -> None:
        limits = self._limits
        assert limits is not None
        if text > limits.batch_texts:
            raise TooLargeError(f"the texts of {self._rows} rows have more than {limits.batch_texts:,} bytes")
        if total_text > limits.texts:
            raise TooLargeError(f"the texts of its rows have more than {limits.texts:,} bytes")
        if self._bytes > limits.total_bytes:
            raise TooLargeError(f"the file contains more than {limits.total_bytes >> 20:,} MB")
        if total_rows > limits.rows:
            raise TooLargeError(f"the file has more than {limits.rows:,} rows")

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield the rows as dictionaries of plain Python values; see `batches`."""
        for batch in self.batches():
            try:
                rows = batch.to_pylist()
            except _stream_errors() as error:
                # a text that is not UTF-8
                raise FormatError(one_line(error)) from error
            yield from rows

    def _damage(self, error: BaseException | None) -> FormatError:
        """Return the error to raise for a stream that ends early, with the reason that the child process reports."""
        _, message = self._process.communicate()
        lines = message.decode(errors="replace").splitlines()
        status = self._process.returncode
        if status == TOO_MUCH_MEMORY:
            return TooLargeError("reading the file takes more memory than is allowed for a file of this size")
        if status < 0:
            return FormatError(f"the process that reads the file ended with signal {-status}")
        return FormatError(
            lines[-1][:300] if lines else "the process that reads the file ended" if error is None else one_line(error)
        )


@contextmanager
def open_parquet(
    file: ForeignFile,
    kinds: Mapping[str, str],
    optional: Sequence[str] = (),
    rows: int = BLOCK_ROWS,
    batch_texts: int = 1 << 62,
    is_streamed: bool = False,
) -> Iterator[ParquetFile]:
    """Open an untrusted Parquet file; problems found here or while reading it raise `UserError`.

    kinds : required columns, with types `string`, `int64` or `double`
    optional : optional columns of any type
    rows : number of rows per batch
    batch_texts : limit of the bytes of texts in one batch
    is_streamed : True if the caller does not keep the rows; only the limits of compressed files apply then
    """
    size = file.path.stat().st_size
    most = DECOMPRESSED.of(size)
    limits = ParquetLimits(MOST_ROWS.of(size), most if is_streamed else min(MOST_BYTES, most), most, batch_texts)
    try:
        with ParquetFile(file.path, [*kinds, *optional], rows, None if file.unbounded else limits) as content:
            _check_columns(content.schema, kinds)
            yield content
    except TooLargeError as error:
        raise file.refusal(str(error)) from error
    except FormatError as error:
        raise file.damage(str(error)) from error


def _check_columns(schema: Any, kinds: Mapping[str, str]) -> None:
    types = {field.name: field.type for field in schema}
    for name, kind in kinds.items():
        column = types.get(name)
        # texts arrive as dictionaries
        plain = "missing" if column is None else str(getattr(column, "value_type", column))
        if plain not in (kind, f"large_{kind}"):
            raise FormatError(f"the column {name} has the type {plain[:40]}, not {kind}")


def _stream_errors() -> tuple[type[Exception], ...]:
    """Return the classes of errors that pyarrow raises for a damaged stream; `ValueError` is for invalid UTF-8."""
    return (needed("pyarrow").ArrowException, OSError, ValueError, LookupError, TypeError, RuntimeError)


def _text_bytes(column: Any) -> int:
    """Return the number of bytes of all texts in an Arrow column, without creating them; 0 for other columns."""
    arrow, compute = needed("pyarrow"), needed("pyarrow.compute")
    is_coded = arrow.types.is_dictionary(column.type)
    values = column.dictionary if is_coded else column
    if not (arrow.types.is_string(values.type) or arrow.types.is_large_string(values.type)):
        return 0
    lengths = compute.cast(compute.binary_length(values), arrow.int64())
    return compute.sum(lengths.take(column.indices) if is_coded else lengths).as_py() or 0
