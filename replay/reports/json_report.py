"""Results as one JSON document."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import pandas as pd

from opgrip.replay.measuring.results import Result
from opgrip.replay.reports.cells import check_columns, whole_cells
from opgrip.replay.reports.reading import parse_json
from opgrip.replay.reports.report import report


def read_json(path: Path) -> pd.DataFrame:
    """The rows of such a file, its header in `attrs`."""
    header = parse_json(path.read_bytes())
    plain = header.pop("results")
    # before a table has a column for each of a million names
    check_columns(dict.fromkeys(name for row in plain for name in row.keys()), path)  # noqa: SIM118 - a row is no list
    rows = pd.DataFrame(plain)
    rows.attrs = header
    return rows


@report(".json", read=read_json)
def write_json(results: Sequence[Result], header: Mapping[str, Any], file: IO[str]) -> None:
    """An object of the header's fields and `results`, a list of one object a row."""
    rows = whole_cells(results)
    json.dump({**header, "results": rows}, file, indent=1, allow_nan=False, ensure_ascii=False)
    file.write("\n")
