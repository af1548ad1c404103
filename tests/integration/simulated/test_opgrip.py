"""Tests of opgrip on the simulated accelerator: successes, and the failures expected on a GPU."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from time import perf_counter
from typing import Any

import pandas as pd
import pytest
import torch
from simulation import on_simulator
from torch import nn

from opgrip.capture import Capture
from opgrip.platform import peaks
from opgrip.replay.analyses.roofline import measuring
from opgrip.replay.command.opreplay import main as opreplay
from opgrip.traces import load
from opgrip.traces.schema.arguments import tensors

LONG_US = 300_000.0


def capture_layers(path: Path, device: str = "sim:0") -> Capture:
    """Capture a forward and backward pass."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).to(device)
    images, labels = torch.randn(5, 4).to(device), torch.tensor([0, 1, 0, 1, 1]).to(device)
    with Capture(path) as capture:
        nn.functional.cross_entropy(model(images), labels).backward()
    return capture


def replay_rows(trace: Path, *options: str) -> list[dict[str, Any]]:
    """Return the rows of a quick replay."""
    out = trace.with_suffix(".rows.json")
    assert opreplay([str(trace), "--budget", "0.01", "-o", str(out), *options]) == 0
    rows: list[dict[str, Any]] = json.loads(out.read_text())["results"]
    return rows


@on_simulator()
def test_results_of_the_device_are_compared_with_those_of_the_cpu(tmp_path: Path) -> None:
    capture_layers(tmp_path / "t.jsonl")
    x = torch.ones(4, device="sim:0")
    with Capture(tmp_path / "written.jsonl"):
        x.add_(x), torch.arange(3, device="sim:0"), x.sort()
    for name, *options in (("t", "--backward"), ("written",)):
        rows = replay_rows(tmp_path / f"{name}.jsonl", "--reference", "cpu", *options)
        assert {row["mode"] for row in rows} == {"cpu", "eager"}
        assert not {"wrong", "failed"} & {row["status"] for row in rows}, [row["error"] for row in rows]


@on_simulator()
def test_capture_on_the_device_has_all_calls(tmp_path: Path) -> None:
    capture = capture_layers(tmp_path / "t.jsonl")
    trace = load(tmp_path / "t.jsonl", partial=False)
    assert capture.dropped == 0
    # the program had started the device before the capture
    assert "sim:1" in json.loads((tmp_path / "t.jsonl").read_text().splitlines()[0])["accelerator"]["devices"]
    assert {"forward", "backward"} <= set(trace.calls["phase"])
    assert list(trace.calls["op"]).count("aten.addmm.default") == 2
    devices = {spec.device for signature in trace.signatures for spec in tensors([signature.args, signature.kwargs])}
    assert devices == {"sim:0"}


@on_simulator(PYTORCH_ALLOC_CONF="expandable_segments:True")
def test_trace_and_results_describe_the_device_and_its_settings(tmp_path: Path) -> None:
    with Capture(tmp_path / "t.jsonl"):
        torch.ones(3, device="sim:1").sin()
    trace = load(tmp_path / "t.jsonl", partial=False)
    header = trace.header
    assert not trace.unknown
    assert list(header["accelerator"]["devices"]) == ["sim:0", "sim:1"]
    assert header["accelerator"]["devices"]["sim:1"]["l2_bytes"] > 0
    out = tmp_path / "rows.json"
    assert opreplay([str(tmp_path / "t.jsonl"), "--budget", "0.01", "-o", str(out)]) == 0
    accelerator = json.loads(out.read_text())["accelerator"]
    assert list(accelerator["devices"]) == ["sim:1"]
    assert accelerator["devices"]["sim:1"] == header["accelerator"]["devices"]["sim:1"]
    for facts in (header["accelerator"], accelerator):
        assert facts["settings"]["environment"] == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
        assert "flash" in facts["settings"]["attention"]


@on_simulator(SIM_DURATIONS="aten::sin=500;aten::cos=9000")
def test_calls_on_two_devices_have_device_times(tmp_path: Path) -> None:
    first, second = torch.ones(3, device="sim:0"), torch.ones(3, device="sim:1")
    with Capture(tmp_path / "t.jsonl") as capture:
        for _ in range(3):
            first.sin()
            second.cos()
            capture._flusher.flush()
    trace = load(tmp_path / "t.jsonl", partial=False)
    calls = trace.calls
    assert (calls[calls["op"] == "aten.sin.default"]["device_ns"] >= 500e3).all()
    assert (calls[calls["op"] == "aten.cos.default"]["device_ns"] >= 9000e3).all()
    devices = trace.summary("device")["device"].tolist()
    assert [name for name in devices if name != "cpu"] == ["sim:1", "sim:0"]


@on_simulator(SIM_DURATIONS="aten::cos=9000")
def test_calls_have_their_stream(tmp_path: Path) -> None:
    x, side = torch.ones(3, device="sim:0"), torch.sim.Stream()
    torch.sim.synchronize()
    with Capture(tmp_path / "t.jsonl"):
        x.sin()
        with torch.sim.stream(side):
            x.cos()
        torch.ones(3).tan()
    trace = load(tmp_path / "t.jsonl", partial=False)
    stream_of = dict(zip(trace.calls["op"], trace.calls["stream"].astype(object), strict=True))
    assert stream_of["aten.sin.default"] == 0
    assert stream_of["aten.cos.default"] == side.stream_id != 0
    assert stream_of["aten.tan.default"] is pd.NA
    table = trace.summary(["device", "stream"])
    places = list(zip(table["device"], table["stream"], strict=True))
    assert places[0] == ("sim:0", side.stream_id)
    assert {("sim:0", 0), ("cpu", pd.NA)} <= set(places)


