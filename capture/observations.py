"""Looks again at some later calls of a signature, where values decide what a call costs or gives.

A program calls `nonzero` on a mask of one shape many times, and each time as many are true as there are. So the trace
has the values and results of a few of these calls, from early ones to late ones, and a replay runs them all in turn.
The calls between cost nothing: a call that is to be looked at gets another operator in its node for that one time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from opgrip.capture.predictions import Node
from opgrip.capture.thread_mode import ThreadMode

EARLY = frozenset({2, 4, 8})
"""Which calls of a signature are looked at among those that are looked up by their key."""
LATE = 32
"""Calls after which another is looked at; later on, after four times as many each."""
MOST = 8
"""Looks at one signature, beside the first."""


class Observations:
    """Which signatures are looked at again, and when."""

    def __init__(self) -> None:
        self._names: dict[int, Hashable] = {}
        self._key_lookups: Counter[int] = Counter()
        self._calls: Counter[int] = Counter()
        self._next: dict[int, int] = {}
        self._looks: Counter[int] = Counter()
        self._due: set[int] = set()

    def want(self, number: int, name: Hashable) -> None:
        """Look at a signature again, of which the first call has been."""
        if number not in self._names:
            self._names[number] = name
            self._key_lookups[number] = 1
            self._next[number] = LATE

    def name(self, number: int) -> Hashable:
        """The operator of a signature that is looked at."""
        return self._names[number]

    def is_due(self, number: int) -> bool:
        """Whether this call, which is looked up by its key, is to be looked at."""
        if number not in self._names:
            return False
        self._key_lookups[number] += 1
        if self._key_lookups[number] in EARLY and self._looks[number] < MOST:
            self._due.add(number)
        return number in self._due

    def take(self, number: int) -> bool:
        """Whether a call is still to be looked at: the first one that asks is."""
        if number not in self._due:
            return False
        self._due.discard(number)
        self._looks[number] += 1
        return True

    def count(self, signatures: Sequence[int], modes: Sequence[ThreadMode]) -> None:
        """Take note of calls that were made, and see that others are looked at in time."""
        counts = Counter(number for number in signatures if number in self._next)
        for number, count in counts.items():
            self._calls[number] += count
            if self._calls[number] >= self._next[number] and self._looks[number] < MOST:
                self._next[number] = 4 * self._calls[number]
                self._due.add(number)
                for mode in modes:
                    mode.look_at(number)


def looking(
    node: Node,
    timed: Callable[..., Any],
    take: Callable[[], bool],
    observe: Callable[[Any, Any], Callable[[Any], None]],
) -> Callable[..., Any]:
    """An operator for a node that runs once in the place of its own, and looks at the call.

    Parameters
    ----------
    timed : the node's operator, with its own time kept, which the looking is not a part of
    take : whether the call is still to be looked at
    observe : looks at arguments, and gives what is to be told the result
    """
    original = node.op

    def run(*args: Any, **kwargs: Any) -> Any:
        node.op = original
        record_result = observe(args, kwargs) if take() else None
        result = timed(*args, **kwargs)
        if record_result is not None:
            record_result(result)
        return result

    return run
