"""Results as comma-separated values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import pandas as pd

from opgrip.replay.measuring.results import Result
from opgrip.replay.reports.cells import all_columns, to_frame
from opgrip.replay.reports.report import report


def read_csv(path: Path) -> pd.DataFrame:
    """The rows of such a file."""
    rows = pd.read_csv(path)
    for about in all_columns():
        if about.several and about.name in rows:
            rows[about.name] = rows[about.name].map(json.loads, na_action="ignore").astype(object)
    return rows


@report(".csv", read=read_csv)
def write_csv(results: Sequence[Result], header: Mapping[str, Any], file: IO[str]) -> None:
    """One line a row under a line of names; the header is left out."""
    to_frame(results).to_csv(file, index=False)
