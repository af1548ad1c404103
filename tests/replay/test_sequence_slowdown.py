"""Passes over a sequence during which others had the processors: made again within bounds, and else told of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from time import perf_counter_ns

import pytest
from others import busy_processors

from opgrip.replay.arguments.inputs import device_map
from opgrip.replay.cases.cases import make_cases
from opgrip.replay.measuring.results import Result
from opgrip.replay.measuring.settings import Plan
from opgrip.replay.reports.sequence import print_sequence
from opgrip.replay.sequences import slowdown
from opgrip.replay.sequences.rows import rows_of, totals_of
from opgrip.replay.sequences.sequence import MOST_DROPPED, SequenceResult, SequenceSettings, replay_sequence
from opgrip.replay.sequences.slowdown import Slowdown
from opgrip.replay.workers.job import settings_for
from opgrip.traces import load

MS = 1_000_000
SETTINGS = SequenceSettings(device_map("cpu", None), "cpu", repeats=3)


class Machine:
    """Whose processors others have at some of the times that it is asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = 0
        self.contended: Callable[[int], bool] = lambda asked: False
        machine = self

        class Contention:
            def is_contended(self) -> bool:
                machine.asked += 1
                return machine.contended(machine.asked)

            def close(self) -> None:
                pass

        class Pace:
            def is_slowed(self) -> bool:
                return False

        monkeypatch.setattr(slowdown, "Contention", Contention)
        monkeypatch.setattr(slowdown, "Pace", Pace)
        # a pass is asked before and after, and not in between
        monkeypatch.setattr(slowdown, "CHECK_NS", 1 << 62)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def replayed(path: Path, **changes: object) -> tuple[SequenceResult, list[Result]]:
    trace = load(path)
    result = replay_sequence(trace, replace(SETTINGS, **changes))  # type: ignore[arg-type]
    return result, rows_of(result, make_cases(trace), settings_for(Plan(), trace))


def shown(result: SequenceResult, rows: list[Result]) -> str:
    text = StringIO()
    print_sequence(result, rows, len(rows), text)
    return text.getvalue()


def test_passes_of_a_busy_machine_are_made_again(tiny_trace: Path, machine: Machine) -> None:
    machine.contended = lambda asked: asked in (2, 4)
    result, rows = replayed(tiny_trace)
    assert (result.repeats, result.dropped_passes, result.slowed_passes) == (3, 2, 0)
    assert {(row.samples, row.dropped, row.slowed) for row in rows} == {
        (3 * row.count, 2 * row.count, 0.0) for row in rows
    }
    assert totals_of(result)["dropped_passes"] == 2
    assert "others had the processors" not in shown(result, rows)


def test_a_machine_that_is_always_busy_is_measured_as_it_is_and_that_is_said(
    tiny_trace: Path, machine: Machine
) -> None:
    machine.contended = lambda asked: True
    result, rows = replayed(tiny_trace)
    assert (result.repeats, result.dropped_passes, result.slowed_passes) == (3, 3, 3)
    assert {(row.slowed, row.is_slowed) for row in rows} == {(1.0, True)}
    text = shown(result, rows)
    assert "3 of 3 passes: timed while others had the processors, so that times are doubtful" in text
    assert "ok, slowed" in text.replace("ok, noisy, slowed", "ok, slowed")
    result, _ = replayed(tiny_trace, repeats=None, precision=1e9)
    assert (result.repeats, result.dropped_passes) == (3, MOST_DROPPED)


def test_no_pass_is_made_again_when_the_budget_is_spent(tiny_trace: Path, machine: Machine) -> None:
    machine.contended = lambda asked: True
    result, _ = replayed(tiny_trace, repeats=None, budget_s=0.0)
    assert (result.repeats, result.dropped_passes, result.slowed_passes) == (3, 0, 3)


def test_the_machine_is_asked_outside_of_the_calls_clocks(
    tiny_trace: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slowdown, "CHECK_NS", 0)

    def spin(asked: int) -> bool:
        end = perf_counter_ns() + MS
        while perf_counter_ns() < end:
            pass
        return False

    machine.contended = spin
    result, _ = replayed(tiny_trace, repeats=1)
    assert machine.asked == result.calls + 2
    assert result.replayed_wall_ms[0] - result.replayed_ms[0] >= result.calls


def test_one_short_interruption_of_a_long_pass_does_not_count(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0
    monkeypatch.setattr(slowdown, "perf_counter_ns", lambda: now)
    monkeypatch.setattr(slowdown, "CHECK_NS", 10 * MS)

    def is_slowed(slowed_checks: int) -> bool:
        nonlocal now
        watch = Slowdown()
        watch.begin()
        first = machine.asked
        machine.contended = lambda asked: asked <= first + slowed_checks
        for _ in range(1000):
            now += MS
            watch.check()
        assert machine.asked == first + 100
        return watch.was_slowed()

    assert [is_slowed(checks) for checks in (0, 4, 6, 100)] == [False, False, True, True]


def test_other_programs_on_the_real_machine_are_seen(tiny_trace: Path) -> None:
    with busy_processors():
        results = (replayed(tiny_trace)[0] for _ in range(20))
        assert any(result.dropped_passes + result.slowed_passes for result in results)
