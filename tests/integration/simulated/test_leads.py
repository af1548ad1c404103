"""Tests of how long the simulated accelerator is kept busy before a timed run, and of what is timed without it."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from capture_truth import captured_times
from kernel_records import DURATIONS, ProfileOnCpu
from settings import rows_of, settings_of
from simulation import on_simulator
from workloads import make_on, restart, tiny_operators

from opgrip.capture import Capture
from opgrip.platform import activity_records
from opgrip.platform.contention import Contention
from opgrip.replay.cases.cases import make_cases
from opgrip.replay.cases.functions import function_case
from opgrip.replay.cases.preceding_calls import make_preceding_calls
from opgrip.replay.inputs.inputs import Inputs, device_map
from opgrip.replay.operators import devices
from opgrip.replay.replay_options import request_with
from opgrip.replay.reports.results_table import print_results
from opgrip.replay.run import measure
from opgrip.replay.run.kernels import KernelColumns
from opgrip.replay.run.request import RunRequest
from opgrip.replay.run.workload import workload_for
from opgrip.replay.sequences.call_timers import Slowdown, sequence_settings
from opgrip.replay.sequences.step_replay import replay_sequence
from opgrip.replay.timing import stopwatch
from opgrip.replay.timing.ranges import Range
from opgrip.replay.timing.rounds import FunctionGroup, Measurer
from opgrip.replay.timing.stopwatch import LEAD_MARGIN_NS, MOST_LEAD_NS, LaunchTime, Stopwatch
from opgrip.replay.timing.timed_functions import InputSet, TimedFunction
from opgrip.replay.timing.timing_options import EVENTS, GRAPH, Effort
from opgrip.traces import load
from opgrip.traces.schema.arguments import TensorSpec, tensors

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


@contextmanager
def recorded_leads() -> Iterator[list[float]]:
    """Record for how many us the device is kept busy."""
    leads, delay = list[float](), stopwatch.delay

    def recording(device: str, duration_us: float) -> None:
        leads.append(duration_us)
        delay(device, duration_us)

    stopwatch.delay = recording
    try:
        yield leads
    finally:
        stopwatch.delay = delay


@on_simulator(SIM_DURATIONS="aten::add=2", SIM_DEVICES="1")
def test_short_kernel_is_timed_without_its_launch() -> None:
    for method in (EVENTS, GRAPH):
        times = run_timed(make_timed_function(lambda x: x + 1), method, runs=100)
        # a host that is interrupted launches later than it did before
        assert sum(time <= KERNEL_US + 0.1 for time in times) >= 80, (method, sorted(times))


@on_simulator(SIM_DURATIONS="aten::add=2", SIM_DEVICES="1")
def test_device_is_kept_busy_longer_than_the_last_launch() -> None:
    launch_ns, watch = 300e3, make_stopwatch()
    x = torch.ones(4, device=DEVICE)
    with recorded_leads() as leads:
        watch.time(lambda: x + 1, [((), {})], Range("m", "c", 0), LaunchTime(launch_ns))
    assert leads == [(launch_ns + LEAD_MARGIN_NS) / 1e3]


@on_simulator(SIM_DEVICES="1")
def test_delay_lasts_as_requested_on_a_faster_clock() -> None:
    devices.use_device(DEVICE)
    torch.sim.NS_PER_CYCLE = 0.3
    before, after = (devices.make_event(DEVICE) for _ in range(2))
    stream = devices.current_stream(DEVICE)
    devices.delay(DEVICE, 1.0)
    before.record(stream)
    devices.delay(DEVICE, 5_000.0)
    after.record(stream)
    after.synchronize()
    assert 4.99 <= before.elapsed_time(after) < 6


@on_simulator(SIM_DURATIONS="aten::nonzero=20;aten::add=20", SIM_DEVICES="1")
def test_lead_of_a_synchronizing_call_does_not_grow() -> None:
    with recorded_leads() as leads:
        run_timed(make_timed_function(lambda x: (x + 1).sum().item()))
    assert len(leads) >= 60
    assert median(leads[10:]) <= leads[0]


@on_simulator(SIM_DURATIONS="aten::sin=20000;aten::add=3", SIM_DEVICES="1")
def test_step_replay_does_not_lead_for_the_wait_of_a_call(tmp_path: Path) -> None:
    x = torch.ones(3, device=DEVICE)
    with Capture(tmp_path / "t.jsonl"):
        for _ in range(3):
            x.sin()
            (x + 1).sum().item()
    trace = load(tmp_path / "t.jsonl", partial=False)
    Slowdown.is_slowed = Slowdown.is_contended = False
    with recorded_leads() as leads:
        replay_sequence(trace, replace(sequence_settings(workload_for(RunRequest(), trace)), repeats=3))
    # the wait of every fourth call for the sine is not in its launch
    assert len(leads) % 12 == 0
    assert 0 < median(leads[3::4]) < MOST_LEAD_NS / 1e3


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
def test_events_are_created_once() -> None:
    made, make_event = list[object](), devices.make_event
    stopwatch.make_event = lambda device: made.append(device) or make_event(device)
    run_timed(make_timed_function(lambda x: x + 1), runs=10)
    assert len(made) == 2


@on_simulator(SIM_DEVICES="1")
def test_timed_runs_reserve_no_device_memory() -> None:
    reserved: list[int] = []

    def run(x: torch.Tensor) -> torch.Tensor:
        before = torch.sim.memory_reserved()
        result = x.new_empty(1 << 22)
        reserved.append(torch.sim.memory_reserved() - before)
        return result

    for in_rounds in (False, True):
        timed_function = make_timed_function(run)
        torch.sim.empty_cache()
        reserved.clear()
        measurer = Measurer(make_stopwatch(), Effort(warmup=0, iterations=4), None, lambda number, row: None)
        list((measurer.in_rounds if in_rounds else measurer.one_by_one)([FunctionGroup({}, False, [timed_function])]))
        assert len(timed_function.runs) == 4
        assert reserved[0] > 0
        assert not any(reserved[-4:])


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


@on_simulator(SIM_DEVICES="1")
def test_kernel_columns_of_rows_timed_by_events(tmp_path: Path) -> None:
    activity_records.ActivityProfile = ProfileOnCpu  # type: ignore[assignment, misc]
    measure.records_work = lambda device: True
    x = torch.ones(9, device=DEVICE)
    with Capture(tmp_path / "t.jsonl"):
        x.cos()
        x.sin()
        x.view(3, 3)
    trace = load(tmp_path / "t.jsonl", partial=False)

    def many(x: torch.Tensor) -> torch.Tensor:
        return x.sin().sin().cos()

    of_trace = make_cases(trace)
    cases = [*of_trace, function_case(many, (x,), number=9)]
    before = make_preceding_calls(trace, of_trace, of_trace)
    rows = rows_of(cases, settings_of(device=DEVICE, exec_mode=EVENTS, iterations=9), before)
    counts = {row.op.split(".")[-1 if row.case == 9 else 1]: KernelColumns.of(row) for row in rows}
    sin, cos = DURATIONS["aten::sin"] / 1e3, DURATIONS["aten::cos"] / 1e3
    # kernels of the preceding calls are not counted
    assert {op: (own.kernels, own.launches, own.gpu_us) for op, own in counts.items()} == {
        "cos": (1, 1, cos),
        "sin": (1, 1, sin),
        "view": (0, 0, 0.0),
        "many": (3, 3, pytest.approx(2 * sin + cos)),
    }
    many_columns = counts["many"]
    assert many_columns.kernel_names == "aten::sin_kernel x2; aten::cos_kernel x1"
    assert many_columns.launch_gap_us


@on_simulator(SIM_DEVICES="1")
def test_benchmarked_programs_run_on_the_device(tmp_path: Path) -> None:
    step = make_on("sim", tiny_operators)
    assert step is not None
    restart(step)
    with Capture(tmp_path / "t.jsonl"):
        step()
    tensors_of = {spec.device for item in load(tmp_path / "t.jsonl").signatures for spec in tensors(item.args)}
    assert tensors_of == {DEVICE}
    times = captured_times(step)
    assert times["aten::mul"]


def test_next_launch_may_take_as_long_as_a_slow_one() -> None:
    launch = LaunchTime()
    # the device is not kept busy before the first one
    for launch_ns, outlasts in [(50, True), (90, True), (88, False), (120, True), (85, False)]:
        launch.add(launch_ns, outlasts)
        assert launch.ns == launch_ns


def test_launch_estimate_of_a_synchronizing_call_does_not_grow() -> None:
    launch = LaunchTime()
    expected = []
    for _ in range(100):
        launch.add(launch.ns + 30, True)
        expected.append(launch.ns)
    assert sorted(expected)[80] == 30
    assert max(expected) <= 90
    assert launch.is_waited_for


def test_launch_estimate_follows_slower_launches() -> None:
    launch = LaunchTime()
    for launch_ns in [50, *[90] * 50]:
        launch.add(launch_ns, launch_ns > launch.ns + 20)
    assert launch.ns == 90
    assert not launch.is_waited_for
