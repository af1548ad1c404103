"""Tests of capture budgets: calls are left out that would exceed the limits of time or memory."""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path
from time import perf_counter_ns

import pytest
import torch
from programs import run_command
from torch import nn

from opgrip.capture import Capture
from opgrip.capture.command.opcapture import closing_lines
from opgrip.capture.on_demand.protocol import RecordingRequest
from opgrip.capture.on_demand.session import RecordingSession
from opgrip.capture.on_demand.settings import AgentSettings
from opgrip.capture.timing.budget import BURST_S, ENOUGH, Budget, StepTimes
from opgrip.capture.writing.flusher import INTERVAL_S
from opgrip.cli.option_types import percent
from opgrip.replay import replay
from opgrip.traces import load

SHARE = 0.1
WHOLE_NS = SHARE * BURST_S * 1e9  # budget with which a capture begins, in ns


@pytest.fixture
def spend(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return a function that sets the share of the initial budget that captures have used."""
    spent = [0.0]
    monkeypatch.setattr(Budget, "spent_ns", lambda self: spent[0] * WHOLE_NS)

    def spend(part: float) -> None:
        spent[0] = part

    return spend


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 4))).eval()


def test_budget_recovers_over_time_up_to_the_initial_burst(spend: Callable[[float], None]) -> None:
    now_ns = 0
    budget = Budget(SHARE, lambda: 0, lambda: 0, lambda: now_ns)
    assert not budget.leaves_out_step()
    spend(1.1)
    assert [budget.leaves_out_step() for _ in range(5)] == [True] * 5
    now_ns += int(0.2 * BURST_S * 1e9)
    assert not budget.leaves_out_step()
    now_ns += int(100 * BURST_S * 1e9)
    budget.update()
    spend(2.2)
    assert budget.leaves_out_step()
    assert not budget.is_overdrawn
    spend(3.2)
    budget.update()
    assert budget.is_overdrawn
    assert budget.left_out == 6
    spend(0.0)
    budget.begin()
    assert (budget.leaves_out_step(), budget.left_out) == (False, 0)


def test_capture_over_budget_omits_whole_steps_and_reports_it(tmp_path: Path, spend: Callable[[float], None]) -> None:
    path, model = tmp_path / "t.jsonl", small_model()
    with torch.no_grad(), Capture(path, max_overhead=SHARE) as capture:
        for step in range(6):
            spend((0.0, 1.5, 0.6, 0.6, 0.0, 0.0)[step])
            model(torch.ones(2, 4))
            capture.step()
    trace = load(path, partial=False)
    assert trace.end is not None
    assert trace.end.thinned == {"steps": 1}
    assert "1 step left out, to take at most 0.1 of the time" in closing_lines(capture)
    assert list(trace.calls["op"]).count("aten.relu.default") == 5
    shown = run_command("opgrip", "trace", "info", path)
    assert "steps 1 time, due to --max-overhead" in " ".join(shown.stdout.split())
    assert set(replay(path, iterations=1, warmup=0).frame["status"]) == {"ok"}


def test_max_overhead_warns_if_the_program_marks_no_steps(tmp_path: Path, spend: Callable[[float], None]) -> None:
    with pytest.warns(RuntimeWarning, match=r"call step\(\)"), Capture(tmp_path / "t.jsonl", max_overhead=SHARE) as it:
        torch.ones(2).neg()
        spend(2.5)
        it.step()
    assert it.calls == 2


def test_on_demand_recording_over_budget_omits_steps(tmp_path: Path, spend: Callable[[float], None]) -> None:
    model = small_model()
    settings = AgentSettings("tested", str(tmp_path / "t-%n.jsonl"))
    request = RecordingRequest(steps=2, warmup=0, options={"max_overhead": SHARE})
    with ThreadPoolExecutor(1) as pool, torch.no_grad():
        session = RecordingSession(settings, request, 1, perf_counter_ns())
        session.begin()
        running = pool.submit(session.finish, lambda why: None)
        spend(1.5)
        for step in range(5):
            if step == 3:
                spend(0.0)
                # wait for a check by the writing thread
                time.sleep(1.5 * INTERVAL_S)
            model(torch.ones(2, 4))
        result = running.result()
    assert (result["steps"], result["problem"]) == (2, None)
    end = load(result["file"], partial=False).end
    assert end is not None
    assert end.thinned["steps"] == 3


def test_memory_limit_ends_the_recording_and_not_the_program(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with Capture(path, max_memory=1 << 20) as capture:
        sizes = [torch.ones(size).neg().numel() for size in range(1, 400)]
        capture._write_now()
        torch.ones(500).neg()
    assert sizes[-1] == 399
    assert capture.stopped == f"{1 << 20} bytes of memory"
    trace = load(path, partial=False)
    assert trace.end is not None
    assert trace.end.stopped == capture.stopped
    assert (500,) not in {spec.shape for item in trace.signatures for spec in item.args if hasattr(spec, "shape")}


def test_overhead_option_takes_a_fraction_or_a_percentage() -> None:
    assert percent("5%") == percent("0.05") == 0.05
    for text in ("0%", "101%", "5", "x%", "nan"):
        with pytest.raises(argparse.ArgumentTypeError):
            percent(text)


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
