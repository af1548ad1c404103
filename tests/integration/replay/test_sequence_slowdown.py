"""Tests of calls in a step replay during contention: repeated within bounds, or marked as contended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from time import perf_counter_ns

import pytest

from opgrip.replay.cases.cases import make_cases
from opgrip.replay.inputs.inputs import device_map
from opgrip.replay.reports.step_report import print_sequence
from opgrip.replay.results.results import Result
from opgrip.replay.run.request import RunRequest
from opgrip.replay.run.workload import workload_for
from opgrip.replay.sequences import call_timers as slowdown
from opgrip.replay.sequences.call_timers import SequenceSettings, Slowdown
from opgrip.replay.sequences.step_options import rows_of, totals_of
from opgrip.replay.sequences.step_replay import MOST_DROPPED, SequenceResult, replay_sequence
from opgrip.traces import load

MS = 1_000_000
SETTINGS = SequenceSettings(device_map("cpu", None), "cpu", repeats=3)


class Machine:
    """Machine with contention at some of the queried times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = self.looks = 0
        self.quiet_after: int | None = 0
        self.slowed = False
        self.contended: Callable[[int], bool] = lambda asked: False
        machine = self

        class Contention:
            is_shared = False

            @property
            def has_room(self) -> bool:
                machine.looks += 1
                return machine.quiet_after is not None and machine.looks > machine.quiet_after

            def is_contended(self) -> bool:
                machine.asked += 1
                return machine.contended(machine.asked)

            def close(self) -> None:
                pass

        class Pace:
            def is_slowed(self) -> bool:
                return machine.slowed

        monkeypatch.setattr(slowdown, "Contention", Contention)
        monkeypatch.setattr(slowdown, "Pace", Pace)
        # check before and after a pass only
        monkeypatch.setattr(slowdown, "CHECK_NS", 1 << 62)
        monkeypatch.setattr(slowdown, "WATCHFUL_NS", 0)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def replayed(path: Path, **changes: object) -> tuple[SequenceResult, list[Result]]:
    trace = load(path)
    result = replay_sequence(trace, replace(SETTINGS, **changes))  # type: ignore[arg-type]
    return result, rows_of(result, make_cases(trace), workload_for(RunRequest(), trace))


def shown(result: SequenceResult, rows: list[Result]) -> str:
    text = StringIO()
    print_sequence(result, rows, len(rows), text)
    return text.getvalue()


def test_contended_passes_are_repeated(tiny_trace: Path, machine: Machine) -> None:
    machine.contended = lambda asked: asked in (2, 4)
    result, rows = replayed(tiny_trace)
    assert (result.repeats, result.dropped_passes, result.slowed_passes) == (3, 2, 0)
    assert {(row.samples, row.dropped, row.slowed) for row in rows} == {
        (3 * row.count, 2 * row.count, 0.0) for row in rows
    }
    assert totals_of(result)["dropped_passes"] == 2
    assert "contended" not in shown(result, rows)


def test_step_with_only_contended_passes_is_contended(tiny_trace: Path, machine: Machine) -> None:
    machine.contended = lambda asked: True
    result, rows = replayed(tiny_trace)
    assert (result.repeats, result.dropped_passes, result.is_contended) == (3, 0, True)
    assert {(row.status, row.stopped, row.slowed, row.samples) for row in rows} == {
        ("contended", "contended", 1.0, 3 * row.count) for row in rows
    }
    assert all(row.median_us for row in rows)
    totals = totals_of(result)
    assert totals["is_contended"]
    assert totals["replayed_ms"] is totals["replayed_wall_p90_ms"] is totals["replayed_critical_ms"] is None
    assert len(totals["passes"]["replayed_ms"]) == 3
    text = shown(result, rows)
    assert "in these calls, replayed contended (3 passes)" in text
    assert text.count("replayed contended") == 3
    assert "the step is contended: other processes used the cores in all passes, so its time is not used: " in text
    assert f"{len(rows)} rows are contended: " in text
    result, _ = replayed(tiny_trace, repeats=None, precision=1e9)
    assert (result.repeats, result.is_contended) == (MOST_DROPPED, True)


