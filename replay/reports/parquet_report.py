"""Results as a Parquet file, for DuckDB, Polars and pandas: a column each, lists as lists."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import pandas as pd

from opgrip.replay.measuring.results import Result
from opgrip.replay.reports.cells import all_columns, to_frame
from opgrip.replay.reports.report import report
from opgrip.traces.extras import needed

HEADER = b"opgrip"
"""Key of the file's metadata under which the header is, as JSON."""


def read_parquet(path: Path) -> pd.DataFrame:
    """The rows of such a file, its header in `attrs`."""
    arrow, parquet = needed("pyarrow", "results"), needed("pyarrow.parquet", "results")
    try:
        table = parquet.read_table(path)
    except arrow.ArrowInvalid as error:
        raise ValueError(str(error)) from error
    rows: pd.DataFrame = table.to_pandas()
    for about in all_columns():
        if about.several and about.name in rows:
            rows[about.name] = rows[about.name].map(lambda cell: cell.tolist(), na_action="ignore").astype(object)
    rows.attrs = json.loads((table.schema.metadata or {}).get(HEADER, b"{}"))
    return rows


@report(".parquet", read=read_parquet, binary=True, package=("pyarrow", "results"))
def write_parquet(results: Sequence[Result], header: Mapping[str, Any], file: IO[bytes]) -> None:
    """A row a result, the header in the file's metadata."""
    arrow, parquet = needed("pyarrow", "results"), needed("pyarrow.parquet", "results")
    table = arrow.Table.from_pandas(to_frame(results), preserve_index=False)
    metadata = {**(table.schema.metadata or {}), HEADER: json.dumps(header).encode()}
    parquet.write_table(table.replace_schema_metadata(metadata), file, compression="zstd")
