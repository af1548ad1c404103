"""Columns of results, each declared once: as a field of the class of what fills it.

::

    @dataclass(frozen=True, slots=True)
    class EnergyColumns(Columns):
        energy_mj: float | None = column("of a GPU for one run", unit="mJ")

A row holds those of what ran, its status and its times; an analysis that adds to it names its own class of columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from types import NoneType, UnionType
from typing import Any, Protocol, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T", bound="Columns")
COLUMN = "column"


@dataclass(frozen=True, slots=True)
class Column:
    """What a column holds.

    Attributes
    ----------
    meaning : in a line
    unit : `us`, `ms`, `mJ`, `MHz`, `bytes`; `1` for a share, 0 to 1; empty for what has none
    heading : in the table that is printed, where it stands there as soon as a row has something in it
    name : of the field
    whole, several : whether it holds whole numbers; lists
    unbounded : whether its numbers may be inf
    hidden : whether tables for people leave it out
    kind : the type of its cells: bool, int, float, str, list
    may_lack : whether a row may have nothing in it
    """

    meaning: str
    unit: str = ""
    heading: str = ""
    name: str = ""
    whole: bool = False
    several: bool = False
    unbounded: bool = False
    hidden: bool = False
    kind: type = object
    may_lack: bool = True


class _HasAdded(Protocol):
    @property
    def added(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Columns:
    """What a part adds to a row; a class of its own for each part, whose fields are all None where it has not run."""

    @classmethod
    def of(cls: type[T], row: _HasAdded) -> T:
        """What this part added to a row."""
        return cls(**{item.name: row.added[item.name] for item in fields(cls) if item.name in row.added})


def column(
    meaning: str,
    unit: str = "",
    heading: str = "",
    default: Any = None,
    several: bool = False,
    unbounded: bool = False,
    hidden: bool = False,
) -> Any:
    """A field that is a column; see `Column`."""
    # a list has no hash
    return field(
        default=default,
        hash=False if several else None,
        metadata={
            COLUMN: Column(meaning, unit, heading, several=several, unbounded=unbounded, hidden=hidden or several)
        },
    )


def columns_in(declared: type) -> Iterator[Column]:
    """The columns that a class declares."""
    types = get_type_hints(declared)
    for item in fields(declared):
        about = item.metadata.get(COLUMN)
        if about is not None:
            kind, may_lack = _kind(types[item.name])
            yield replace(about, name=item.name, whole=kind is int, kind=kind, may_lack=may_lack)


def _kind(declared: Any) -> tuple[type, bool]:
    """The type of a field's values other than None, and whether it may be None."""
    members = get_args(declared) if get_origin(declared) is UnionType else (declared,)
    kinds = [get_origin(item) or item for item in members if item is not NoneType]
    return kinds[0] if len(kinds) == 1 else object, NoneType in members
