"""Declarations of result columns: each column is a field of the class that fills it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from opgrip.display.tables import TableColumn

T = TypeVar("T", bound="Columns")
COLUMN = "column"


def short(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.1f}"


# printed text of a number, by unit
FORMS: dict[str, Callable[[Any], str]] = {
    **dict.fromkeys(("us", "ms"), short),
    **dict.fromkeys(("GFLOP/s", "GB/s"), lambda rate: short(rate) if rate >= 1 else f"{rate:.2f}"),
    "1": "{:.0%}".format,
    "bytes": lambda size: f"{size / 1e6:,.2f}",
}


@dataclass(frozen=True, slots=True)
class Column:
    meaning: str
    unit: str = ""  # such as `us`, `mJ` or `bytes`; `1` for a share from 0 to 1
    heading: str = ""  # in the printed table, which has the column if a row has a value; empty to never print it
    name: str = ""
    whole: bool = False  # contains integers
    several: bool = False  # contains lists
    unbounded: bool = False  # may contain infinite numbers
    hidden: bool = False  # tables for people omit it
    kind: type = object
    may_lack: bool = True
    default: object = None
    rank: int = 7  # see `TableColumn`
    form: str = ""  # of a printed number, such as `{:,d}`; empty for that of its unit

    def cell(self, row: Any) -> Any:
        return getattr(row, self.name) if hasattr(row, self.name) else row.added.get(self.name)

    def text(self, row: Any) -> str | None:
        """Return the text of a row's cell in tables for people; None for an empty cell."""
        cell = self.cell(row)
        if cell is None or isinstance(cell, str):
            return cell or None
        return self.form.format(cell) if self.form else FORMS.get(self.unit, "{:g}".format)(cell)

    def in_table(self, always: bool = False) -> TableColumn:
        has_value = None if always else lambda row: self.cell(row) not in (None, self.default)
        return TableColumn(self.heading, self.text, ">", self.rank, when=has_value)


@dataclass(frozen=True, slots=True)
class Columns:
    """Base class for declarations of the columns that an analysis adds to a row."""

    @classmethod
    def of(cls: type[T], row: Any) -> T:
        return cls(**{item.name: row.added[item.name] for item in fields(cls) if item.name in row.added})


def column(meaning: str, unit: str = "", heading: str = "", default: Any = None, **about: Any) -> Any:
    """Return a dataclass field that declares a column; `Column` explains the parameters."""
    declared = Column(meaning, unit, heading, **about)
    # lists cannot be hashed
    return field(default=default, hash=False if declared.several else None, metadata={COLUMN: declared})


@cache
def columns_in(declared: type) -> tuple[Column, ...]:
    types = get_type_hints(declared)
    columns = []
    for item in fields(declared):
        about = item.metadata.get(COLUMN)
        if about is not None:
            declared_type = types[item.name]
            members = get_args(declared_type) if get_origin(declared_type) is UnionType else (declared_type,)
            kinds = [get_origin(member) or member for member in members if member is not NoneType]
            kind = kinds[0] if len(kinds) == 1 else object
            facts = {"name": item.name, "whole": kind is int, "kind": kind, "may_lack": NoneType in members}
            hidden = about.hidden or about.several
            columns.append(replace(about, **facts, hidden=hidden, default=item.default))
    return tuple(columns)
