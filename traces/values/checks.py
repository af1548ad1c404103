"""Checks of a model's fields, which may come from a stranger's file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from opgrip.traces.schema.arguments import FormatError

LOWEST, HIGHEST = -(1 << 63), (1 << 63) - 1
"""What a torch integer of 64 bits holds."""
UNSIGNED = (1 << 64) - 1


def whole(value: Any, what: str, low: int = LOWEST, high: int = HIGHEST) -> None:
    """A whole number from `low` to `high`, by default one of 64 bits."""
    if type(value) is not int or not low <= value <= high:
        raise FormatError(f"{what} that is no whole number from {low} to {high}: {str(value)[:40]}")


def finite(value: Any, what: str) -> None:
    """A finite number, of a size that a float holds."""
    if type(value) not in (int, float) or (not -UNSIGNED <= value <= UNSIGNED and type(value) is int):
        raise FormatError(f"{what} that is no number: {str(value)[:40]}")
    if not math.isfinite(value):
        raise FormatError(f"{what} that is not finite: {value}")


def share(value: Any, what: str) -> None:
    """A number from 0 to 1."""
    finite(value, what)
    if not 0 <= value <= 1:
        raise FormatError(f"{what} that is no share from 0 to 1: {value}")


def flag(value: Any, what: str) -> None:
    """True or false."""
    if type(value) is not bool:
        raise FormatError(f"{what} that is neither true nor false: {str(value)[:40]}")


def listed(values: Any, what: str, least: int, most: int) -> None:
    """A list of `least` to `most` items."""
    if not isinstance(values, list) or not least <= len(values) <= most:
        raise FormatError(f"{what} that is no list of {least} to {most} items")


def rising(values: Any, what: str, length: int) -> None:
    """A list of so many finite numbers, none smaller than the one before it, as quantiles are."""
    listed(values, what, length, length)
    for value in values:
        finite(value, what)
    if any(after < before for before, after in pairwise(values)):
        raise FormatError(f"{what} that does not ascend")


def counted(pairs: Any, what: str, most: int) -> None:
    """A list of at most so many pairs of a value and how often it occurs, all of 64 bits in sum."""
    listed(pairs, what, 0, most)
    for pair in pairs:
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise FormatError(f"{what} that holds {str(pair)[:40]}, no pair")
        whole(pair[0], what)
        whole(pair[1], what, 0)
    whole(sum(count for _, count in pairs), what, 0)
