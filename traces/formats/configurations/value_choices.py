"""Many values that are computed one by one, by their numbers: ranges, lists, and all combinations of such.

Nothing is made before it is asked for, so that a million combinations cost what their description costs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

MOST = 1 << 200
"""Combinations that are numbered: more are nobody's, and a product of a million ranges takes minutes to compute."""


class Choices(Protocol):
    """Values with numbers from 0 on.

    Attributes
    ----------
    count : how many there are, which may be more than an index of a list can be
    """

    @property
    def count(self) -> int:
        """How many there are."""

    def at(self, index: int) -> Any:
        """The one of this number, from 0 to `count - 1`."""


@dataclass(frozen=True, slots=True)
class Listed:
    """Values that stand in a list."""

    values: Sequence[Any]

    @property
    def count(self) -> int:
        """As many as the list has."""
        return len(self.values)

    def at(self, index: int) -> Any:
        """One of the list."""
        return self.values[index]


@dataclass(frozen=True, slots=True)
class Span:
    """Whole numbers from `first` to `last`, which is one of them where the steps meet it.

    Raises
    ------
    ValueError : for a step of 0
    """

    first: int
    last: int
    step: int = 1

    def __post_init__(self) -> None:
        if not self.step:
            raise ValueError("a range whose step is 0")

    @property
    def count(self) -> int:
        """How many steps there are, and one."""
        return max(0, (self.last - self.first) // self.step + 1)

    def at(self, index: int) -> int:
        """The number after so many steps."""
        return self.first + index * self.step


class Product:
    """All combinations of one value of each part, as lists; the last part's values take turns fastest.

    Raises
    ------
    ValueError : for more than `MOST`
    """

    def __init__(self, parts: Sequence[Choices]) -> None:
        self._parts = parts
        self.count = 1
        for part in parts:
            self.count *= part.count
            if self.count > MOST:
                raise ValueError("more combinations than there are numbers for")

    def at(self, index: int) -> list[Any]:
        """The digits of the number, where the parts' counts are the bases, say which of each."""
        values = []
        for part in reversed(self._parts):
            index, digit = divmod(index, part.count)
            values.append(part.at(digit))
        return values[::-1]


class Table:
    """All combinations of one value of each part, as dictionaries."""

    def __init__(self, parts: Mapping[str, Choices]) -> None:
        self._names = list(parts)
        self._product = Product(list(parts.values()))
        self.count = self._product.count

    def at(self, index: int) -> dict[str, Any]:
        """The combination of that number, of which `Product` tells."""
        return dict(zip(self._names, self._product.at(index), strict=True))


class Chain:
    """The values of each part, one part after the other."""

    def __init__(self, parts: Sequence[Choices]) -> None:
        self._parts = parts
        self._ends = list(accumulate(part.count for part in parts))
        self.count = self._ends[-1] if parts else 0

    def at(self, index: int) -> Any:
        """The value of that number."""
        place = bisect_right(self._ends, index)
        return self._parts[place].at(index - (self._ends[place - 1] if place else 0))
