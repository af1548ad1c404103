"""Results as one JSON document."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import IO, Any

from opgrip.replay.measuring.results import Result, whole_cells
from opgrip.replay.reports.report import report


@report(".json", can_grow=True)
def write_json(results: Sequence[Result], header: Mapping[str, Any], file: IO[str]) -> None:
    """An object of the header's fields and `results`, a list of one object a row."""
    rows = [whole_cells(result) for result in results]
    json.dump({**header, "results": rows}, file, indent=1, allow_nan=False, ensure_ascii=False)
    file.write("\n")
