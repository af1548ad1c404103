"""The journal of a replay: a file next to the output that keeps the rows of finished cases, so that a replay can
resume.

Values that are read from it are checked, because the file may be untrusted and calculations rely on the declared types.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from math import isfinite, isnan
from pathlib import Path
from typing import Any

from opgrip.cli.journal import Codec, Journal
from opgrip.replay.cases.call_sites import from_text
from opgrip.replay.results.columns import Column, columns_in
from opgrip.replay.results.origins import MachineColumns, OriginColumns
from opgrip.replay.results.paired_ratio import PairedColumns
from opgrip.replay.results.ratios import ClusterColumns
from opgrip.replay.results.results import STATUSES, Result
from opgrip.replay.run.energy import EnergyColumns
from opgrip.replay.run.kernels import KernelColumns
from opgrip.replay.run.request import TORCH, RunRequest, identity
from opgrip.traces.schema.json_values import LIMIT

LARGEST = 1e150  # maximum magnitude of a number; its square is still finite


def measured_row(cells: Mapping[str, Any]) -> Result:
    """Return a result row from its values (`cells`) by column name, before any analysis adds columns to it.

    Raises `ValueError` if a value is invalid for its column, or if a column is unknown or missing.
    """
    columns = _measured_columns()
    unknown = cells.keys() - columns.keys()
    if unknown:
        raise ValueError(f"rows of results have no column {quoted(min(unknown))}")
    try:
        return Result.from_plain({name: checked_cell(columns[name], cell) for name, cell in cells.items()})
    except TypeError as error:
        raise ValueError(str(error)) from error


@cache
def _measured_columns() -> dict[str, Column]:
    declared = (Result, PairedColumns, EnergyColumns, KernelColumns, ClusterColumns, MachineColumns, OriginColumns)
    return {about.name: about for group in declared for about in columns_in(group)}


def checked_cell(about: Column, value: Any) -> Any:
    """Return a value in the form in which rows store it; raise `ValueError` if it is not valid for the column.

    about : declaration of the column
    """
    if value is None:
        if about.may_lack:
            return None
        if about.kind is str and about.name not in ("op", "mode", "status"):
            return ""
        raise ValueError(f"a row has no {about.name}")
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
        raise ValueError(f"{quoted(value)} is not a string")
    if about.name == "status" and value not in STATUSES:
        raise ValueError(f"{quoted(value)} is not one of {', '.join(STATUSES)}")
    if about.name == "call_sites":
        from_text(value)
    # JSON may contain lone surrogates, which no other file format accepts
    return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()


def _number(about: Column, value: Any) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{quoted(value)} is not a number")
    if about.unbounded and not isnan(value):
        return value
    if about.whole:
        if not -LIMIT <= value < LIMIT or value != int(value):
            raise ValueError(f"{quoted(value)} is not a 64-bit integer")
        return int(value)
    _check_range((value,))
    return value


def _numbers(value: Any) -> list[int | float]:
    if not isinstance(value, list) or not {*map(type, value)} <= {int, float}:
        raise ValueError(f"{quoted(value)} is not a list of numbers")
    _check_range(value)
    return value


def _check_range(values: Iterable[int | float]) -> None:
    for value in values:
        if not -LARGEST < value < LARGEST or not isfinite(value):
            raise ValueError(f"{quoted(value)} is too large, or not a number")


def quoted(value: Any) -> str:
    """Return a value as text of at most 60 characters for error messages."""
    return repr(value if isinstance(value, str | int | float) else type(value).__name__)[:60]


MACHINE_KIND = "machine_kind"  # key of the kind of machine in an identity; times of different kinds are not mixed


def journal_path(output: Path) -> Path:
    return output.with_name(f"{output.name}.journal")


def open_journal(
    output: Path, request: RunRequest, machine_kind: str, resume: bool, force: bool
) -> Journal[list[Result]]:
    """Open the journal for an output file; its cases are reused only if the request and the kind of machine are the
    same.

    resume : True to use the rows in an existing journal
    force : True to replace an existing journal
    """

    def describe(stored: Any, current: Mapping[str, Any]) -> str:
        return unlike(stored, current) or "of another trace or with other options"

    return Journal(
        journal_path(output),
        {**identity(request), MACHINE_KIND: machine_kind},
        Codec(_encoded, _decoded),
        resume,
        force,
        blamed=output,
        describe=describe,
    )


def _encoded(rows: list[Result]) -> list[dict[str, Any]]:
    return [row.to_plain() for row in rows]


def _decoded(record: Any) -> list[Result]:
    rows = [measured_row(cells) for cells in record]
    if not rows:
        raise ValueError("a case of the interrupted replay has no rows")
    return rows


def unlike(stored: Any, current: Mapping[str, Any]) -> str | None:
    """Return a text if stored rows differ from the current replay only in the torch version, or only in the kind of
    machine; None if they differ in anything else.

    stored, current : facts that identify the replay of the stored rows, and the current replay
    """
    for key, difference in ((TORCH, "of another version of torch"), (MACHINE_KIND, "of another kind of machine")):
        if isinstance(stored, dict) and {**stored, key: None} == {**current, key: None}:
            return difference
    return None
