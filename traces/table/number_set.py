"""Numbers of signatures or scopes that blocks of calls are searched for."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from opgrip.traces.codec.integer_text import Integers


class NumberSet:
    """A set that is asked for columns of numbers at once, and grows while a trace is read."""

    def __init__(self) -> None:
        self._numbers: set[int] = set()
        self._array: Integers | None = None

    def put(self, number: int, is_in: bool = True) -> None:
        """Add a number, or take it out."""
        (self._numbers.add if is_in else self._numbers.discard)(number)
        self._array = None

    def __contains__(self, number: int) -> bool:
        return number in self._numbers

    def flags(self, column: Integers) -> NDArray[np.bool_]:
        """Of each of a column's numbers, (N,), whether it is among these."""
        if self._array is None:
            self._array = np.array(sorted(self._numbers), dtype=np.int64)
        return np.isin(column, self._array)