def test_clean_calls_in_contended_passes_count(
    tiny_trace: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slowdown, "CHECK_NS", 0)
    # however long half of the calls take
    monkeypatch.setattr(slowdown, "SHARE", 0.0)
    signatures = load(tiny_trace).own_calls["signature"].tolist()
    half = len(signatures) // 2
    # calls of the last signature, and calls directly after them, which also count as contended
    always = {place for place, signature in enumerate(signatures) if signature == signatures[-1]}
    contended = set(signatures) - {
        signature for place, signature in enumerate(signatures) if place not in always and place - 1 not in always
    }

    def is_contended(asked: int) -> bool:
        # checked before the first call, after each call, and at the end of a pass
        number, place = divmod(asked - 1, len(signatures) + 2)
        return place - 1 in always or (place > half + 1 if number % 2 else place <= half)

    machine.contended = is_contended
    result, rows = replayed(tiny_trace, repeats=6)
    assert (result.repeats, result.is_contended) == (6, True)
    assert {row.case for row in rows if row.status == "contended"} == contended
    assert {(row.status, row.slowed) for row in rows if row.case not in contended} == {("ok", 0.0)}
    assert all(row.dropped + row.samples == 6 * row.count for row in rows)


def test_contended_pass_is_repeated_when_the_machine_is_quiet(tiny_trace: Path, machine: Machine) -> None:
    machine.quiet_after = 3
    machine.contended = lambda asked: machine.looks <= 3
    result, rows = replayed(tiny_trace)
    assert machine.looks == 4
    assert (result.repeats, result.dropped_passes, result.is_contended) == (3, 1, False)
    assert {row.status for row in rows} == {"ok"}


def test_waiting_for_a_quiet_machine_is_limited(tiny_trace: Path, machine: Machine) -> None:
    machine.quiet_after = None
    machine.contended = lambda asked: True
    result, _ = replayed(tiny_trace, repeats=None, budget_s=0.2)
    assert (result.repeats, result.is_contended) == (3, True)
    assert 1 <= machine.looks <= 10


def test_permanently_slow_processor_is_measured_and_reported(tiny_trace: Path, machine: Machine) -> None:
    machine.slowed = True
    result, rows = replayed(tiny_trace)
    assert (result.repeats, result.dropped_passes, result.slowed_passes) == (3, 3, 3)
    assert {(row.status, row.slowed, row.is_slowed) for row in rows} == {("ok", 1.0, True)}
    text = shown(result, rows)
    assert "3 of 3 passes: timed while the processor was slowed down, so that times are doubtful" in text
    assert "ok, slowed" in text.replace("ok, noisy, slowed", "ok, slowed")


def test_processes_of_one_step_do_not_contend_with_each_other(machine: Machine) -> None:
    machine.contended = lambda asked: True
    for processes, is_contended in ((1, True), (1000, False)):
        watch = Slowdown(processes)
        watch.begin()
        watch.check()
        watch.end()
        assert (watch.is_slowed, watch.is_contended, 0 in watch.contended_calls) == (True, is_contended, is_contended)


def test_passes_are_not_repeated_beyond_the_budget(tiny_trace: Path, machine: Machine) -> None:
    machine.contended = lambda asked: True
    result, _ = replayed(tiny_trace, repeats=None, budget_s=0.0)
    assert (result.repeats, result.dropped_passes, result.is_contended) == (3, 0, True)


def test_contention_is_checked_outside_of_timed_calls(
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


def test_short_interruption_of_a_long_pass_does_not_count(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
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
        watch.end()
        assert len(watch.contended_calls) == min(10 * slowed_checks + 1, 1001) * bool(slowed_checks)
        return watch.is_contended

    assert [is_slowed(checks) for checks in (0, 4, 6, 100)] == [False, False, True, True]
