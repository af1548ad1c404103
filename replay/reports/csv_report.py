"""Results as comma-separated values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import IO, Any

import pandas as pd

from opgrip.replay.measuring.results import Result
from opgrip.replay.reports.cells import to_frame
from opgrip.replay.reports.report import report
from opgrip.traces.command import printable


@report(".csv", read=pd.read_csv)
def write_csv(results: Sequence[Result], header: Mapping[str, Any], file: IO[str]) -> None:
    """One line a row under a line of names; the header is left out."""
    frame = to_frame(results)
    for name, column in frame.items():
        if not pd.api.types.is_numeric_dtype(column):
            frame[name] = [printable(cell) if isinstance(cell, str) else cell for cell in column]
    frame.to_csv(file, index=False)
