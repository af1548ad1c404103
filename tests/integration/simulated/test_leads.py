"""Tests of how long the simulated accelerator is kept busy before a timed run, and of what is timed without it."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from settings import rows_of, settings_of
from simulation import on_simulator

from opgrip.capture import Capture
from opgrip.platform.contention import Contention
from opgrip.replay.cases.cases import make_cases
from opgrip.replay.cases.functions import function_case
from opgrip.replay.inputs.inputs import Inputs, device_map
from opgrip.replay.operators import devices
from opgrip.replay.replay_options import request_with
from opgrip.replay.reports.results_table import print_results
from opgrip.replay.run.workload import workload_for
from opgrip.replay.sequences.call_timers import sequence_settings
from opgrip.replay.sequences.step_replay import replay_sequence
from opgrip.replay.timing.rounds import FunctionGroup, Measurer
from opgrip.replay.timing.stopwatch import LaunchTime, Stopwatch
from opgrip.replay.timing.timed_functions import InputSet, TimedFunction
from opgrip.replay.timing.timing_options import EVENTS, GRAPH, Effort
from opgrip.traces import load
from opgrip.traces.schema.arguments import TensorSpec

DEVICE = "sim:0"
KERNEL_US = 2.0


def make_stopwatch(method: str = EVENTS) -> Stopwatch:
    devices.use_device(DEVICE)
    return Stopwatch(method, devices.synchronizer(DEVICE), 0.0, DEVICE)


def make_timed_function(function: Callable[..., Any]) -> TimedFunction:
    inputs = Inputs((TensorSpec((4,), (1,), torch.float32, DEVICE),), {}, {}, device_map(DEVICE, None), 0)
    inputs.keep()
    return TimedFunction(0, "tested", "eager", function, [InputSet([inputs])], False, fresh=None, result_bytes=0)


def run_timed(timed_function: TimedFunction, method: str = EVENTS, runs: int = 60) -> list[float]:
    """Time a timed_function and return the times in us."""
    effort = Effort(warmup=0, iterations=runs)
    measurer = Measurer(make_stopwatch(method), effort, None, lambda number, row: None)
    list(measurer.one_by_one([FunctionGroup({}, False, [timed_function])]))
    assert timed_function.failure is None
    return [run.time_ns / 1e3 for run in timed_function.runs]


@on_simulator(SIM_DURATIONS="aten::add=2", SIM_DEVICES="1")
def test_short_kernel_is_timed_without_its_launch() -> None:
    for method in (EVENTS, GRAPH):
        times = run_timed(make_timed_function(lambda x: x + 1), method, runs=100)
        # a host that is interrupted launches later than it did before
        assert sum(time <= KERNEL_US + 0.1 for time in times) >= 80, (method, sorted(times))


@on_simulator(SIM_DURATIONS="aten::sin=100;aten::neg=50;aten::add=100", SIM_DEVICES="1")
def test_saving_in_pairs_of_passes_is_by_the_clock_of_the_device(tmp_path: Path) -> None:
    x = torch.ones(3, device=DEVICE)
    with Capture(tmp_path / "t.jsonl"):
        for _ in range(3):
            x.sin()
            x + 1
    (tmp_path / "kernels.py").write_text("import torch\n\ndef sin(x):\n    return x.neg().neg().sin()\n")
    trace = load(tmp_path / "t.jsonl", partial=False)
    candidate = [f"aten.sin.default={tmp_path}/kernels.py:sin"]
    request = request_with(tmp_path / "t.jsonl", candidate=candidate, confirm=True, iterations=3)
    settings = sequence_settings(workload_for(request, trace))
    assert settings.in_pairs
    saved = replay_sequence(trace, settings).saved
    assert saved is not None
    # two negations take as long as a sine, which takes half of the step
    assert (saved.saving, saved.own_saving) == pytest.approx((-0.5, -0.5), abs=0.1)
    assert [share for _, share in saved.shares] == [pytest.approx(0.5, abs=0.1)]


@on_simulator(SIM_DEVICES="1")
def test_launches_longer_than_the_longest_lead_are_reported(tmp_path: Path) -> None:
    Contention.is_contended = Contention.is_run_contended = lambda *args, **kwargs: False
    x = torch.ones(3)
    with Capture(tmp_path / "t.jsonl"):
        x.nonzero()
    (waiting,) = make_cases(load(tmp_path / "t.jsonl", partial=False))

    def few(x: torch.Tensor) -> torch.Tensor:
        return x.sin().sin().sin()

    def many(x: torch.Tensor) -> torch.Tensor:
        for _ in range(3_000):
            x = x.sin()
        return x

    cases = [*(function_case(run, (x,), number=number) for number, run in enumerate([few, many], 1)), waiting]
    rows = rows_of(cases, settings_of(device=DEVICE, exec_mode=EVENTS, iterations=9))
    assert [(row.op.split(".")[-1], row.status, row.method) for row in rows] == [
        (name, "ok", EVENTS) for name in ("few", "many", "default")
    ]
    assert ["launch-bound" in row.doubts for row in rows] == [False, True, False]
    text = io.StringIO()
    print_results(rows, text)
    assert "launch-bound: the device waited for the host in most runs" in text.getvalue()


def test_launch_estimate_of_a_synchronizing_call_does_not_grow() -> None:
    launch = LaunchTime()
    expected = []
    for _ in range(100):
        launch.add(launch.ns + 30, True)
        expected.append(launch.ns)
    assert sorted(expected)[80] == 30
    assert max(expected) <= 90
    assert launch.is_waited_for
