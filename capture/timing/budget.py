"""Limit on the share of a program's time that a capture takes; near it, the capture records less."""

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
"""time whose credit can be spent at once; a capture also starts with this credit"""
WITH_VALUES, WITH_SCOPES = 1 / 2, 1 / 4
"""parts of the maximum credit below which values are not observed and scopes are not tracked"""
MARGIN = 0.65
"""part of the share that is spent. Up to a third of the extra time of recorded steps appeared in no measurement"""
PASSED_NS, LOOK_NS = 3000, 25_000
"""approximate time at the start of a step if the step is skipped, and if the credit is checked; measured in a program
that fills the caches between steps
"""
OF_SHORT = 0.01
"""approximate upper limit of the skip time as a part of a short step: caches stay warm, and skipping an empty step
takes 0.6 us"""
OF_LOOKS, MOST_PASSED = 0.1, 64
"""part of the share that credit checks may take, and maximum number of steps skipped between checks if that part allows
more checks
"""


class Thinning(IntEnum):
    """Kinds of data to leave out; each level includes the ones before it."""

    NOTHING = 0
    VALUES = 1
    SCOPES = 2
    STEPS = 3


@dataclass(slots=True)
class WorkDone:
    """Amounts of work of a recording that take time from the program.

    Attributes
    ----------
    calls, integers : calls taken from the threads, and integers in their rows
    modules_passed : calls of modules in threads that are not recorded
    writing_ns : processor time of the writing thread
    """

    calls: int = 0
    integers: int = 0
    modules_passed: int = 0
    writing_ns: int = 0


class Spends(Protocol):
    """Protocol of an object that knows how much time a capture takes."""

    @property
    def steps(self) -> StepTimes:
        """Times of the program's steps."""

    def ns(self) -> float:
        """Return the time taken from the program so far, in ns."""

    def begin_step(self, is_recorded: bool | None) -> None:
        """Report that a step starts in this thread, or with None that the time outside of steps starts."""


class Budget:
    """A credit that grows by a share of the elapsed time and pays for the capture's own work.

    Attributes
    ----------
    left_out : number of omissions by kind of data
    """

    def __init__(self, share: float, spending: Spends, now_ns: Callable[[], int] = perf_counter_ns) -> None:
        self.share, self.spending = share, spending
        self._now_ns = now_ns
        self._earned, self._most_ns = MARGIN * share, share * BURST_S * 1e9
        self.begin()

    def begin(self) -> None:
        """Start with the maximum credit."""
        self.left_out = [0] * len(Thinning)
        # in a forked process, another thread of the parent may have held the lock
        self._lock = threading.Lock()
        self._credit_ns, self._passing_ns = self._most_ns, 0.0
        self._last_ns, self._last_spent_ns = self._now_ns(), self._spent_ns()
        self._poor_until_ns = self._looked_ns = self._last_ns
        self._looked_at = self._to_pass = 0

    def thinning(self) -> Thinning:
        """Update the credit and return what to leave out now."""
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
        """Report the start of a step in this thread, and whether it is left out because of `thinning`."""
        self.spending.begin_step(not is_left_out)
        now, passed = self._now_ns(), self.left_out[Thinning.STEPS]
        mean_ns = max(1.0, (now - self._looked_ns) / max(1, passed - self._looked_at))
        self._passing_ns += (passed - self._looked_at) * min(PASSED_NS, OF_SHORT * mean_ns)
        # half the expected number, because later steps may take longer
        due = min(MOST_PASSED, (self._poor_until_ns - now) / (2 * mean_ns))
        least = LOOK_NS / (OF_LOOKS * self.share * mean_ns)
        self._looked_ns, self._looked_at, self._to_pass = now, passed, int(max(due, least)) if is_left_out else 0

    def passes_step(self) -> bool:
        """Return True, and count the step, if the credit cannot pay for the step that begins in this thread.

        This is the common case and must be fast: a program's steps can be as short as the work done here.
        """
        if self._to_pass <= 0 or self.spending.steps.is_timing:
            return False
        self._to_pass -= 1
        self.left_out[Thinning.STEPS] += 1
        return True

    @property
    def is_overdrawn(self) -> bool:
        """True if the capture took much more time than its share although everything possible was left out."""
        return self._credit_ns < -self._most_ns

    def leave_out(self, what: Thinning) -> None:
        self.left_out[what] += 1

    def counts(self) -> dict[str, int]:
        """Return the nonzero numbers of omissions by name, for the trace's last record."""
        return {name: count for name, count in zip(THINNED, self.left_out[1:], strict=True) if count}

    def _spent_ns(self) -> float:
        return self.spending.ns() + self._passing_ns


