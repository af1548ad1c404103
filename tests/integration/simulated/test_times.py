"""Tests of device times on the simulated accelerator: calls that have them, and figures derived from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from simulation import on_simulator

from opgrip.capture import Capture
from opgrip.replay.command.opreplay import main as opreplay
from opgrip.traces import Trace, load
from opgrip.traces.analysis.dataflow import make_graph
from opgrip.traces.analysis.longtail import find_longtail
from opgrip.traces.analysis.timeline import timeline

SIN_NS = 5e6


def waves(x: torch.Tensor) -> torch.Tensor:
    y = x.sin() * 2
    y = y + 1
    return y.cos()


def capture_waves(path: Path) -> Trace:
    """Capture host work, followed by waves on the device."""
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
