"""Keeps what a capture takes of a program's time below a share of it, by recording less."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from math import inf
from time import perf_counter_ns, thread_time_ns
from typing import Protocol

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


@dataclass(slots=True)
class WorkDone:
    """What a recording did that takes time of the program.

    Attributes
    ----------
    calls, integers : calls that were taken from the threads, and integers in their rows
    modules_passed : calls of modules in threads that are not recorded
    writing_ns : processor time of the thread that writes
    """

    calls: int = 0
    integers: int = 0
    modules_passed: int = 0
    writing_ns: int = 0


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


PRIOR, SPREAD = 3.0, 2.0
"""What recording takes of a program to what it takes of a model whose calls are all alike, whose code and tables are in
the caches, about, and how far programs differ in that."""
LEAST, MOST = 1.0, 30.0
"""Bounds of that."""
MEMORY = 64
"""Steps that a mean is over, about."""
ENOUGH = 8
"""Steps of each kind before they tell anything."""
AFTER = 2
"""Steps after a recorded one that feel it: a transformer's of 0.55 ms by 0.11 and 0.03 ms, and the third by 0.02."""


class RunningMean:
    """The mean of the last values, the older the less, and how much it may be wrong by."""

    def __init__(self) -> None:
        self.count, self.mean, self._variance = 0, 0.0, 0.0

    def add(self, value: float) -> None:
        """Take a value in."""
        self.count += 1
        weight = 1 / min(self.count, MEMORY)
        difference = value - self.mean
        self.mean += weight * difference
        self._variance = (1 - weight) * (self._variance + weight * difference * difference)

    @property
    def error_squared(self) -> float:
        """Variance of the mean; infinite where there are few values."""
        return inf if self.count < ENOUGH else self._variance / (min(self.count, MEMORY) - 1)


class _Here(threading.local):
    """What a thread is in.

    Attributes
    ----------
    since_ns : when the step began that is timed; None where none is
    measured_ns : what was measured of the capture's own work by then
    steps : takes it in when it ends
    left_out : steps that were left out since the last one that was recorded, or the thread's first
    """

    since_ns: int | None = None
    measured_ns = 0.0
    steps: RunningMean
    left_out = 0


class StepTimes:
    """Compares steps that are recorded with those that are left out, each in the thread it runs in.

    A step is all that its thread does until the next one begins. What the first ones after a recorded step take longer
    than the next is taken for what that one costs too, as they find colder caches.
    """

    def __init__(self, processor_ns: Callable[[], int] = thread_time_ns) -> None:
        self._processor_ns = processor_ns
        self._here = _Here()
        self._recorded, self._after, self._left_out, self._reckoned = (RunningMean() for _ in range(4))
        self._reckoned_ns = 0.0

    @property
    def is_timing(self) -> bool:
        """Whether this thread is in a step that is timed, and so has to tell of the next one."""
        return self._here.since_ns is not None

    def begin(self, is_recorded: bool | None, measured_ns: float, reckoned_ns: float) -> None:
        """Tell that a step begins in this thread; with None, that what begins is neither recorded nor left out.

        Parameters
        ----------
        measured_ns : what the capture's own work in the program's threads has taken so far
        reckoned_ns : what its calls are reckoned to have taken so far, in all threads
        """
        here, now = self._here, self._processor_ns()
        if here.since_ns is not None:
            here.steps.add(now - here.since_ns - (measured_ns - here.measured_ns))
            if here.steps is self._recorded:
                self._reckoned.add(reckoned_ns - self._reckoned_ns)
                self._reckoned_ns = reckoned_ns
        here.since_ns = None
        if is_recorded is None:
            return
        if is_recorded:
            here.left_out, here.steps = 0, self._recorded
        else:
            here.left_out += 1
            if here.left_out > AFTER + 1:
                return
            here.steps = self._after if here.left_out <= AFTER else self._left_out
        here.since_ns, here.measured_ns = self._processor_ns(), measured_ns

    @property
    def factor(self) -> float:
        """How many times what was reckoned its calls truly take; the mean of prior and steps by what each is worth."""
        reckoned, left_out = self._reckoned.mean, self._left_out
        if reckoned <= 0:
            return PRIOR
        dearer = [self._recorded, *[self._after] * AFTER]
        seen = sum(steps.mean - left_out.mean for steps in dearer) / reckoned
        doubt = sum(steps.error_squared + left_out.error_squared for steps in dearer) / reckoned**2
        weight = SPREAD**2 / (SPREAD**2 + doubt)
        return min(MOST, max(LEAST, PRIOR + weight * (seen - PRIOR)))