@on_simulator()
def test_flusher_does_not_disturb_graph_capture(tmp_path: Path) -> None:
    x = torch.ones(3, device="sim")
    with Capture(tmp_path / "t.jsonl") as capture:
        for _ in range(3):
            x.sin()
        graph = torch.sim.Graph()
        with torch.sim.graph(graph):
            x.sin()
            thread = threading.Thread(target=capture._flusher.flush)
            thread.start()
            thread.join()
        graph.replay()
    calls = load(tmp_path / "t.jsonl", partial=False).calls
    assert calls[calls["op"] == "aten.sin.default"]["device_ns"].notna().tolist() == [True] * 4


@on_simulator(SIM_DURATIONS="aten::relu=700;aten::clamp_min=700")
def test_call_on_the_second_device_is_timed_there(tmp_path: Path) -> None:
    capture_layers(tmp_path / "t.jsonl", "cpu")
    options = ("--device", "sim:1", "--exec-mode", "events", "--op", "aten.relu.default")
    (row,) = replay_rows(tmp_path / "t.jsonl", *options)
    assert row["median_us"] >= 700


@on_simulator()
def test_values_of_a_side_stream_are_correct_without_waiting(tmp_path: Path) -> None:
    table, index = torch.rand(50, 3, device="sim"), torch.arange(40, device="sim")
    torch.sim.set_duration("aten::add", LONG_US)
    with Capture(tmp_path / "t.jsonl"):
        start = perf_counter()
        side = torch.sim.Stream()
        side.wait_stream(torch.accelerator.current_stream())
        with torch.sim.stream(side):
            table[index + 7]
        taken_s = perf_counter() - start
    assert taken_s < LONG_US / 1e6
    values = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    assert any(record.get("data") == list(range(7, 47)) for record in values)


@on_simulator(SIM_MEMORY=str(96 << 20))
def test_waiting_values_leave_memory_for_the_program(tmp_path: Path) -> None:
    with Capture(tmp_path / "t.jsonl") as capture:
        tensors = [torch.ones(3 << 18, device="sim") for _ in range(24)]
        for tensor in tensors:
            tensor.add_(1)
        largest = torch.empty(20 << 18, device="sim")
    assert largest.numel()
    assert capture.dropped == 0


@on_simulator()
def test_memory_columns_show_allocator_use_of_a_call(tmp_path: Path) -> None:
    table = torch.ones(500, 100, device="sim:1")
    with Capture(tmp_path / "t.jsonl"):
        table.view(-1)
        table.repeat(2, 3)
        (table[:250] * 2).sum()
    rows = {row["op"]: row for row in replay_rows(tmp_path / "t.jsonl")}
    assert rows["aten.mul.Tensor"]["reserved_bytes"] == rows["aten.mul.Tensor"]["peak_bytes"] == 250 * 100 * 4
    assert rows["aten.view.default"]["reserved_bytes"] == rows["aten.view.default"]["allocated_bytes"] == 0


def make_measuring_quick() -> None:
    measuring.SIZES, measuring.LAUNCHES, peaks.MOST_COPIES = (64,), 20, 2


@pytest.mark.alone
@on_simulator(SIM_MEMORY=str(64 << 20))
def test_device_peaks_are_measured_and_limit_its_rows(tmp_path: Path) -> None:
    os.environ["OPGRIP_CACHE"] = str(tmp_path)
    make_measuring_quick()
    capture_layers(tmp_path / "t.jsonl")
    rows = replay_rows(tmp_path / "t.jsonl", "--roofline", "--op", "aten.addmm*")
    assert all(row["limit_us"] > 0 for row in rows)
    [file] = (tmp_path / "machine").iterdir()
    ceilings = json.loads(file.read_text())
    assert ceilings["device"] == "sim"
    assert [level["name"] for level in ceilings["levels"]] == ["L2", "memory"]
    assert {"float32", "bfloat16", "float16"} <= ceilings["rates"].keys()


@on_simulator(SIM_DURATIONS="aten::relu=5000;aten::clamp_min=5000")
def test_device_time_is_used_for_shares_and_rows(tmp_path: Path) -> None:
    x = torch.ones(3, device="sim:0")
    with Capture(tmp_path / "t.jsonl"):
        for _ in range(3):
            x.relu()
            x.view(3, 1)
    trace = load(tmp_path / "t.jsonl", partial=False)
    calls = trace.calls[trace.calls["op"] == "aten.relu.default"]
    assert (calls["time_ns"] == calls["device_ns"]).all()
    assert trace.summary().iloc[0]["op"] == "aten.relu.default"
    row = next(row for row in replay_rows(tmp_path / "t.jsonl") if row["op"] == "aten.relu.default")
    assert row["share"] > 0.9
    assert row["method"] == "events"
    assert row["captured_us"] >= 5000 > row["captured_host_us"]
    assert 5000 <= row["median_us"] < 5100


@on_simulator(SIM_DEVICES="3")
def test_capture_creates_no_context_on_unused_devices(tmp_path: Path) -> None:
    x, index = torch.rand(50, 3, device="sim:1"), torch.arange(40, device="sim:1")
    assert [torch.sim.has_context(device) for device in range(3)] == [False, True, False]
    with Capture(tmp_path / "t.jsonl") as capture:
        for _ in range(3):
            x[index].sin()
        thread = threading.Thread(target=capture._flusher.flush)
        thread.start()
        thread.join()
        x.cos()
    assert [torch.sim.has_context(device) for device in range(3)] == [False, True, False]
    calls = load(tmp_path / "t.jsonl", partial=False).calls
    assert calls[calls["op"].isin(["aten.sin.default", "aten.cos.default"])]["device_ns"].notna().tolist() == [True] * 4
