"""Results as a Parquet file, for DuckDB, Polars and pandas: a column each, lists as lists."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import pandas as pd

from opgrip.cli.plugins import needed
from opgrip.errors import FormatError, UserError
from opgrip.replay.reports.cells import LARGEST_BYTES, all_columns, check_columns, parse_json, to_frame
from opgrip.replay.reports.report import report
from opgrip.replay.results.results import Result
from opgrip.traces.formats.parquet_files import ParquetFile, ParquetLimits, TooLargeError

HEADER = b"opgrip"
"""Key of the file's metadata under which the header is, as JSON."""
MOST_CELLS = 100_000_000
"""Of a file, single times among them: half a million rows in all columns."""


def read_parquet(path: Path) -> pd.DataFrame:
    """Return the rows of such a file, with its header in `attrs`."""
    arrow = needed("pyarrow", "results")
    columns = {about.name: about for about in all_columns()}
    limits = ParquetLimits(rows=MOST_CELLS, total_bytes=LARGEST_BYTES, texts=1 << 62, batch_texts=1 << 62)
    try:
        with ParquetFile(path, limits=limits) as content:
            names = content.schema.names
            check_columns(names, path)
            batches, cells = [], 0
            for batch in content.batches():
                cells += batch.num_rows * len(names)
                if cells > MOST_CELLS:
                    raise TooLargeError(f"it has more than {MOST_CELLS:,} cells")
                batches.append(batch)
            table = arrow.Table.from_batches(batches, content.schema).unify_dictionaries()
    except TooLargeError as error:
        raise UserError(f"{path} is too large ({error})", "replay in parts, by --start and --stop") from error
    except FormatError as error:
        raise UserError(
            f"{path} does not hold results of opreplay ({error})", "write some with opreplay -o results.json"
        ) from error
    rows: pd.DataFrame = table.to_pandas(ignore_metadata=True)
    for name in names:
        if columns[name].several:
            rows[name] = rows[name].map(lambda cell: cell.tolist(), na_action="ignore").astype(object)
    header = parse_json((table.schema.metadata or {}).get(HEADER, b"{}"))
    if not isinstance(header, dict):
        raise ValueError("its header is no object")
    rows.attrs = header
    return rows


@report(".parquet", read=read_parquet, binary=True, package=("pyarrow", "results"))
def write_parquet(results: Sequence[Result], header: Mapping[str, Any], file: IO[bytes]) -> None:
    """A row a result, the header in the file's metadata."""
    arrow, parquet = needed("pyarrow", "results"), needed("pyarrow.parquet", "results")
    table = arrow.Table.from_pandas(to_frame(results), preserve_index=False)
    metadata = {**(table.schema.metadata or {}), HEADER: json.dumps(header).encode()}
    parquet.write_table(table.replace_schema_metadata(metadata), file, compression="zstd")
