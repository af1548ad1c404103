"""Numbers of what a capture meets, which go on where its tables begin anew since too much was met."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator

PAIR = "pair"
"""The kind of number that stands for a signature in a scope."""


class Epochs:
    """Which numbers were given in which epoch: an epoch lasts from one beginning of the tables to the next.

    Attributes
    ----------
    current : the number of this one
    """

    def __init__(self) -> None:
        self.current = 0
        self._next: defaultdict[Hashable, int] = defaultdict(int)
        self._firsts: dict[int, dict[Hashable, int]] = {0: {}}
        self._ends: dict[int, dict[Hashable, int]] = {}

    def next(self, kind: Hashable) -> int:
        """A new number, to be asked for under the lock of the tables."""
        number = self._next[kind]
        self._next[kind] = number + 1
        return number

    def count(self, kind: Hashable) -> int:
        """How many numbers there were in all."""
        return self._next[kind]

    def size(self, kind: Hashable) -> int:
        """How many of them this epoch gave."""
        return self._next[kind] - self._firsts[self.current].get(kind, 0)

    def begin(self) -> None:
        """Begin another epoch."""
        self._ends[self.current] = dict(self._next)
        self.current += 1
        self._firsts[self.current] = dict(self._next)

    def numbers(self, kind: Hashable, epochs: set[int]) -> Iterator[int]:
        """The numbers that these epochs gave, as far as they are kept."""
        for epoch in sorted(epochs & self._firsts.keys()):
            end = self._next[kind] if epoch == self.current else self._ends[epoch].get(kind, 0)
            yield from range(self._firsts[epoch].get(kind, 0), end)

    def keep(self, epochs: set[int]) -> None:
        """Forget the others."""
        for epoch in [epoch for epoch in self._firsts if epoch not in epochs and epoch != self.current]:
            del self._firsts[epoch], self._ends[epoch]
