"""Tests of untrusted Parquet files, which a child process with limited memory reads."""

from __future__ import annotations

from pathlib import Path

import pyarrow
import pytest
from changed_bytes import with_required_column
from google.protobuf.internal import encoder
from pyarrow import parquet

from opgrip.errors import FormatError, UserError
from opgrip.traces import TraceReader
from opgrip.traces.io.parquet_file import TooLargeError, read_parquet_table


def read_rows(path: Path, most_rows: int = 1 << 20, most_bytes: int = 8 << 20) -> list[str]:
    rows: list[str] = read_parquet_table(path, most_rows, most_bytes, ["record"])["record"].to_pylist()
    return rows


def test_rows_of_the_requested_columns_are_read(tmp_path: Path) -> None:
    table = pyarrow.table({"record": ["a", None, "a"], "other": [1, 2, 3]})
    parquet.write_table(table, tmp_path / "t.parquet")
    assert read_rows(tmp_path / "t.parquet") == ["a", None, "a"]
    read = read_parquet_table(tmp_path / "t.parquet", 1, 1, is_limited=False)
    assert read.schema.names == ["record", "other"]
    with pytest.raises(TooLargeError, match="more than 2 rows"):
        read_rows(tmp_path / "t.parquet", most_rows=2)


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1" + bytes(40) + b"PAR1"])
def test_damaged_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t.parquet").write_bytes(content)
    with pytest.raises(FormatError):
        read_rows(tmp_path / "t.parquet")


def test_index_outside_its_dictionary_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    parquet.write_table(pyarrow.table({"record": [*"abcabcab"]}), path, compression="none")
    content = path.read_bytes()
    packed = bytes([3, 0b00100100, 0b01001001])  # a run of eight indices of two bits
    assert content.count(packed) == 1
    path.write_bytes(content.replace(packed, b"\x03\xff\xff"))
    with pytest.raises(FormatError, match="out of bounds"):
        read_rows(path)


def test_file_with_pages_larger_than_its_footer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "pages.parquet"
    table = pyarrow.table({"record": pyarrow.array([f"{number}" + "0" * (1 << 20) for number in range(40)])})
    parquet.write_table(table, path, compression="zstd", use_dictionary=False)
    column = parquet.ParquetFile(path).metadata.row_group(0).column(0)
    content = path.read_bytes()
    for size in {parquet.ParquetFile(path).metadata.row_group(0).total_byte_size, column.total_uncompressed_size}:
        number = encoder._VarintBytes(size << 1)
        assert number in content
        # same length, padded with bytes that add nothing to the number
        content = content.replace(number, b"\x80" * (len(number) - 1) + b"\x00")
    path.write_bytes(content)
    assert parquet.ParquetFile(path).metadata.row_group(0).total_byte_size == 0
    with pytest.raises(TooLargeError, match="more than 8 MB"):
        read_rows(path)


def test_column_with_inconsistent_statistics_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "levels.parquet"
    parquet.write_table(pyarrow.table({"record": ["{}", None]}), path)
    # pyarrow's view of the column's metadata crashes the process without an exception
    path.write_bytes(with_required_column(path.read_bytes(), "record"))
    with pytest.raises(FormatError, match="histogram size mismatch"):
        read_rows(path)


@pytest.mark.slow
def test_page_beyond_the_memory_limit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bomb.parquet"
    bomb = pyarrow.table({"record": pyarrow.array(["0" * (400 << 20)])})
    parquet.write_table(bomb, path, compression="zstd", use_dictionary=False, write_statistics=False)
    assert path.stat().st_size < 1 << 18
    with pytest.raises(TooLargeError, match="takes more memory than is allowed for a file of this size"):
        read_rows(path)


def test_other_parquet_files_are_refused_with_advice(tmp_path: Path) -> None:
    parquet.write_table(pyarrow.table({"record": ["a"]}), tmp_path / "t.parquet")
    with pytest.raises(UserError, match=r"not a trace, but a Parquet file without the columns op_name and args"):
        list(TraceReader(tmp_path / "t.parquet"))
