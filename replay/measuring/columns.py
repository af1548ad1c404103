"""Columns of results, each declared once: as a field of the class of what fills it.

::

    @columns.register("energy")
    @dataclass(frozen=True, slots=True)
    class EnergyColumns(Columns):
        energy_mj: float | None = column("of a GPU for one run", unit="mJ")

A row holds those of what ran, its status and its times; a part that adds to it has a class of columns of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, TypeVar

from opgrip.traces.registry import Registry

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
    name, whole : of the field, and whether it holds whole numbers
    """

    meaning: str
    unit: str = ""
    heading: str = ""
    name: str = ""
    whole: bool = False


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


columns: Registry[type[Columns]] = Registry("opgrip.replay.analyses", "opgrip.analyses")
"""The classes of columns that parts add, by the parts' names."""


def column(meaning: str, unit: str = "", heading: str = "", default: Any = None) -> Any:
    """A field that is a column; see `Column`."""
    return field(default=default, metadata={COLUMN: Column(meaning, unit, heading)})


def columns_in(declared: type) -> Iterator[Column]:
    """The columns that a class declares."""
    for item in fields(declared):
        about = item.metadata.get(COLUMN)
        if about is not None:
            whole = item.type in ("int", "int | None")
            yield Column(about.meaning, about.unit, about.heading, item.name, whole)


def added_columns() -> list[Column]:
    """The columns of all parts."""
    return [about for declared in columns.values() for about in columns_in(declared)]
