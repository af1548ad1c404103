"""Iterators that expand one entry of a configuration into many cases, each computed from its index."""

from __future__ import annotations

import reprlib
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from opgrip.cli.plugins import Registry

MOST = 1 << 200  # maximum number of combinations; the product of a million ranges would take minutes to compute


@dataclass(frozen=True, slots=True)
class ValueChoices:
    count: int
    at: Callable[[int], Any]


class Listed(ValueChoices):
    def __init__(self, values: Sequence[Any]) -> None:
        super().__init__(len(values), values.__getitem__)


def combinations(parts: Sequence[ValueChoices]) -> ValueChoices:
    """Return all lists that consist of one value of each sequence; the value of the last sequence varies fastest."""
    count = 1
    for part in parts:
        count *= part.count
        if count > MOST:
            raise ValueError("an entry has more than 2**200 combinations of values")

    def at(index: int) -> list[Any]:
        # the digits of the index, with the parts' counts as bases
        values = []
        for part in reversed(parts):
            index, digit = divmod(index, part.count)
            values.append(part.at(digit))
        return values[::-1]

    return ValueChoices(count, at)


def _table(parts: Mapping[str, ValueChoices]) -> ValueChoices:
    product = combinations(list(parts.values()))
    return ValueChoices(product.count, lambda index: dict(zip(parts, product.at(index), strict=True)))


def chain(parts: Sequence[ValueChoices]) -> ValueChoices:
    ends = list(accumulate((part.count for part in parts), initial=0))

    def at(index: int) -> Any:
        part = bisect_right(ends, index) - 1
        return parts[part].at(index - ends[part])

    return ValueChoices(ends[-1], at)


# Type of a function that returns all combinations of an entry of a `build` or `input` section, as entries without
# macros.
#
# An entry has `args`, a list of arguments, and `kwargs`, arguments by name. Each argument is an object with its `type`.
# Raises `ValueError` if the entry cannot be expanded.
Expand = Callable[[dict[str, Any]], ValueChoices]

ITERATOR = "DefaultConfigIterator"  # iterator for entries that do not name one
# iterators by the names that files use
iterators: Registry[Expand] = Registry("opgrip.traces.formats.configurations", "opgrip.iterators")


@iterators.register(ITERATOR)
def keep_entry(entry: dict[str, Any]) -> ValueChoices:
    return Listed([entry])


RANGE, LIST, COPY = "__range__", "__list__", "__copy__"
WHOLE = ("int", "long")
NESTED = ("genericlist", "tuple")


@iterators.register("RangeConfigIterator")
def expand(entry: dict[str, Any]) -> ValueChoices:
    args, kwargs = entry.get("args") or [], entry.get("kwargs") or {}
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        raise ValueError("`args` of an entry is not a list, or its `kwargs` is not a JSON object")
    positional = combinations([_choices(arg) for arg in args])
    named = _table({name: _choices(arg) for name, arg in kwargs.items()})

    def linked(index: int) -> dict[str, Any]:
        # positional arguments vary slower than the named ones
        digits = divmod(index, named.count)
        args, kwargs = positional.at(digits[0]), named.at(digits[1])
        for number in range(len(args)):
            _copy_into(args, number)
        kwargs = {name: _copy_into([*args, arg], len(args)) for name, arg in kwargs.items()}
        return {
            "args": [_without_macros(arg) for arg in args],
            "kwargs": {name: _without_macros(arg) for name, arg in kwargs.items()},
        }

    return ValueChoices(combinations([positional, named]).count, linked)


def _choices(arg: Any) -> ValueChoices:
    if not isinstance(arg, dict):
        raise ValueError(f"an argument is not a JSON object: {reprlib.repr(arg)}")
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
    return _table(parts)


def _ranged(kind: Any, name: str, value: Any) -> ValueChoices:
    if name == "shape":
        return combinations([_span(size) if isinstance(size, list) else Listed([size]) for size in _list(value, name)])
    if kind in WHOLE and name == "value":
        return _span(_list(value, name))
    if kind in NESTED and name == "value":
        return combinations([_choices(item) for item in _list(value, name)])
    if kind in ("float", "double") and name == "value":
        raise ValueError("ranges of floats are not supported: list the values with __list__")
    return Listed(_list(value, name))


def _span(bounds: list[Any]) -> ValueChoices:
    if len(bounds) not in (2, 3) or any(type(bound) is not int for bound in bounds):
        raise ValueError(f"{reprlib.repr(bounds)} is not a range of integers")
    first, last, step = (*bounds, 1)[:3]
    if not step:
        raise ValueError(f"the range {reprlib.repr(bounds)} has the step 0")
    return ValueChoices(max(0, (last - first) // step + 1), lambda index: first + index * step)


def _names(arg: dict[str, Any], macro: str) -> list[str]:
    names = arg.get(macro, [])
    if not isinstance(names, list) or any(type(name) is not str for name in names):
        raise ValueError(f"{macro} is not a list of names: {reprlib.repr(names)}")
    missing = [name for name in names if name not in arg]
    if missing:
        raise ValueError(f"{macro} lists {reprlib.repr(missing[0])}, but the argument has no member of that name")
    return names


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"the range of {reprlib.repr(name)} is not a list")
    return value


def _copy_into(args: list[dict[str, Any]], index: int) -> dict[str, Any]:
    if args[index].get("type") != "tensor":
        return args[index]
    try:
        for name, (target, (source, element)) in (link for item in args[index].get(COPY, []) for link in item.items()):
            if any(type(number) is not int or number < 0 for number in (target, source, element)):
                raise ValueError(f"__copy__ has {(target, source, element)}: expected integers of at least 0")
            values = list(args[index][name])
            values[target] = args[source][name][element]
            # a new argument, because other combinations share the old one
            args[index] = {**args[index], name: values}
    except (TypeError, KeyError, IndexError, AttributeError) as error:
        raise ValueError(
            f"__copy__ names a value that does not exist: {reprlib.repr(args[index].get(COPY))}"
        ) from error
    return args[index]


def _without_macros(arg: dict[str, Any]) -> dict[str, Any]:
    plain = {name: value for name, value in arg.items() if name not in (RANGE, LIST, COPY)}
    if plain.get("type") in NESTED and isinstance(plain.get("value"), list):
        plain["value"] = [_without_macros(item) if isinstance(item, dict) else item for item in plain["value"]]
    return plain
