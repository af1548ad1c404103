"""Iterators that expand an entry of a configuration, and the indexed values that they produce."""

from __future__ import annotations

import reprlib
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

from opgrip.cli.plugins import Registry

MOST = 1 << 200
"""Limit of combinations: the product of a million ranges takes minutes to compute."""


class ValueChoices(Protocol):
    """Values with indices from 0 on.

    Attributes
    ----------
    count : number of values, which may exceed the largest list index
    """

    @property
    def count(self) -> int:
        """Return the number of values."""

    def at(self, index: int) -> Any:
        """Return the value with an index from 0 to `count - 1`."""


@dataclass(frozen=True, slots=True)
class Listed:
    """Values of a list."""

    values: Sequence[Any]

    @property
    def count(self) -> int:
        """Return the length of the list."""
        return len(self.values)

    def at(self, index: int) -> Any:
        """Return an item of the list."""
        return self.values[index]


@dataclass(frozen=True, slots=True)
class IntegerRange:
    """Integers from `first` to `last`, which is included if the steps reach it.

    Raises
    ------
    ValueError : for a step of 0
    """

    first: int
    last: int
    step: int = 1

    def __post_init__(self) -> None:
        if not self.step:
            raise ValueError("the step of a range is 0")

    @property
    def count(self) -> int:
        """Return the number of integers."""
        return max(0, (self.last - self.first) // self.step + 1)

    def at(self, index: int) -> int:
        """Return the integer after `index` steps."""
        return self.first + index * self.step


class Combinations:
    """All combinations of one value of each part, as lists; the last part varies fastest.

    Raises
    ------
    ValueError : for more than `MOST`
    """

    def __init__(self, parts: Sequence[ValueChoices]) -> None:
        self._parts = parts
        self.count = 1
        for part in parts:
            self.count *= part.count
            if self.count > MOST:
                raise ValueError("too many combinations")

    def at(self, index: int) -> list[Any]:
        """Return a combination: the digits of the index, with the parts' counts as bases."""
        values = []
        for part in reversed(self._parts):
            index, digit = divmod(index, part.count)
            values.append(part.at(digit))
        return values[::-1]


class Table:
    """All combinations of one value of each part, as dictionaries."""

    def __init__(self, parts: Mapping[str, ValueChoices]) -> None:
        self._names = list(parts)
        self._product = Combinations(list(parts.values()))
        self.count = self._product.count

    def at(self, index: int) -> dict[str, Any]:
        """Return a combination; see `Combinations`."""
        return dict(zip(self._names, self._product.at(index), strict=True))


class Chain:
    """The values of several parts, one part after the other."""

    def __init__(self, parts: Sequence[ValueChoices]) -> None:
        self._parts = parts
        self._ends = list(accumulate(part.count for part in parts))
        self.count = self._ends[-1] if parts else 0

    def at(self, index: int) -> Any:
        """Return the value with that index."""
        place = bisect_right(self._ends, index)
        return self._parts[place].at(index - (self._ends[place - 1] if place else 0))


Expand = Callable[[dict[str, Any]], ValueChoices]
"""Function that returns all values of an entry of a `build` or `input` section, as entries without macros.

Such an entry has `args`, a list of arguments, and `kwargs`, arguments by name. Each argument is an object with its
`type`. Raises `ValueError` if the entry cannot be expanded.
"""

ITERATOR = "DefaultConfigIterator"
"""iterator of entries that do not name one"""
iterators: Registry[Expand] = Registry("opgrip.traces.formats.configurations", "opgrip.iterators")
"""Iterators by their names in files."""


@iterators.register(ITERATOR)
def keep_entry(entry: dict[str, Any]) -> ValueChoices:
    """Return the entry as it is."""
    return Listed([entry])


RANGE, LIST, COPY = "__range__", "__list__", "__copy__"
WHOLE = ("int", "long")
NESTED = ("genericlist", "tuple")


@iterators.register("RangeConfigIterator")
def expand(entry: dict[str, Any]) -> ValueChoices:
    """Return all combinations of the arguments' values; the last positional argument varies fastest."""
    args, kwargs = entry.get("args") or [], entry.get("kwargs") or {}
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        raise ValueError("args must be a list and kwargs an object")
    positional = Combinations([_choices(arg) for arg in args])
    named = Table({name: _choices(arg) for name, arg in kwargs.items()})
    return _Linked(Table({"args": positional, "kwargs": named}))


class _Linked:
    """Combinations with the sizes that arguments copy from others."""

    def __init__(self, entries: ValueChoices) -> None:
        self._entries = entries
        self.count = entries.count

    def at(self, index: int) -> dict[str, Any]:
        """Return an entry without macros; raise `ValueError` if a copy names a value that does not exist."""
        entry = self._entries.at(index)
        args = list(entry["args"])
        for place in range(len(args)):
            _copy_into(args, place)
        kwargs = {name: _copy_into([*args, arg], len(args)) for name, arg in entry["kwargs"].items()}
        return {
            "args": [_without_macros(arg) for arg in args],
            "kwargs": {name: _without_macros(arg) for name, arg in kwargs.items()},
        }


def _choices(arg: Any) -> ValueChoices:
    """Return all values of one argument."""
    if not isinstance(arg, dict):
        raise ValueError("an argument is not an object")
    ranged, listed = _names(arg, RANGE), _names(arg, LIST)
    if not ranged and not listed:
        return Listed([arg])
    parts: dict[str, ValueChoices] = {}
    for name, value in arg.items():
        if name in listed:
            parts[name] = Listed(_list(value, name))
        elif name in ranged:
            parts[name] = _ranged(arg.get("type"), name, value)
        else:
            parts[name] = Listed([value])
    return Table(parts)


def _ranged(kind: Any, name: str, value: Any) -> ValueChoices:
    if name == "shape":
        return Combinations([_span(size) if isinstance(size, list) else Listed([size]) for size in _list(value, name)])
    if kind in WHOLE and name == "value":
        return _span(_list(value, name))
    if kind in NESTED and name == "value":
        return Combinations([_choices(item) for item in _list(value, name)])
    if kind in ("float", "double") and name == "value":
        raise ValueError("ranges of floats are not supported: list the values with __list__")
    return Listed(_list(value, name))


def _span(bounds: list[Any]) -> IntegerRange:
    if len(bounds) not in (2, 3) or any(type(bound) is not int for bound in bounds):
        raise ValueError(f"{reprlib.repr(bounds)} is not a range of integers")
    return IntegerRange(*bounds)


def _names(arg: dict[str, Any], macro: str) -> list[str]:
    names = arg.get(macro, [])
    if not isinstance(names, list) or any(type(name) is not str for name in names):
        raise ValueError(f"{macro} is not a list of names")
    missing = [name for name in names if name not in arg]
    if missing:
        raise ValueError(f"{macro} names {reprlib.repr(missing[0])}, which the argument does not have")
    return names


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"the range of {reprlib.repr(name)} is not a list")
    return value


def _copy_into(args: list[dict[str, Any]], place: int) -> dict[str, Any]:
    """Replace an argument by one with the copied sizes; lists shared by combinations stay unchanged."""
    if args[place].get("type") != "tensor":
        return args[place]
    try:
        for name, (target, (source, element)) in (link for item in args[place].get(COPY, []) for link in item.items()):
            if any(type(number) is not int or number < 0 for number in (target, source, element)):
                raise ValueError("__copy__ must name elements by numbers from 0")
            values = list(args[place][name])
            values[target] = args[source][name][element]
            args[place] = {**args[place], name: values}
    except (TypeError, KeyError, IndexError, AttributeError) as error:
        raise ValueError("__copy__ names a value that does not exist") from error
    return args[place]


def _without_macros(arg: dict[str, Any]) -> dict[str, Any]:
    plain = {name: value for name, value in arg.items() if name not in (RANGE, LIST, COPY)}
    if plain.get("type") in NESTED and isinstance(plain.get("value"), list):
        plain["value"] = [_without_macros(item) if isinstance(item, dict) else item for item in plain["value"]]
    return plain
