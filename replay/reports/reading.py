"""What a file of results may hold: it may be a stranger's, and what reckons with its cells takes them as declared."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from math import isfinite
from pathlib import Path
from typing import Any

import pandas as pd

from opgrip.replay.measuring.columns import Column
from opgrip.replay.measuring.results import STATUSES
from opgrip.traces.errors import UserError
from opgrip.traces.json_values import LIMIT, check_finite
from opgrip.traces.limits import check_nesting

LARGEST_BYTES = 1 << 30
"""Of a file: half a million rows with their single times."""
LARGEST = 1e150
"""Of a number: the square of one is still a number."""
OF_HEADER: dict[str, type] = {
    **dict.fromkeys(("trace", "torch", "device", "time", "command", "trace_hash"), str),
    **dict.fromkeys(("environment", "accelerator", "ceilings", "sequence", "traces", "distilled"), dict),
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
            raise _refusal(path, f"its {name} is {_quoted(header[name])}")
    accelerator = header.get("accelerator", {})
    if not isinstance(accelerator.get("devices", {}), dict) or not all(
        isinstance(facts, dict) for facts in accelerator.get("devices", {}).values()
    ):
        raise _refusal(path, f"its devices are {_quoted(accelerator['devices'])}")
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
        return [_cell(about, value) for value in values]
    except (ValueError, OverflowError, RecursionError) as error:
        raise _refusal(path, f"{about.name}: {error}") from error


def other_columns(path: Path) -> UserError:
    """What to tell of a file whose columns are not those of results."""
    return UserError(f"{path} has other columns than this opreplay writes", "choose another file")


def _cell(about: Column, value: Any) -> Any:
    if value is None:
        if about.may_lack:
            return None
        if about.kind is str and about.name not in ("op", "mode", "status"):
            return ""
        raise ValueError("a row has none")
    if about.kind is str:
        return _text(about, value)
    if about.several:
        return _numbers(value)
    if about.kind is bool:
        if not isinstance(value, bool):
            raise ValueError(f"{_quoted(value)} is neither true nor false")
        return value
    return _number(value, about.whole) if about.kind in (int, float) else value


def _text(about: Column, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{_quoted(value)} is no text")
    if about.name == "status" and value not in STATUSES:
        raise ValueError(f"{_quoted(value)} is none of {', '.join(STATUSES)}")
    # halves of characters, which JSON may have, no other file takes
    return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()


def _number(value: Any, is_whole: bool) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{_quoted(value)} is no number")
    if is_whole:
        if not -LIMIT <= value < LIMIT or value != int(value):
            raise ValueError(f"{_quoted(value)} is no whole number of 64 bits")
        return int(value)
    _check_range((value,))
    return value


def _numbers(value: Any) -> list[int | float]:
    if not isinstance(value, list) or not {*map(type, value)} <= {int, float}:
        raise ValueError(f"{_quoted(value)} is no list of numbers")
    _check_range(value)
    return value


def _check_range(values: Iterable[int | float]) -> None:
    for value in values:
        if not -LARGEST < value < LARGEST or not isfinite(value):
            raise ValueError(f"{_quoted(value)} is too large, or no number")


def _quoted(value: Any) -> str:
    return repr(value if isinstance(value, str | int | float) else type(value).__name__)[:60]


def _refusal(path: Path, reason: str) -> UserError:
    return UserError(f"{path} does not hold results of opreplay ({reason})", "write some with opreplay -o results.json")