PRIOR, SPREAD = 3.0, 2.0
"""approximate ratio of the cost of recording a program to the cost of recording a model whose calls are all alike and
whose code and tables are in the caches, and how much that ratio differs between programs
"""
LEAST, MOST = 1.0, 30.0
"""limits of that ratio"""
MEMORY = 64
"""approximate number of steps that a mean covers"""
ENOUGH = 8
"""steps of each kind required before their mean is used"""
AFTER = 2
"""steps that a recorded step before them slows down. Measured with a transformer's steps of 0.55 ms: the first two took
0.11 and 0.03 ms longer, the third 0.02 ms
"""


class RunningMean:
    """Exponentially weighted mean of a series of values, and its uncertainty."""

    def __init__(self) -> None:
        self.count, self.mean, self._variance = 0, 0.0, 0.0

    def add(self, value: float) -> None:
        self.count += 1
        weight = 1 / min(self.count, MEMORY)
        difference = value - self.mean
        self.mean += weight * difference
        self._variance = (1 - weight) * (self._variance + weight * difference * difference)

    @property
    def error_squared(self) -> float:
        """Variance of the mean; infinite if there are too few values."""
        return inf if self.count < ENOUGH else self._variance / (min(self.count, MEMORY) - 1)


class _Here(threading.local):
    """State of a thread: the step that is being timed.

    Attributes
    ----------
    since_ns : start of the timed step, or None if no step is timed
    measured_ns : measured time of the capture's own work up to that start
    steps : mean that receives the step's time
    left_out : number of steps left out since the thread's last recorded step
    """

    since_ns: int | None = None
    measured_ns = 0.0
    steps: RunningMean
    left_out = 0


class StepTimes:
    """Comparison of recorded steps with steps that are left out, per thread.

    A step is everything its thread does until the next step begins. The first steps after a recorded one find colder
    caches; their additional time counts as a cost of the recorded step.
    """

    def __init__(self, processor_ns: Callable[[], int] = thread_time_ns) -> None:
        self._processor_ns = processor_ns
        self._here = _Here()
        self._recorded, self._after, self._left_out, self._reckoned = (RunningMean() for _ in range(4))
        self._reckoned_ns = 0.0

    @property
    def is_timing(self) -> bool:
        """True if this thread is in a timed step, whose end must be reported."""
        return self._here.since_ns is not None

    def begin(self, is_recorded: bool | None, measured_ns: float, reckoned_ns: float) -> None:
        """Report the start of a step in this thread. None means an interval that is neither recorded nor left out.

        Parameters
        ----------
        measured_ns : measured time of the capture's own work in the program's threads so far
        reckoned_ns : estimated time of recording calls so far, in all threads
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
        """Ratio of the actual to the estimated time of recording calls.

        It is the mean of the prior and of the measured steps, weighted by their uncertainty.
        """
        reckoned, left_out = self._reckoned.mean, self._left_out
        if reckoned <= 0:
            return PRIOR
        dearer = [self._recorded, *[self._after] * AFTER]
        seen = sum(steps.mean - left_out.mean for steps in dearer) / reckoned
        doubt = sum(steps.error_squared + left_out.error_squared for steps in dearer) / reckoned**2
        weight = SPREAD**2 / (SPREAD**2 + doubt)
        return min(MOST, max(LEAST, PRIOR + weight * (seen - PRIOR)))
