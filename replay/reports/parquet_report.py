"""Results as a Parquet file, for DuckDB, Polars and pandas: a column each, lists as lists."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import pandas as pd

from opgrip.cli.plugins import needed
from opgrip.errors import UserError
from opgrip.replay.reports.cells import LARGEST_BYTES, all_columns, check_columns, parse_json, to_frame
from opgrip.replay.reports.report import report
from opgrip.replay.results.results import Result
from opgrip.traces.formats.parquet_files import parquet_errors
from opgrip.traces.formats.parquet_pages import chunks_of, page_bytes

HEADER = b"opgrip"
"""Key of the file's metadata under which the header is, as JSON."""
MOST_CELLS = 100_000_000
"""Of a file, single times among them: half a million rows in all columns."""


def read_parquet(path: Path) -> pd.DataFrame:
    """The rows of such a file, its header in `attrs`."""
    needed("pyarrow", "results")
    parquet = needed("pyarrow.parquet", "results")
    columns = {about.name: about for about in all_columns()}
    try:
        # not read_table: that takes columns from the names of folders, and metadata of pandas for what types are
        file = parquet.ParquetFile(path)
        names = file.schema_arrow.names
        check_columns(names, path)
        _check_amount(file.metadata.num_rows * file.metadata.num_columns, path)
        # a text that a million rows share is in memory once
        texts = [name for name in names if columns[name].kind is str]
        table = parquet.ParquetFile(path, metadata=file.metadata, read_dictionary=texts).read()
        rows: pd.DataFrame = table.to_pandas(ignore_metadata=True)
    except OSError:
        raise
    except parquet_errors() as error:
        raise ValueError(str(error)) from error
    for name in names:
        if columns[name].several:
            rows[name] = rows[name].map(lambda cell: cell.tolist(), na_action="ignore").astype(object)
    header = parse_json((table.schema.metadata or {}).get(HEADER, b"{}"))
    if not isinstance(header, dict):
        raise ValueError("its header is no object")
    rows.attrs = header
    return rows


def _check_amount(cells: int, path: Path) -> None:
    """Raise `UserError` for a file that would fill the memory: a few bytes of it may stand for a million rows."""
    with path.open("rb") as file:
        chunks = chunks_of(file)
        size = page_bytes(file, chunks, LARGEST_BYTES)
    if max(cells, sum(chunk.values for chunk in chunks)) > MOST_CELLS:
        raise UserError(f"{path} has more than {MOST_CELLS:,} cells", "replay in parts, by --start and --stop")
    if size > LARGEST_BYTES:
        raise UserError(f"{path} holds more than {LARGEST_BYTES >> 20:,} MB", "replay in parts, by --start and --stop")


@report(".parquet", read=read_parquet, binary=True, package=("pyarrow", "results"))
def write_parquet(results: Sequence[Result], header: Mapping[str, Any], file: IO[bytes]) -> None:
    """A row a result, the header in the file's metadata."""
    arrow, parquet = needed("pyarrow", "results"), needed("pyarrow.parquet", "results")
    table = arrow.Table.from_pandas(to_frame(results), preserve_index=False)
    metadata = {**(table.schema.metadata or {}), HEADER: json.dumps(header).encode()}
    parquet.write_table(table.replace_schema_metadata(metadata), file, compression="zstd")
