"""Limit on the share of a program's time that a capture takes; near the limit, the capture records less."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from math import inf
from time import perf_counter_ns, thread_time_ns
from typing import Protocol

from opgrip.traces.schema.records import THINNED

BURST_S = 20.0  # a capture may spend at once what its share allows in this time in seconds; it starts with this credit
# parts of the maximum credit below which values are not observed, and below which scopes are not tracked
WITH_VALUES, WITH_SCOPES = 1 / 2, 1 / 4
# part of the share that is spent, because up to a third of the extra time of recorded steps appeared in no measurement
MARGIN = 0.65
# approximate time in ns at the start of a step: if the step is skipped, and if the credit is checked; measured in a
# program that fills the caches between steps
PASSED_NS, LOOK_NS = 3000, 25_000
OF_SHORT = 0.01  # approximate upper limit of the time for skipping a step, as a part of a short step
# maximum part of the share for checks of the credit; and maximum number of steps that are skipped between checks if
# there are more checks than this part allows
OF_LOOKS, MOST_PASSED = 0.1, 64


class Thinning(IntEnum):
    """Kinds of data that a recording leaves out to save time; each level includes the previous ones."""

    NOTHING = 0
    VALUES = 1
    SCOPES = 2
    STEPS = 3


@dataclass(slots=True)
class WorkDone:
    """Work of a recording that slows the program, as counts and times.

    calls, integers : number of calls taken from the threads, and of integers in their rows
    modules_passed : number of module calls in threads that are not recorded
    writing_ns : processor time of the writing thread in ns
    """

    calls: int = 0
    integers: int = 0
    modules_passed: int = 0
    writing_ns: int = 0


class Spends(Protocol):
    """An object that knows by how much time a capture has slowed the program."""

    @property
    def steps(self) -> StepTimes:
        """Times of the program's steps."""

    def ns(self) -> float:
        """Return the time in ns by which the capture has slowed the program so far."""

    def begin_step(self, is_recorded: bool | None) -> None:
        """Note that this thread begins a step, or that it is now outside of all steps.

        is_recorded : True if the step is recorded, False if it is left out of the recording; None if no step begins
        """


class Budget:
    """Time budget of a capture: a credit that grows by a share of the elapsed time, and from which the time of the
    capture's work is subtracted.

    share : share of the program's time that the capture may take
    spending : object that returns the time that the capture has taken
    now_ns : function that returns the current time in ns

    left_out : how often each kind of data was left out
    """

    def __init__(self, share: float, spending: Spends, now_ns: Callable[[], int] = perf_counter_ns) -> None:
        self.share, self.spending = share, spending
        self._now_ns = now_ns
        self._earned, self._most_ns = MARGIN * share, share * BURST_S * 1e9
        self.begin()

    def begin(self) -> None:
        """Set the credit to its maximum, and the counts to 0."""
        self.left_out = [0] * len(Thinning)
        # in a forked process, another thread of the parent may have held the lock
        self._lock = threading.Lock()
        self._credit_ns, self._passing_ns = self._most_ns, 0.0
        self._last_ns, self._last_spent_ns = self._now_ns(), self._spent_ns()
        self._poor_until_ns = self._looked_ns = self._last_ns
        self._looked_at = self._to_pass = 0

    def thinning(self) -> Thinning:
        """Update the credit, and return the kinds of data that must be left out now."""
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
        """Note that a step starts in this thread.

        is_left_out : True if the step is left out of the recording, because `thinning` returned `Thinning.STEPS`
        """
        self.spending.begin_step(not is_left_out)
        now, passed = self._now_ns(), self.left_out[Thinning.STEPS]
        mean_ns = max(1.0, (now - self._looked_ns) / max(1, passed - self._looked_at))
        self._passing_ns += (passed - self._looked_at) * min(PASSED_NS, OF_SHORT * mean_ns)
        # half the expected number, because later steps may take longer
        due = min(MOST_PASSED, (self._poor_until_ns - now) / (2 * mean_ns))
        least = LOOK_NS / (OF_LOOKS * self.share * mean_ns)
        self._looked_ns, self._looked_at, self._to_pass = now, passed, int(max(due, least)) if is_left_out else 0

    def passes_step(self) -> bool:
        """Return True, and count the step that begins in this thread as left out, if the credit does not suffice to
        record it.

        This must be fast, because a program's steps can be very short.
        """
        if self._to_pass <= 0 or self.spending.steps.is_timing:
            return False
        self._to_pass -= 1
        self.left_out[Thinning.STEPS] += 1
        return True

    @property
    def is_overdrawn(self) -> bool:
        """True if the capture took much more time than its share although it left out everything possible."""
        return self._credit_ns < -self._most_ns

    def leave_out(self, what: Thinning) -> None:
        self.left_out[what] += 1

    def counts(self) -> dict[str, int]:
        """Return how often each kind of data was left out, without zeros, for the trace's closing record."""
        return {name: count for name, count in zip(THINNED, self.left_out[1:], strict=True) if count}

    def _spent_ns(self) -> float:
        return self.spending.ns() + self._passing_ns


