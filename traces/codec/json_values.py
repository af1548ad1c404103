"""Values of a JSON object that stand in a file, each checked to be what it should be."""

from __future__ import annotations

import re
from collections.abc import Callable
from sys import float_info
from typing import Any, TypeVar

from opgrip.traces.schema.arguments import FormatError, Json
from opgrip.traces.schema.limits import NAME_LENGTH

LIMIT = 1 << 63
"""Bound of the whole numbers in a trace."""
LATEST_NS = 1 << 62
"""Bound of when calls start and end: what lies between two of them is a number of 64 bits."""
LARGEST = float_info.max
"""Of the numbers in what is kept as it stands."""

T = TypeVar("T")


def check_finite(tree: Json) -> None:
    """Raise `FormatError` for numbers too large for a float, which no file can hold again, or nobody reckon with."""
    level = [tree]
    while level:
        item = level.pop()
        if isinstance(item, dict | list):
            level += item.values() if isinstance(item, dict) else item
        elif isinstance(item, int | float) and not -LARGEST <= item <= LARGEST:
            raise FormatError("a number that no float holds")


def integer(value: Json) -> int:
    """A whole number of 64 bits."""
    if type(value) is not int or not -LIMIT <= value < LIMIT:
        raise FormatError(f"{str(value)[:60]!r} stands where a whole number of 64 bits should")
    return value


def elapsed_ns(value: Json) -> int:
    """A time that passed, in ns."""
    if integer(value) < 0:
        raise FormatError(f"a time of {value} ns, which is less than none")
    return int(value)


def integers(value: Json) -> list[int]:
    """A list of such."""
    if not isinstance(value, list):
        raise FormatError(f"{str(value)[:60]!r} stands where a list of whole numbers should")
    return [integer(item) for item in value]


def boolean(value: Json) -> bool:
    """True or false."""
    if type(value) is not bool:
        raise FormatError(f"{str(value)[:60]!r} stands where true or false should")
    return value


def text(value: Json) -> str:
    """A text, short enough for a name."""
    if not isinstance(value, str):
        raise FormatError(f"{str(value)[:60]!r} stands where text should")
    if len(value) > NAME_LENGTH:
        raise FormatError(f"a name of {len(value):,} characters")
    return value


def key(value: Json) -> str:
    """The key of a tensor in a file of whole values."""
    if re.fullmatch("[0-9a-f]{32,128}", text(value)) is None:
        raise FormatError(f"{value[:60]!r} stands where the key of a tensor should")
    return str(value)


def optional(read: Callable[[Any], T], value: Json) -> T | None:
    """What `read` makes of a value, None of null."""
    return None if value is None else read(value)
