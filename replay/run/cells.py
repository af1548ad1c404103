"""What the cells of a row may hold: those of a file may be a stranger's, and what reckons takes them as declared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from math import isfinite, isnan
from typing import Any

from opgrip.replay.cases.call_sites import from_text
from opgrip.replay.results.columns import Column, columns_in
from opgrip.replay.results.origins import MachineColumns, OriginColumns
from opgrip.replay.results.repeats import ClusterColumns
from opgrip.replay.results.results import STATUSES, Result
from opgrip.replay.run.energy import EnergyColumns
from opgrip.traces.schema.json_values import LIMIT

LARGEST = 1e150
"""Of a number: the square of one is still a number."""


def measured_row(cells: Mapping[str, Any]) -> Result:
    """The row of cells that measuring gives, before any analysis adds to it.

    Raises
    ------
    ValueError : for a cell that its column does not hold, and for one that no such row has or that it lacks
    """
    columns = _measured_columns()
    unknown = cells.keys() - columns.keys()
    if unknown:
        raise ValueError(f"no row has {quoted(min(unknown))}")
    try:
        return Result.from_plain({name: checked_cell(columns[name], cell) for name, cell in cells.items()})
    except TypeError as error:
        raise ValueError(str(error)) from error


@cache
def _measured_columns() -> dict[str, Column]:
    declared = (Result, EnergyColumns, ClusterColumns, MachineColumns, OriginColumns)
    return {about.name: about for group in declared for about in columns_in(group)}


def checked_cell(about: Column, value: Any) -> Any:
    """A cell as rows have it; `ValueError` where it is not what the column is declared to hold."""
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
            raise ValueError(f"{quoted(value)} is neither true nor false")
        return value
    return _number(about, value) if about.kind in (int, float) else value


def _text(about: Column, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{quoted(value)} is no text")
    if about.name == "status" and value not in STATUSES:
        raise ValueError(f"{quoted(value)} is none of {', '.join(STATUSES)}")
    if about.name == "call_sites":
        from_text(value)
    # halves of characters, which JSON may have, no other file takes
    return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()


def _number(about: Column, value: Any) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{quoted(value)} is no number")
    if about.unbounded and not isnan(value):
        return value
    if about.whole:
        if not -LIMIT <= value < LIMIT or value != int(value):
            raise ValueError(f"{quoted(value)} is no whole number of 64 bits")
        return int(value)
    _check_range((value,))
    return value


def _numbers(value: Any) -> list[int | float]:
    if not isinstance(value, list) or not {*map(type, value)} <= {int, float}:
        raise ValueError(f"{quoted(value)} is no list of numbers")
    _check_range(value)
    return value


def _check_range(values: Iterable[int | float]) -> None:
    for value in values:
        if not -LARGEST < value < LARGEST or not isfinite(value):
            raise ValueError(f"{quoted(value)} is too large, or no number")


def quoted(value: Any) -> str:
    """A value in short, as a message shows it."""
    return repr(value if isinstance(value, str | int | float) else type(value).__name__)[:60]
