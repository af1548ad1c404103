"""Durations of recorded steps compared with others, which show the true cost of a recorded call."""

from __future__ import annotations

import random
import threading
from itertools import cycle

import pytest

from opgrip.capture.timing.budget import ENOUGH, LEAST, MOST, PRIOR, StepTimes

RECKONED = 100


class Program:
    """Steps of a thread whose processor time a test sets."""

    def __init__(self) -> None:
        self.now = 0
        self.measured = self.reckoned = 0.0
        self.times = StepTimes(lambda: self.now)

    def step(self, is_recorded: bool | None, took: int, measured: int = 0) -> None:
        self.times.begin(is_recorded, self.measured, self.reckoned)
        self.now += took
        if is_recorded:
            self.measured += measured
            self.reckoned += RECKONED

    def end(self) -> float:
        self.times.begin(None, self.measured, self.reckoned)
        return self.times.factor


def test_few_steps_keep_the_default_cost_factor() -> None:
    program = Program()
    for is_recorded in [True, False, False, False] * (ENOUGH - 1):
        program.step(is_recorded, 10_000 if is_recorded else 1_000)
    assert program.end() == PRIOR


@pytest.mark.parametrize(("recorded", "factor"), [(1_450, 2), (1_300, 1), (1_000, LEAST), (9_000, MOST)])
def test_equal_steps_show_the_cost_factor_of_recording(recorded: int, factor: float) -> None:
    program = Program()
    for is_recorded in [True, False, False, False] * ENOUGH:
        program.step(is_recorded, recorded if is_recorded else 1_000, measured=200 if recorded < 1_400 else 250)
    assert program.end() == pytest.approx(factor)


def test_work_between_steps_is_ignored() -> None:
    program = Program()
    for is_recorded in [True, None, False, None, False, None, False, None] * ENOUGH:
        program.step(is_recorded, {True: 1_200, False: 1_000, None: 77_777}[is_recorded])
    assert program.end() == pytest.approx(2)


def test_widely_varying_steps_change_the_cost_factor_little() -> None:
    draw = random.Random(0)
    program = Program()
    for is_recorded in [True, False, False, False] * 100:
        program.step(is_recorded, draw.randrange(1_000, 100_000))
    assert program.end() == pytest.approx(PRIOR, abs=0.5)


def test_many_varying_steps_determine_the_cost_factor() -> None:
    draw = random.Random(0)
    program = Program()
    for is_recorded in [True, False, False, False] * 200:
        program.step(is_recorded, draw.randrange(900, 1_100) + 150 * is_recorded)
    assert program.end() == pytest.approx(1.5, abs=0.5)


def test_steps_are_timed_separately_for_each_thread() -> None:
    times = StepTimes()

    def steps() -> None:
        for is_recorded, _ in zip(cycle([True, False, False, False]), range(8 * ENOUGH), strict=False):
            times.begin(is_recorded, 0, 0)
            sum(range(20_000 if is_recorded else 10_000))
        times.begin(None, 0, 0)

    threads = [threading.Thread(target=steps) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 1.2 < times._recorded.mean / times._left_out.mean < 3


def test_delays_of_following_steps_count_for_the_recorded_step() -> None:
    program = Program()
    for took in [1_400, 1_100, 1_100, 1_000, 5_000] * ENOUGH:
        program.step(took == 1_400, took)
    assert program.end() == pytest.approx(6)
