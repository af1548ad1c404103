"""Limit on the share of a program's time that a capture takes: steps that would exceed it are left out."""

from __future__ import annotations

import threading
from collections.abc import Callable

from opgrip.platform import perf_counter_ns, thread_time_ns

BURST_S = 20.0  # a capture may spend at once what its share allows in this time in seconds; it starts with this credit
# part of the share that is spent, because up to a third of the extra time of recorded steps appeared in no measurement
MARGIN = 0.65
CALL_NS = 15_000  # approximate cost in ns of a recorded call, used until the cost of a recorded step is measured
MEMORY = 64  # approximate number of recent steps that a mean covers
INTEGERS = 7  # approximate number of integers that are stored per call until it is counted
ENOUGH = 8  # number of steps of each kind that are required before their mean is used
# number of steps that a preceding recorded step slows down. Measured with a transformer's steps of 0.55 ms: the first
# two took 0.11 and 0.03 ms longer, the third 0.02 ms
AFTER = 2


class Budget:
    """Decides which steps are recorded, so that the capture keeps to its share of the program's time."""

    def __init__(
        self,
        share: float,
        measured_ns: Callable[[], float],
        waiting: Callable[[], int],
        now_ns: Callable[[], int] = perf_counter_ns,
    ) -> None:
        self.share = share
        self._measured_ns, self._waiting, self._now_ns = measured_ns, waiting, now_ns
        self._earned, self._most_ns = MARGIN * share, share * BURST_S * 1e9
        self.begin()

    def begin(self) -> None:
        # in a forked process, another thread of the parent may have held the lock
        self._lock = threading.Lock()
        self.left_out = self.calls = self.writing_ns = 0
        self._steps, self._recorded, self._checking_ns = StepTimes(), 0, 0
        self._of_calls_ns, self._counted_calls, self._counted_steps = 0.0, self._waiting() / INTEGERS, 0
        self._credit_ns = self._most_ns
        self._last_ns, self._last_spent_ns = self._now_ns(), self.spent_ns()
        self._rests_until_ns = self._last_ns

    def spent_ns(self) -> float:
        """Return the estimated time by which the capture, with its writing thread, has slowed the program."""
        extra_ns = self._steps.extra_ns()
        calls = self.calls + self._waiting() / INTEGERS
        # a later estimate does not change the cost of earlier steps
        if extra_ns is None:
            self._of_calls_ns += CALL_NS * (calls - self._counted_calls)
        else:
            self._of_calls_ns += extra_ns * (self._recorded - self._counted_steps)
        self._counted_calls, self._counted_steps = calls, self._recorded
        return self._measured_ns() + self._checking_ns + self.writing_ns + self._of_calls_ns

    def update(self) -> None:
        with self._lock:
            now, spent = self._now_ns(), self.spent_ns()
            earned = self._earned * (now - self._last_ns)
            self._credit_ns = min(self._most_ns, self._credit_ns + earned - (spent - self._last_spent_ns))
            self._last_ns, self._last_spent_ns = now, spent
            self._rests_until_ns = now - int(min(0.0, self._credit_ns) / self._earned)

    def leaves_out_step(self) -> bool:
        if self.passes_step():
            return True
        began = self._now_ns()
        self.update()
        is_left_out = self._credit_ns < 0
        self.left_out += is_left_out
        self._recorded += not is_left_out
        self._checking_ns += self._now_ns() - began
        self._steps.begin(not is_left_out, self._measured_ns())
        return is_left_out

    def passes_step(self) -> bool:
        """Return True if the step that begins now is left out."""
        if self._now_ns() >= self._rests_until_ns or self._steps.is_timing:
            return False
        self.left_out += 1
        return True

    def leave_steps(self) -> None:
        self._steps.begin(None, self._measured_ns())

    @property
    def is_overdrawn(self) -> bool:
        return self._credit_ns < -self._most_ns


class RunningMean:
    def __init__(self) -> None:
        self.count, self.mean = 0, 0.0

    def add(self, value: float) -> None:
        self.count += 1
        self.mean += (value - self.mean) / min(self.count, MEMORY)


class _Here(threading.local):
    since_ns: int | None = None
    measured_ns = 0.0
    steps: RunningMean
    left_out = 0


class StepTimes:
    """Compares times of recorded steps with times of steps that are left out."""

    def __init__(self, processor_ns: Callable[[], int] = thread_time_ns) -> None:
        self._processor_ns = processor_ns
        self._here = _Here()
        # the first steps after a recorded one find colder caches
        self._recorded, self._after, self._left_out = RunningMean(), RunningMean(), RunningMean()

    @property
    def is_timing(self) -> bool:
        return self._here.since_ns is not None

    def begin(self, is_recorded: bool | None, measured_ns: float) -> None:
        here, now = self._here, self._processor_ns()
        if here.since_ns is not None:
            here.steps.add(now - here.since_ns - (measured_ns - here.measured_ns))
        here.since_ns = None
        if is_recorded is None:
            return
        if is_recorded:
            here.left_out, here.steps = 0, self._recorded
        else:
            here.left_out += 1
            if here.left_out > AFTER + 1 and self._left_out.count >= ENOUGH:
                return
            here.steps = self._after if here.left_out <= AFTER else self._left_out
        here.since_ns, here.measured_ns = self._processor_ns(), measured_ns

    def extra_ns(self) -> float | None:
        if min(self._recorded.count, self._left_out.count) < ENOUGH or self._after.count < AFTER:
            return None
        extra_ns = self._recorded.mean + AFTER * self._after.mean - (1 + AFTER) * self._left_out.mean
        return max(0.0, extra_ns)
