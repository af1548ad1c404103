"""Rows as cells of all columns: those of every row, and those that parts may have added."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from opgrip.errors import UserError
from opgrip.replay.analyses import in_order
from opgrip.replay.reports.reading import cells_in, check_size, other_columns
from opgrip.replay.reports.report import report_for
from opgrip.replay.results.behaviours import BehaviourColumns
from opgrip.replay.results.columns import Column, Columns, columns_in
from opgrip.replay.results.machines import MachineColumns
from opgrip.replay.results.origins import OriginColumns
from opgrip.replay.results.results import OK, Result
from opgrip.replay.run.energy import EnergyColumns
from opgrip.replay.sequences.columns import SequenceColumns
from opgrip.replay.sequences.ranks.columns import RankColumns

ON_REQUEST: tuple[tuple[str, type[Columns]], ...] = (
    ("energy", EnergyColumns),
    ("split", BehaviourColumns),
    ("sequence", SequenceColumns),
    ("sequence of several ranks", RankColumns),
    ("several traces", OriginColumns),
    ("shard", MachineColumns),
)
"""What is there on request: the option that requests it, or what else does, and its columns."""


def added_columns() -> list[Column]:
    """The columns of all analyses, and of what is measured on request."""
    declared = [*(analysis.columns for analysis in in_order()), *(columns for _, columns in ON_REQUEST)]
    return [about for group in declared if group is not None for about in columns_in(group)]


def all_columns() -> list[Column]:
    """Those of every row, then those that parts add.

    Raises
    ------
    UserError : where two have the same name
    """
    columns = [*columns_in(Result), *added_columns()]
    name, count = Counter(about.name for about in columns).most_common(1)[0]
    if count > 1:
        raise UserError(f"two parts of opreplay add a column {name!r}", "uninstall the package that brings one")
    return columns


def whole_cells(rows: Iterable[Result]) -> list[dict[str, Any]]:
    """The rows' cells in all columns, None where a row has nothing."""
    names = [about.name for about in all_columns()]
    return [{name: cells.get(name) for name in names} for cells in (row.to_plain() for row in rows)]


def to_frame(rows: Iterable[Result]) -> pd.DataFrame:
    """One row a result, in all columns."""
    cells = [{name: _as_unicode(cell) for name, cell in row.items()} for row in whole_cells(rows)]
    return pd.DataFrame(cells, columns=[about.name for about in all_columns()])


def by_call_site(rows: Sequence[Result]) -> pd.DataFrame:
    """One row a result and call site; see `Results.by_call_site`."""
    places, cells = [], []
    for place, row in enumerate(rows):
        sites = row.sites
        calls = sum(site.count for site in sites)
        for site in sites:
            places.append(place)
            of_calls = {name: _as_unicode(getattr(site, name)) for name in ("module", "phase", "line", "count")}
            total_us = row.median_us * site.count if row.median_us is not None and row.status == OK else None
            share = row.share * site.count / calls
            cells.append(of_calls | {"share": share, "captured_total_us": site.captured_us, "total_us": total_us})
    names = ["module", "phase", "line", "count", "share", "captured_total_us", "total_us"]
    split = pd.DataFrame(cells, columns=names)
    columns = [about.name for about in all_columns() if not about.hidden]
    whole = to_frame(rows)[columns].iloc[places].reset_index(drop=True)
    whole = whole.assign(**{name: split[name] for name in split if name in columns})
    after = list(whole.columns).index("phase") + 1
    whole.insert(after, "line", split["line"])
    whole.insert(len(whole.columns), "total_us", split["total_us"].astype(float))
    return whole


def _as_unicode(cell: Any) -> Any:
    """A cell as columns of text can hold it: halves of characters, which a stranger's name may have, are spelled."""
    if not isinstance(cell, str) or cell.isascii():
        return cell
    return cell.encode(errors="backslashreplace").decode()


def load_results(path: str | Path) -> pd.DataFrame:
    """The rows that `opreplay -o` wrote to a file, such as `.json` or `.csv`; where they come from is in `attrs`.

    Raises
    ------
    UserError : where the file is not there or is not of a kind that can be read
    """
    path = Path(path)
    read = report_for(path).read
    if read is None:
        raise UserError(f"{path} cannot be read again", "write .json, .parquet or .csv")
    try:
        check_size(path)
        rows = read(path)
        check_columns(rows.columns, path)
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{path} cannot be read", (error.strerror or str(error)).lower()) from error
    except (ValueError, KeyError, TypeError, AttributeError, MemoryError) as error:
        raise UserError(
            f"{path} does not hold results of opreplay", "write some with opreplay -o results.json"
        ) from error
    return rows


def read_results(path: Path) -> list[Result]:
    """The rows of a file that `opreplay -o` wrote; raises as `load_results` does."""
    return rows_in(load_results(path), path)


def rows_in(frame: pd.DataFrame, path: Path) -> list[Result]:
    """The rows that a file holds; `UserError` where one lacks a cell, or has what its column does not hold."""
    by_name = {about.name: about for about in all_columns()}
    cells = {str(name): cells_in(by_name[str(name)], frame[name], path) for name in frame.columns}
    try:
        return [Result.from_plain(dict(zip(cells, row, strict=True))) for row in zip(*cells.values(), strict=True)]
    except TypeError as error:
        raise other_columns(path) from error


def check_columns(names: Iterable[Hashable], path: Path) -> None:
    """Raise `UserError` for columns that no row has."""
    count = Counter(list(names))
    if max(count.values(), default=1) > 1 or not count.keys() <= {about.name for about in all_columns()}:
        raise other_columns(path)
