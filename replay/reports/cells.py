"""Conversion of rows to tables, and reading and checking of result files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from math import isnan
from pathlib import Path
from typing import Any

import pandas as pd

from opgrip.cli.output_files import open_input
from opgrip.errors import UserError
from opgrip.replay.analyses import in_order
from opgrip.replay.cases.call_sites import from_text
from opgrip.replay.reports import report_for, reports
from opgrip.replay.results.columns import Column, Columns, columns_in
from opgrip.replay.results.judgement import CandidateColumns
from opgrip.replay.results.origins import MachineColumns, OriginColumns
from opgrip.replay.results.paired_ratio import PairedColumns
from opgrip.replay.results.ratios import ClusterColumns, GraphColumns
from opgrip.replay.results.results import OK, STATUSES, VARIANT_COLUMNS, Result
from opgrip.replay.run.energy import EnergyColumns
from opgrip.replay.run.kernels import KernelColumns
from opgrip.replay.sequences.accuracy.rows import AccuracyColumns
from opgrip.replay.sequences.step_options import RankColumns, SequenceColumns
from opgrip.traces.schema.json_values import LIMIT, check_finite, check_nesting

LARGEST = 1e150  # maximum magnitude of a number in a result file; its square is still finite
# types of header fields on which other code relies
OF_HEADER: dict[str, type] = {
    **dict.fromkeys(("trace", "torch", "device", "time", "command", "trace_hash"), str),
    **dict.fromkeys(
        ("environment", "accelerator", "ceilings", "sequence", "accuracy", "traces", "distilled", "settings"), dict
    ),
    "unusual": list,
}


def parse_json(text: str | bytes) -> Any:
    content = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    try:
        document = json.loads(content)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    check_nesting(content, document)
    return document


def header_of(facts: Mapping[Any, Any], path: Path) -> dict[str, Any]:
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
        raise _refusal(path, f"`accelerator.devices` must be an object of objects: {quoted(accelerator['devices'])}")
    try:
        check_finite(header)
    except ValueError as error:
        raise _refusal(path, str(error)) from error
    return header


def checked_cell(about: Column, value: Any) -> Any:
    """Return a value in the form in which rows store it; raise `ValueError` if its column cannot hold it."""
    kind = about.kind
    if value is None:
        if not about.may_lack and (kind is not str or about.name in ("op", "mode", "status")):
            raise ValueError(f"a row has no {about.name}")
        return None if about.may_lack else ""
    if kind is str:
        if not isinstance(value, str):
            raise ValueError(f"{quoted(value)} is not a string")
        if about.name == "status" and value not in STATUSES:
            raise ValueError(f"{quoted(value)} is not one of {', '.join(STATUSES)}")
        if about.name == "call_sites":
            from_text(value)
        return _as_unicode(value)
    if kind is bool and not isinstance(value, bool):
        raise ValueError(f"{quoted(value)} is neither true nor false")
    if kind not in (int, float, list):
        return value
    numbers = value if about.several else [value]
    if not isinstance(numbers, list) or not {*map(type, numbers)} <= {int, float}:
        raise ValueError(f"{quoted(value)} is not a {'list of numbers' if about.several else 'number'}")
    if about.whole:
        if not -LIMIT <= value < LIMIT or value != int(value):
            raise ValueError(f"{quoted(value)} is not a 64-bit integer")
        return int(value)
    for number in numbers:
        if not -LARGEST < number < LARGEST and (not about.unbounded or isnan(number)):
            raise ValueError(f"{quoted(number)} is too large, or not a number")
    return value


def quoted(value: Any) -> str:
    return repr(value if isinstance(value, str | int | float) else type(value).__name__)[:60]


def cells_in(about: Column, cells: pd.Series[Any], path: Path) -> list[Any]:
    plain = cells.astype(object)
    values: list[Any] = plain.where(plain.notna(), None).tolist()
    try:
        return [checked_cell(about, value) for value in values]
    except (ValueError, OverflowError, RecursionError) as error:
        raise _refusal(path, f"{about.name}: {error}") from error


def other_columns(path: Path) -> UserError:
    return UserError(f"{path} has columns that this version of opreplay does not write", "choose another file")


def _refusal(path: Path, reason: str) -> UserError:
    return UserError(
        f"{path} does not contain results of opreplay ({reason})", "write some with opreplay -o results.json"
    )


# columns that exist only if an option or feature requests them, by its name
ON_REQUEST: tuple[tuple[str, type[Columns]], ...] = (
    ("a GPU that records its kernels", KernelColumns),
    ("energy", EnergyColumns),
    ("comparison of modes", PairedColumns),
    ("candidate", CandidateColumns),
    ("split", ClusterColumns),
    ("launches of graphs", GraphColumns),
    ("sequence", SequenceColumns),
    ("accuracy", AccuracyColumns),
    ("sequence of several ranks", RankColumns),
    ("several traces", OriginColumns),
    ("shard", MachineColumns),
)


def added_columns() -> list[Column]:
    declared: list[type | None] = [
        *(analysis.columns for analysis in in_order()),
        *(columns for _, columns in ON_REQUEST),
    ]
    return [about for group in declared if group is not None for about in columns_in(group)]


def all_columns() -> list[Column]:
    """Return the columns of every row, then those of analyses and options."""
    columns = [*columns_in(Result), *added_columns()]
    name, count = Counter(about.name for about in columns).most_common(1)[0]
    if count > 1:
        raise UserError(
            f"two parts of opreplay add a column {name!r}", "uninstall the package that provides one of them"
        )
    return columns


def whole_cells(rows: Iterable[Result]) -> list[dict[str, Any]]:
    names = [about.name for about in all_columns()]
    return [{name: cells.get(name) for name in names} for cells in (row.to_plain() for row in rows)]


def to_frame(rows: Iterable[Result]) -> pd.DataFrame:
    cells = [{name: _as_unicode(cell) for name, cell in row.items()} for row in whole_cells(rows)]
    return pd.DataFrame(cells, columns=[about.name for about in all_columns()])


def by_call_site(rows: Sequence[Result]) -> pd.DataFrame:
    names = [about.name for about in all_columns() if not about.hidden]
    after = names.index("phase") + 1
    cells = []
    for row, whole in zip(rows, whole_cells(rows), strict=True):
        sites = row.sites
        calls = sum(site.count for site in sites)
        for site in sites:
            own = {name: getattr(site, name) for name in ("module", "phase", "line", "count")} | {
                "share": None if row.share is None else row.share * site.count / calls,
                "captured_total_us": site.captured_us if row.captured_total_us else None,
                "total_us": row.median_us * site.count if row.median_us is not None and row.status == OK else None,
            }
            cells.append({name: _as_unicode(cell) for name, cell in (whole | own).items()})
    return pd.DataFrame(cells, columns=[*names[:after], "line", *names[after:], "total_us"]).astype({"total_us": float})


def _as_unicode(cell: Any) -> Any:
    # JSON may contain lone surrogates, which no other file format accepts
    if not isinstance(cell, str) or cell.isascii():
        return cell
    return cell.encode(errors="backslashreplace").decode()


def read_frame(path: Path) -> pd.DataFrame:
    if path.suffix not in reports.names():
        raise UserError(f"{path} is not a file of results", "write one with opreplay TRACE -o results.json")
    read = report_for(path).read
    if read is None:
        raise UserError(
            f"{path} has a format that opgrip writes but cannot read", "read results from .json, .parquet or .csv"
        )
    try:
        open_input(path).close()
        rows = read(path)
        check_columns(rows.columns, path)
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{path} cannot be read", (error.strerror or str(error)).lower()) from error
    except (ValueError, KeyError, TypeError, AttributeError, MemoryError) as error:
        raise UserError(
            f"{path} does not contain results of opreplay", "write some with opreplay -o results.json"
        ) from error
    return rows


def rows_in(frame: pd.DataFrame, path: Path) -> list[Result]:
    by_name = {about.name: about for about in all_columns()}
    cells = {str(name): cells_in(by_name[str(name)], frame[name], path) for name in frame.columns}
    try:
        return [Result.from_plain(dict(zip(cells, row, strict=True))) for row in zip(*cells.values(), strict=True)]
    except TypeError as error:
        raise other_columns(path) from error


def check_columns(names: Iterable[Hashable], path: Path) -> None:
    count = Counter(list(names))
    if max(count.values(), default=1) > 1 or not count.keys() <= {about.name for about in all_columns()}:
        raise other_columns(path)


# columns whose values come from the options and the trace, and not from measurement
OF_CASE = ("case", "op", "count", *(name for name in VARIANT_COLUMNS if name not in ("cache", "method", "device")))
SAME_IN_HEADER = ("trace", "trace_hash", "torch", "device", "seed")
OPTIONS = "options_hash"  # header field with a hash of the options, including the number of timed runs


def read_completed(
    path: Path, expected: Sequence[Result], devices: Collection[str], caches: Collection[str], header: Mapping[str, Any]
) -> list[Result]:
    """Return the rows of an existing result file of the same replay; empty if its format cannot be read.

    expected : rows of the replay before they are measured
    """
    if report_for(path).read is None:
        return []
    frame = read_frame(path)
    rows, stored = rows_in(frame, path), frame.attrs
    is_same = sorted(map(_key, rows)) == sorted(map(_key, expected))
    is_same &= {row.device for row in rows} <= {*devices}
    is_same &= {row.cache for row in rows} <= {*caches, None}
    if path.suffix == ".json":
        is_same &= all(stored.get(name) == header[name] for name in SAME_IN_HEADER)
        # files of earlier versions lack the hash
        is_same &= stored.get(OPTIONS) in (None, header[OPTIONS])
    if not is_same:
        raise UserError(f"{path} contains other results", "choose another name, or replace it with --force")
    return rows


def repeated_rows(rows: Iterable[Result], expected: Iterable[Result], caches: Collection[str]) -> list[Result]:
    keys = {_key(row) for row in expected}
    return [row for row in rows if _key(row) in keys and row.cache in (None, *caches)]


def _key(row: Result) -> tuple[str, ...]:
    return tuple(str(getattr(row, name)) for name in OF_CASE)
