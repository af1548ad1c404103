"""A number for each piece of memory that a trace's calls mention, four bytes each."""

from __future__ import annotations

from array import array

import numpy as np

from opgrip.traces.codec.integer_text import Integers

UNKNOWN = -1


class MemoryNumbers:
    """Numbers below 2 ** 31 by that of the memory: a trace has as many pieces as calls, and counts them from 0."""

    def __init__(self) -> None:
        self._near = array("i")
        self._far: dict[int, int] = {}
        self._count = 0

    def get(self, storage: int) -> int:
        """The number, `UNKNOWN` where there is none."""
        number = self._near[storage] if 0 <= storage < len(self._near) else UNKNOWN
        return number if number != UNKNOWN or not self._far else self._far.get(storage, UNKNOWN)

    def set(self, storage: int, number: int) -> None:
        """Take note of it."""
        self._count += 1
        # damaged traces have any numbers
        if storage in self._far or not 0 <= storage < self._end:
            self._far[storage] = number
            return
        self._reach(storage)
        self._near[storage] = number

    def raise_to(self, storages: Integers, numbers: Integers) -> None:
        """Take note of numbers, (N,) both, where they are larger than those that there are."""
        self._count += len(storages)
        far = (storages < 0) | (storages >= self._end)
        if self._far:
            far |= np.isin(storages, np.array(list(self._far), dtype=np.int64))
        for storage, number in zip(storages[far].tolist(), numbers[far].tolist(), strict=True):
            self._far[storage] = max(self._far.get(storage, UNKNOWN), number)
        near = storages[~far]
        if len(near):
            self._reach(int(near.max()))
            np.maximum.at(np.frombuffer(self._near, dtype=np.intc), near, numbers[~far].astype(np.intc))

    @property
    def _end(self) -> int:
        return max(len(self._near), 2 * self._count + 4096)

    def _reach(self, storage: int) -> None:
        if storage >= len(self._near):
            self._near.extend(array("i", [UNKNOWN]) * (storage + 1 - len(self._near)))
