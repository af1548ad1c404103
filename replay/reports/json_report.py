"""Results as one JSON document."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import pandas as pd

from opgrip.replay.measuring.results import Result
from opgrip.replay.reports.cells import whole_cells
from opgrip.replay.reports.report import report


def read_json(path: Path) -> pd.DataFrame:
    """The rows of such a file, its header in `attrs`."""
    header = json.loads(path.read_text(encoding="utf-8"))
    rows = pd.DataFrame(header.pop("results"))
    rows.attrs = header
    return rows


@report(".json", read=read_json)
def write_json(results: Sequence[Result], header: Mapping[str, Any], file: IO[str]) -> None:
    """An object of the header's fields and `results`, a list of one object a row."""
    rows = whole_cells(results)
    json.dump({**header, "results": rows}, file, indent=1, allow_nan=False, ensure_ascii=False)
    file.write("\n")
