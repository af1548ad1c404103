"""What a program says of its steps."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count


class Marks:
    """How many steps the program has ended, and who is told of each while a recording waits for some."""

    def __init__(self) -> None:
        self.listeners: tuple[Callable[[], None], ...] = ()
        self._next = count().__next__
        self._last = -1

    @property
    def steps(self) -> int:
        """How many steps the program has ended."""
        return self._last + 1

    def step(self) -> None:
        """Count a step that has ended."""
        self._last = self._next()
        for listener in self.listeners:
            listener()


marks = Marks()


def step() -> None:
    """Tell that a step of the program has ended and the next one begins, for recordings that are asked for.

    ::

        for batch in batches:
            train(batch)
            opgrip.capture.step()

    Costs next to nothing while nobody records. Each thread that calls it has steps of its own. It is no place for the
    block of a torch mode to begin or end between two calls of it.
    """
    marks.step()
