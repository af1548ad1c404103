"""Keeps what a capture takes of a program's time below a share of it, by recording less."""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import IntEnum
from time import perf_counter_ns
from typing import Protocol

from opgrip.capture.timing.step_times import StepTimes
from opgrip.traces.schema.records import THINNED

BURST_S = 20.0
"""The credit of so much time can be spent at once, as at the begin."""
WITH_VALUES, WITH_SCOPES = 1 / 2, 1 / 4
"""Parts of that credit below which no values are looked at, and no scopes are followed."""
MARGIN = 0.65
"""Part of the share that is spent: up to a third of what steps took longer in all was in none of what is measured."""
PASSED_NS, LOOK_NS = 3000, 25_000
"""What the begin of a step takes, about, where it is passed and where it is looked at what there is, as measured in a
program that fills the caches meanwhile."""
OF_SHORT = 0.01
"""Part of a short step that passing it takes at most, about, as caches stay warm: 0.6 us of one that does nothing."""
OF_LOOKS, MOST_PASSED = 0.1, 64
"""Part of the share that looks may take, and how many steps are passed at most where that allows more looks."""


class Thinning(IntEnum):
    """What is left out, each with what comes before it."""

    NOTHING = 0
    VALUES = 1
    SCOPES = 2
    STEPS = 3


class Spends(Protocol):
    """Knows what a capture takes."""

    @property
    def steps(self) -> StepTimes:
        """Times of the program's steps."""

    def ns(self) -> float:
        """What it has taken of the program's time, in ns."""

    def begin_step(self, is_recorded: bool | None) -> None:
        """Tell that a step begins in this thread; with None, that what begins is neither recorded nor left out."""


class Budget:
    """A credit that grows by a share of the time that passes, of which the capture's own work is paid.

    Parameters
    ----------
    share : of the program's time that the capture may take
    spending : what it has taken since it began

    Attributes
    ----------
    spending : as above
    left_out : how often what was left out
    """

    def __init__(self, share: float, spending: Spends, now_ns: Callable[[], int] = perf_counter_ns) -> None:
        self.share, self.spending = share, spending
        self._now_ns = now_ns
        self._earned, self._most_ns = MARGIN * share, share * BURST_S * 1e9
        self.begin()

    def begin(self) -> None:
        """Begin with a whole credit."""
        self.left_out = [0] * len(Thinning)
        # in a forked process, another thread of the parent may have held it
        self._lock = threading.Lock()
        self._credit_ns, self._passing_ns = self._most_ns, 0.0
        self._last_ns, self._last_spent_ns = self._now_ns(), self._spent_ns()
        self._poor_until_ns = self._looked_ns = self._last_ns
        self._looked_at = self._to_pass = 0

    def thinning(self) -> Thinning:
        """What is to be left out now."""
        with self._lock:
            now, spent = self._now_ns(), self._spent_ns()
            earned = self._earned * (now - self._last_ns)
            self._credit_ns = min(self._most_ns, self._credit_ns + earned) - (spent - self._last_spent_ns)
            self._last_ns, self._last_spent_ns = now, spent
            self._poor_until_ns = now - int(self._credit_ns / self._earned)
        if self._credit_ns < 0:
            return Thinning.STEPS
        self._to_pass = 0
        if self._credit_ns < WITH_SCOPES * self._most_ns:
            return Thinning.SCOPES
        return Thinning.VALUES if self._credit_ns < WITH_VALUES * self._most_ns else Thinning.NOTHING

    def begin_step(self, is_left_out: bool) -> None:
        """Tell that a step begins in this thread, and whether `thinning` has left it out."""
        self.spending.begin_step(not is_left_out)
        now, passed = self._now_ns(), self.left_out[Thinning.STEPS]
        mean_ns = max(1.0, (now - self._looked_ns) / max(1, passed - self._looked_at))
        self._passing_ns += (passed - self._looked_at) * min(PASSED_NS, OF_SHORT * mean_ns)
        # half of those that are expected, as others may take longer
        due = min(MOST_PASSED, (self._poor_until_ns - now) / (2 * mean_ns))
        least = LOOK_NS / (OF_LOOKS * self.share * mean_ns)
        self._looked_ns, self._looked_at, self._to_pass = now, passed, int(max(due, least)) if is_left_out else 0

    def passes_step(self) -> bool:
        """Whether the step that begins in this thread cannot be paid for, so that nothing is done; it is counted.

        Most steps are such ones, and a program's steps can be as short as what is done for one.
        """
        if self._to_pass <= 0 or self.spending.steps.is_timing:
            return False
        self._to_pass -= 1
        self.left_out[Thinning.STEPS] += 1
        return True

    @property
    def is_overdrawn(self) -> bool:
        """Whether much more was spent than there was: nothing more could be left out."""
        return self._credit_ns < -self._most_ns

    def leave_out(self, what: Thinning) -> None:
        """Count what was left out."""
        self.left_out[what] += 1

    def counts(self) -> dict[str, int]:
        """How often what was left out, as a trace's last record holds it."""
        return {name: count for name, count in zip(THINNED, self.left_out[1:], strict=True) if count}

    def _spent_ns(self) -> float:
        return self.spending.ns() + self._passing_ns
