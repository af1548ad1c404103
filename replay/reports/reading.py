"""What a file of results may hold: it may be a stranger's, and what reckons with its cells takes them as declared."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from opgrip.errors import UserError
from opgrip.replay.results.columns import Column
from opgrip.replay.run.cells import checked_cell, quoted
from opgrip.traces.codec.json_values import check_finite
from opgrip.traces.schema.limits import check_nesting

LARGEST_BYTES = 1 << 30
"""Of a file: half a million rows with their single times."""
OF_HEADER: dict[str, type] = {
    **dict.fromkeys(("trace", "torch", "device", "time", "command", "trace_hash"), str),
    **dict.fromkeys(("environment", "accelerator", "ceilings", "sequence", "traces", "distilled", "settings"), dict),
    "unusual": list,
}
"""What parts of a header are, which all else reads as such."""


def check_size(path: Path) -> None:
    """Raise `UserError` for a file that would fill the memory."""
    if path.stat().st_size > LARGEST_BYTES:
        raise UserError(f"{path} is larger than {LARGEST_BYTES >> 20:,} MB", "replay in parts, by --start and --stop")


def parse_json(text: str | bytes) -> Any:
    """What a document of JSON holds; `ValueError` for one that nests too deep or has numbers that are none."""
    content = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    try:
        document = json.loads(content)
    except RecursionError as error:
        raise ValueError("it nests too deep") from error
    check_nesting(content, document)
    return document


def header_of(facts: Mapping[Any, Any], path: Path) -> dict[str, Any]:
    """What a file says of where its rows come from.

    Raises
    ------
    UserError : where it says something that cannot be
    """
    header = {str(name): value for name, value in facts.items()}
    for name, kind in OF_HEADER.items():
        if header.get(name) is None:
            header.pop(name, None)
        elif not isinstance(header[name], kind):
            raise _refusal(path, f"its {name} is {quoted(header[name])}")
    accelerator = header.get("accelerator", {})
    if not isinstance(accelerator.get("devices", {}), dict) or not all(
        isinstance(facts, dict) for facts in accelerator.get("devices", {}).values()
    ):
        raise _refusal(path, f"its devices are {quoted(accelerator['devices'])}")
    try:
        check_finite(header)
    except ValueError as error:
        raise _refusal(path, str(error)) from error
    return header


def cells_in(about: Column, cells: pd.Series[Any], path: Path) -> list[Any]:
    """The cells of a column as rows have them.

    Raises
    ------
    UserError : where one is not what the column is declared to hold
    """
    plain = cells.astype(object)
    values: list[Any] = plain.where(plain.notna(), None).tolist()
    try:
        return [checked_cell(about, value) for value in values]
    except (ValueError, OverflowError, RecursionError) as error:
        raise _refusal(path, f"{about.name}: {error}") from error


def other_columns(path: Path) -> UserError:
    """What to tell of a file whose columns are not those of results."""
    return UserError(f"{path} has other columns than this opreplay writes", "choose another file")


def _refusal(path: Path, reason: str) -> UserError:
    return UserError(f"{path} does not hold results of opreplay ({reason})", "write some with opreplay -o results.json")
