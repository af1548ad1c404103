"""Results as one JSON document."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from typing import IO, Any

import pandas as pd

from opgrip.replay.reports.cells import check_columns, parse_json, whole_cells
from opgrip.replay.reports.report import report
from opgrip.replay.results.columns import columns_in
from opgrip.replay.results.results import Result

_INFINITE = "1e999"
"""How a file says inf: JSON has no word for it, and readers of numbers take one that is too large for it."""
_UNBOUNDED = "|".join(about.name for about in columns_in(Result) if about.unbounded)
_AS_NUMBER = re.compile(rf'^( +"(?:{_UNBOUNDED})": )"{_INFINITE}"(,?)$', re.MULTILINE)


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
    rows = [{name: _INFINITE if cell == inf else cell for name, cell in row.items()} for row in whole_cells(results)]
    text = json.dumps({**header, "results": rows}, indent=1, allow_nan=False, ensure_ascii=False)
    file.write(_AS_NUMBER.sub(rf"\g<1>{_INFINITE}\g<2>", text) + "\n")
