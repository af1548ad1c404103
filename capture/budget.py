"""Keeps what a capture takes of a program's time below a share of it, by recording less."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from enum import IntEnum
from time import perf_counter_ns

from opgrip.traces.records import THINNED

BURST_S = 20.0
"""The credit of so much time can be spent at once, as at the begin."""
WITH_VALUES, WITH_SCOPES = 1 / 2, 1 / 4
"""Parts of that credit below which no values are looked at, and no scopes are followed."""


class Thinning(IntEnum):
    """What is left out, each with what comes before it."""

    NOTHING = 0
    VALUES = 1
    SCOPES = 2
    STEPS = 3


class Budget:
    """A credit that grows by a share of the time that passes, of which the capture's own work is paid.

    Parameters
    ----------
    share : of the program's time that the capture may take
    spent_ns : what it has taken since it began

    Attributes
    ----------
    left_out : how often what was left out
    """

    def __init__(
        self, share: float, spent_ns: Callable[[], float], now_ns: Callable[[], int] = perf_counter_ns
    ) -> None:
        self.share = share
        self._spent_ns, self._now_ns = spent_ns, now_ns
        self._most_ns = share * BURST_S * 1e9
        self.begin()

    def begin(self) -> None:
        """Begin with a whole credit."""
        self.left_out: Counter[Thinning] = Counter()
        self._credit_ns = self._most_ns
        self._last_ns, self._last_spent_ns = self._now_ns(), self._spent_ns()

    def thinning(self) -> Thinning:
        """What is to be left out now."""
        now, spent = self._now_ns(), self._spent_ns()
        earned = self.share * (now - self._last_ns)
        self._credit_ns = min(self._most_ns, self._credit_ns + earned) - (spent - self._last_spent_ns)
        self._last_ns, self._last_spent_ns = now, spent
        if self._credit_ns < 0:
            return Thinning.STEPS
        if self._credit_ns < WITH_SCOPES * self._most_ns:
            return Thinning.SCOPES
        return Thinning.VALUES if self._credit_ns < WITH_VALUES * self._most_ns else Thinning.NOTHING

    @property
    def is_overdrawn(self) -> bool:
        """Whether much more was spent than there was: nothing more could be left out."""
        return self._credit_ns < -self._most_ns

    def leave_out(self, what: Thinning) -> None:
        """Count what was left out."""
        self.left_out[what] += 1

    def counts(self) -> dict[str, int]:
        """How often what was left out, as a trace's last record holds it."""
        return {THINNED[what - 1]: count for what, count in sorted(self.left_out.items())}
