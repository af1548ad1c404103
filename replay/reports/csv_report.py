"""Results as comma-separated values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import pandas as pd

from opgrip.cli.command import printable
from opgrip.cli.output_files import quoted, unquoted
from opgrip.replay.reports.cells import all_columns, parse_json, to_frame
from opgrip.replay.reports.report import report
from opgrip.replay.results.results import Result


def read_csv(path: Path) -> pd.DataFrame:
    """The rows of such a file."""
    columns = all_columns()
    # `None` is what many a call takes, and a key may look like a number
    texts = {about.name: str for about in columns if about.kind in (str, list)}
    rows = pd.read_csv(path, dtype=texts, keep_default_na=False, na_values=[""])
    for about in columns:
        if about.name in rows and about.name in texts:
            read = parse_json if about.several else unquoted
            rows[about.name] = rows[about.name].map(read, na_action="ignore").astype(object)
    return rows


@report(".csv", read=read_csv)
def write_csv(results: Sequence[Result], header: Mapping[str, Any], file: IO[str]) -> None:
    """One line a row under a line of names; the header is left out."""
    frame = to_frame(results)
    for name, column in frame.items():
        if not pd.api.types.is_numeric_dtype(column):
            frame[name] = [quoted(printable(cell)) if isinstance(cell, str) else cell for cell in column]
    frame.to_csv(file, index=False)
