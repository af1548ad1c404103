"""The iterator of entries with macros: attributes that are ranges or lists, and sizes that other arguments give.

- `"__range__": ["value", "shape"]`: these attributes stand for several values. A whole number is `[first, last,
  step]`, the last included; so is a size of a shape that is a list. Of a list or tuple of arguments, each that has a
  range of its own takes its values; of anything else the values are listed.
- `"__list__": ["value"]`: these attributes list their values, whatever their type.
- `"__copy__": [{"shape": [0, [1, 2]]}]`: element 0 of this tensor's shape is element 2 of that of argument 1. Copies
  are made in the order of the arguments, after all ranges.
"""

from __future__ import annotations

import reprlib
from typing import Any

from opgrip.traces.formats.configurations.iterators.iterator import iterators
from opgrip.traces.formats.configurations.value_choices import Choices, Listed, Product, Span, Table

RANGE, LIST, COPY = "__range__", "__list__", "__copy__"
WHOLE = ("int", "long")
NESTED = ("genericlist", "tuple")


@iterators.register("RangeConfigIterator")
def expand(entry: dict[str, Any]) -> Choices:
    """Each combination of the values of all arguments; those of the last take turns fastest, those by name before."""
    args, kwargs = entry.get("args") or [], entry.get("kwargs") or {}
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        raise ValueError("arguments that are no list and no object")
    positional = Product([_choices(arg) for arg in args])
    named = Table({name: _choices(arg) for name, arg in kwargs.items()})
    return _Linked(Table({"args": positional, "kwargs": named}))


class _Linked:
    """The combinations, with what arguments copy from others."""

    def __init__(self, entries: Choices) -> None:
        self._entries = entries
        self.count = entries.count

    def at(self, index: int) -> dict[str, Any]:
        """One entry without macros; raises `ValueError` for a copy of what is not there."""
        entry = self._entries.at(index)
        args = list(entry["args"])
        for place in range(len(args)):
            _copy_into(args, place)
        kwargs = {name: _copy_into([*args, arg], len(args)) for name, arg in entry["kwargs"].items()}
        return {
            "args": [_without_macros(arg) for arg in args],
            "kwargs": {name: _without_macros(arg) for name, arg in kwargs.items()},
        }


def _choices(arg: Any) -> Choices:
    """All that one argument stands for."""
    if not isinstance(arg, dict):
        raise ValueError("an argument that is no object")
    ranged, listed = _names(arg, RANGE), _names(arg, LIST)
    if not ranged and not listed:
        return Listed([arg])
    parts: dict[str, Choices] = {}
    for name, value in arg.items():
        if name in listed:
            parts[name] = Listed(_list(value, name))
        elif name in ranged:
            parts[name] = _ranged(arg.get("type"), name, value)
        else:
            parts[name] = Listed([value])
    return Table(parts)


def _ranged(kind: Any, name: str, value: Any) -> Choices:
    if name == "shape":
        return Product([_span(size) if isinstance(size, list) else Listed([size]) for size in _list(value, name)])
    if kind in WHOLE and name == "value":
        return _span(_list(value, name))
    if kind in NESTED and name == "value":
        return Product([_choices(item) for item in _list(value, name)])
    if kind in ("float", "double") and name == "value":
        raise ValueError("a range of floats, which the iterator does not have: list them by __list__")
    return Listed(_list(value, name))


def _span(bounds: list[Any]) -> Span:
    if len(bounds) not in (2, 3) or any(type(bound) is not int for bound in bounds):
        raise ValueError(f"{reprlib.repr(bounds)} is no range of whole numbers")
    return Span(*bounds)


def _names(arg: dict[str, Any], macro: str) -> list[str]:
    names = arg.get(macro, [])
    if not isinstance(names, list) or any(type(name) is not str for name in names):
        raise ValueError(f"{macro} that lists no names")
    missing = [name for name in names if name not in arg]
    if missing:
        raise ValueError(f"{macro} of {reprlib.repr(missing[0])}, which the argument has not")
    return names


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"a range of {reprlib.repr(name)} that is no list")
    return value


def _copy_into(args: list[dict[str, Any]], place: int) -> dict[str, Any]:
    """Put in the place of an argument the same with what it copies; lists that combinations share are left alone."""
    if args[place].get("type") != "tensor":
        return args[place]
    try:
        for name, (target, (source, element)) in (link for item in args[place].get(COPY, []) for link in item.items()):
            if any(type(number) is not int or number < 0 for number in (target, source, element)):
                raise ValueError("a copy between no numbers of elements")
            values = list(args[place][name])
            values[target] = args[source][name][element]
            args[place] = {**args[place], name: values}
    except (TypeError, KeyError, IndexError, AttributeError) as error:
        raise ValueError("a copy of what is not there") from error
    return args[place]


def _without_macros(arg: dict[str, Any]) -> dict[str, Any]:
    plain = {name: value for name, value in arg.items() if name not in (RANGE, LIST, COPY)}
    if plain.get("type") in NESTED and isinstance(plain.get("value"), list):
        plain["value"] = [_without_macros(item) if isinstance(item, dict) else item for item in plain["value"]]
    return plain
