"""Device times on the simulated accelerator, and how long it is kept busy before a timed run."""

import io
import json
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
from opgrip.replay.command.opreplay import main as opreplay
from opgrip.replay.command.run_requests import request_with
from opgrip.replay.inputs.inputs import Inputs, device_map
from opgrip.replay.operators import devices
from opgrip.replay.reports.results_table import print_results
from opgrip.replay.run.workload import workload_for
from opgrip.replay.sequences.call_timers import sequence_settings
from opgrip.replay.sequences.step_replay import replay_sequence
from opgrip.replay.timing.rounds import FunctionGroup, Measurer
from opgrip.replay.timing.stopwatch import LaunchTime, Stopwatch
from opgrip.replay.timing.timed_functions import InputSet, TimedFunction
from opgrip.replay.timing.timing_options import EVENTS, GRAPH, Effort
from opgrip.traces import Trace, load
from opgrip.traces.analysis.dataflow import make_graph
from opgrip.traces.analysis.longtail import find_longtail
from opgrip.traces.analysis.timeline import timeline
from opgrip.traces.schema.arguments import TensorSpec

SIN_NS = 5e6


def waves(x: torch.Tensor) -> torch.Tensor:
    y = x.sin() * 2
    y = y + 1
    return y.cos()


def capture_waves(path: Path) -> Trace:
    x, host = torch.ones(3, device="sim:0"), torch.rand(200, 200)
    with Capture(path):
        for _ in range(4):
            host = host @ host.softmax(1)
            waves(x)
    return load(path, partial=False)


@on_simulator(SIM_DURATIONS="aten::sin=5000")
def test_longtail_uses_device_time(tmp_path: Path) -> None:
    trace = capture_waves(tmp_path / "t.jsonl")
    longtail = find_longtail([trace], lambda trace: 1e12)
    item = next(item for item in longtail.functions if item.name == "waves")
    assert longtail.device_launches == item.launches == 16
    assert item.operator_ns >= 4 * SIN_NS > item.host_ns > 0
    assert item.between_ns == 0
    assert item.wall_ns == item.operator_ns


# long compared with host work on a busy machine
@on_simulator(SIM_DURATIONS="aten::sin=400000")
def test_critical_path_uses_device_time(tmp_path: Path) -> None:
    x, host = torch.ones(3, device="sim:0"), torch.rand(50, 50)
    with Capture(tmp_path / "t.jsonl"):
        x.sin()
        for _ in range(20):
            host = host.exp()
    graph = make_graph(load(tmp_path / "t.jsonl", partial=False))
    assert [graph.steps[number].op for number in graph.facts.critical_path] == ["aten.sin.default"]
    assert graph.facts.critical_ns >= 40 * SIN_NS > graph.facts.critical_host_ns


@on_simulator(SIM_DURATIONS="aten::sin=5000")
def test_timeline_has_a_device_track(tmp_path: Path) -> None:
    events = list(timeline(capture_waves(tmp_path / "t.jsonl")))
    on_device = [event for event in events if event.get("cat") == "device"]
    assert len(on_device) == 16
    assert all(event["dur"] >= SIN_NS / 1e3 for event in on_device if event["name"] == "aten.sin.default")
    ends = [event["ts"] + event["dur"] for event in on_device]
    assert all(event["ts"] >= end - 0.01 for event, end in zip(on_device[1:], ends[:-1], strict=True))
    (name,) = {event["args"]["name"] for event in events if event["tid"] == on_device[0]["tid"] and event["ph"] == "M"}
    assert name.startswith("device, by MainThread")


@on_simulator(SIM_DURATIONS="aten::sin=5000;aten::cos=3;aten::mul=3;aten::add=3", SIM_DEVICES="1")
def test_sequence_uses_device_time(tmp_path: Path) -> None:
    x = torch.ones(3, device="sim:0")
    with Capture(tmp_path / "t.jsonl"):
        for _ in range(3):
            waves(x)
    out = tmp_path / "sequence.json"
    assert opreplay([str(tmp_path / "t.jsonl"), "--sequence", "--iterations", "3", "-o", str(out)]) == 0
    result = json.loads(out.read_text())
    rows = {row["op"]: row for row in result["results"]}
    sin, cos = rows["aten.sin.default"], rows["aten.cos.default"]
    assert (sin["method"], sin["samples"], sin["count"]) == ("sequence", 9, 3)
    assert 5_000 <= sin["captured_us"] < 5_667
    assert 5_000 <= sin["median_us"] < 5_034
    assert sin["captured_host_us"] < 5_000
    assert sin["replayed_host_us"] < 5_000
    # a short call is timed without its launch
    assert 3 <= cos["median_us"] < 20
    passes = result["sequence"]["passes"]
    assert min(passes["replayed_ms"]) >= 15 > min(passes["replayed_host_ms"])


@on_simulator(SIM_DURATIONS="aten::copy_=700;aten::_copy_from=700")
def test_copies_and_new_tensors_have_device_times(tmp_path: Path) -> None:
    host, there = torch.rand(5), torch.rand(5, device="sim")
    with Capture(tmp_path / "t.jsonl"):
        for _ in range(3):
            host.to("sim")
            there.cpu()
            there.copy_(host)
            host.copy_(there)
            torch.ones(3, device="sim")
            with torch.device("sim"):
                torch.zeros(3)
            torch.tensor([1.0, 2.0], device="sim")
            there.new_ones(2)
    trace = load(tmp_path / "t.jsonl", partial=False)
    assert trace.calls["device_ns"].notna().all()


@pytest.mark.alone
@on_simulator(SIM_DURATIONS="aten::mm=20", SIM_CACHE=str(1 << 20))
def test_weights_are_in_the_cache_as_in_the_program(tmp_path: Path) -> None:
    small, large = torch.rand(2, 64, device="sim:0"), torch.rand(2, 256, device="sim:0")
    kept, streamed = torch.rand(64, 64, device="sim:0"), [torch.rand(256, 256, device="sim:0") for _ in range(8)]
    with Capture(tmp_path / "t.jsonl"):
        for _ in range(3):
            for number, weight in enumerate(streamed):
                large @ weight
                # so seldom that the large product is always the dearest
                if number % 2 == 0:
                    small @ kept
    for options in ([], ["--top", "1"], ["--exec-mode", "graph"]):
        out = tmp_path / "r.json"
        assert opreplay([str(tmp_path / "t.jsonl"), "--op", "aten.mm*", "-fo", str(out), *options]) == 0
        rows = {row["shapes"].split()[0]: row["median_us"] for row in json.loads(out.read_text())["results"]}
        assert 52 < rows["float32[2,256]"] < 53.1
        assert rows.get("float32[2,64]", 20) < 20.1


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
