"""What recorded steps take of the processor beyond others of the program, beside what was reckoned for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from math import inf
from time import thread_time_ns

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
