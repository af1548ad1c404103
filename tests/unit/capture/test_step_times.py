"""Durations of recorded steps compared with others, which show the cost of recording a step."""

from __future__ import annotations

import threading
from itertools import cycle

import pytest

from opgrip.capture.timing.budget import ENOUGH, StepTimes


class Program:
    """Steps of a thread whose processor time a test sets."""

    def __init__(self) -> None:
        self.now = 0
        self.measured = 0.0
        self.times = StepTimes(lambda: self.now)

    def step(self, is_recorded: bool | None, took: int, measured: int = 0) -> None:
        self.times.begin(is_recorded, self.measured)
        self.now += took
        if is_recorded:
            self.measured += measured

    def end(self) -> float | None:
        self.times.begin(None, self.measured)
        return self.times.extra_ns()


def test_few_steps_show_no_cost() -> None:
    program = Program()
    for is_recorded in [True, False, False, False] * (ENOUGH - 1):
        program.step(is_recorded, 10_000 if is_recorded else 1_000)
    assert program.end() is None


@pytest.mark.parametrize(("recorded", "extra"), [(1_450, 200), (1_250, 0), (1_000, 0)])
def test_equal_steps_show_the_cost_of_recording(recorded: int, extra: float) -> None:
    program = Program()
    for is_recorded in [True, False, False, False] * ENOUGH:
        program.step(is_recorded, recorded if is_recorded else 1_000, measured=250)
    assert program.end() == pytest.approx(extra)


def test_work_between_steps_is_ignored() -> None:
    program = Program()
    for is_recorded in [True, None, False, None, False, None, False, None] * ENOUGH:
        program.step(is_recorded, {True: 1_200, False: 1_000, None: 77_777}[is_recorded])
    assert program.end() == pytest.approx(200)


def test_steps_are_timed_separately_for_each_thread() -> None:
    times = StepTimes()

    def steps() -> None:
        for is_recorded, _ in zip(cycle([True, False, False, False]), range(8 * ENOUGH), strict=False):
            times.begin(is_recorded, 0)
            sum(range(20_000 if is_recorded else 10_000))
        times.begin(None, 0)

    threads = [threading.Thread(target=steps) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 1.2 < times._recorded.mean / times._left_out.mean < 3


def test_delays_of_following_steps_count_for_the_recorded_step() -> None:
    program = Program()
    for took in [1_400, 1_100, 1_100, 1_000, 1_000] * ENOUGH:
        program.step(took == 1_400, took)
    assert program.end() == pytest.approx(600)