# PRIOR: approximate cost of recording a real program, relative to recording a model whose calls are all alike and whose
# code and tables are in the caches. SPREAD: factor by which this ratio differs between programs
PRIOR, SPREAD = 3.0, 2.0
LEAST, MOST = 1.0, 30.0  # limits of the ratio that `PRIOR` estimates
MEMORY = 64  # approximate number of recent steps that a mean covers
ENOUGH = 8  # number of steps of each kind that are required before their mean is used
# number of steps that a preceding recorded step slows down. Measured with a transformer's steps of 0.55 ms: the first
# two took 0.11 and 0.03 ms longer, the third 0.02 ms
AFTER = 2


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
        """Variance of the mean; infinite if it has too few values."""
        return inf if self.count < ENOUGH else self._variance / (min(self.count, MEMORY) - 1)


class _Here(threading.local):
    """Measurement of the step that a thread is in.

    since_ns : start of the step, or None if no step is measured
    measured_ns : measured time of the capture's own work until the start of the step
    steps : mean time of steps of the same kind, to which the step's time will be added
    left_out : number of steps left out since the thread's last recorded step
    """

    since_ns: int | None = None
    measured_ns = 0.0
    steps: RunningMean
    left_out = 0


class StepTimes:
    """Times of recorded steps compared with times of steps that are left out, to find the true cost of recording.

    A step is everything that its thread does until the next step begins. The first steps after a recorded one find
    colder caches; their additional time counts as a cost of the recorded step.

    processor_ns : clock of the processor time that this thread has used
    """

    def __init__(self, processor_ns: Callable[[], int] = thread_time_ns) -> None:
        self._processor_ns = processor_ns
        self._here = _Here()
        self._recorded, self._after, self._left_out, self._reckoned = (RunningMean() for _ in range(4))
        self._reckoned_ns = 0.0

    @property
    def is_timing(self) -> bool:
        """True if the time of this thread's step is measured, so that the end of the step must be reported."""
        return self._here.since_ns is not None

    def begin(self, is_recorded: bool | None, measured_ns: float, reckoned_ns: float) -> None:
        """Note that this thread begins a step, or that it is now outside of all steps. Either ends its previous step.

        is_recorded : True if the step is recorded, False if it is left out of the recording; None if no step begins
        measured_ns : measured time of the capture's own work in the program's threads since the recording began
        reckoned_ns : estimated time of recording calls in all threads since the recording began
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

        It is the mean of a prior value and of the value measured on steps, weighted by their uncertainty.
        """
        reckoned, left_out = self._reckoned.mean, self._left_out
        if reckoned <= 0:
            return PRIOR
        dearer = [self._recorded, *[self._after] * AFTER]
        measured_ratio = sum(steps.mean - left_out.mean for steps in dearer) / reckoned
        doubt = sum(steps.error_squared + left_out.error_squared for steps in dearer) / reckoned**2
        weight = SPREAD**2 / (SPREAD**2 + doubt)
        return min(MOST, max(LEAST, PRIOR + weight * (measured_ratio - PRIOR)))
