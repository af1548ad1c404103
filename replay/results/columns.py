"""Declarations of result columns: each column is a field of the class that fills it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T", bound="Columns")
COLUMN = "column"


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


@dataclass(frozen=True, slots=True)
class Columns:
    """Base class for declarations of the columns that an analysis adds to a row."""

    @classmethod
    def of(cls: type[T], row: Any) -> T:
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
    """Return a dataclass field that declares a column; `Column` explains the parameters."""
    # lists cannot be hashed
    return field(
        default=default,
        hash=False if several else None,
        metadata={
            COLUMN: Column(meaning, unit, heading, several=several, unbounded=unbounded, hidden=hidden or several)
        },
    )


@cache
def columns_in(declared: type) -> tuple[Column, ...]:
    types = get_type_hints(declared)
    columns = []
    for item in fields(declared):
        about = item.metadata.get(COLUMN)
        if about is not None:
            kind, may_lack = _kind(types[item.name])
            columns.append(replace(about, name=item.name, whole=kind is int, kind=kind, may_lack=may_lack))
    return tuple(columns)


def _kind(declared: Any) -> tuple[type, bool]:
    members = get_args(declared) if get_origin(declared) is UnionType else (declared,)
    kinds = [get_origin(item) or item for item in members if item is not NoneType]
    return kinds[0] if len(kinds) == 1 else object, NoneType in members
