"""Tests of replays as graphs on the simulated accelerator, whose captures fail for the same operations as CUDA's."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from simulation import on_simulator

import opgrip.capture as opgrip_capture
from opgrip.capture import Capture
from opgrip.capture.on_demand import session
from opgrip.replay import replay
from opgrip.replay.command.opreplay import main as opreplay
from opgrip.tools.opgrip import main as opgrip
from opgrip.traces import load, read
from opgrip.traces.schema.records import Graph


def info_of(trace: Path) -> str:
    """Return what `opgrip trace info` prints about a trace."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert opgrip(["trace", "info", str(trace)]) == 0
    return printed.getvalue()


@on_simulator(SIM_DURATIONS="aten::sin=700", SIM_ONE_FAILED_CAPTURE="1")
def test_call_that_no_graph_can_hold_fails_only_in_its_row(tmp_path: Path) -> None:
    x = torch.ones(20)
    with Capture(tmp_path / "t.jsonl"):
        for _ in range(3):
            x.nonzero()
            x.sin()
            x.mul(2)
    output = tmp_path / "rows.json"
    options = ("--exec-mode", "graph", "--budget", "0.01", "-o", str(output))
    assert opreplay([str(tmp_path / "t.jsonl"), "--device", "sim:0", *options]) == 0
    rows = {row["op"]: row for row in json.loads(output.read_text())["results"]}
    assert rows["aten.nonzero.default"]["status"] == "failed"
    assert "graph" in rows["aten.nonzero.default"]["error"]
    for operator in ("aten.sin.default", "aten.mul.Tensor"):
        assert (rows[operator]["status"], rows[operator]["method"]) == ("ok", "graph")
    assert 700 <= rows["aten.sin.default"]["median_us"] < 800


@on_simulator(SIM_DURATIONS="aten::sin=40000;aten::cos=20000")
def test_calls_of_a_graph_count_in_each_launch_and_not_in_its_capture(tmp_path: Path) -> None:
    x, y = (torch.ones(1000, device="sim") for _ in range(2))
    graph = torch.sim.Graph()
    with Capture(tmp_path / "t.jsonl") as capture:
        x.sin()
        y.cos()
        with torch.sim.graph(graph):
            x.sin().view(10, 100)
            y.cos()
            torch.ones(3)
        for _ in range(5):
            graph.replay()
    assert capture.dropped == 0
    (template,) = (record for record in read(tmp_path / "t.jsonl") if isinstance(record, Graph))
    trace = load(tmp_path / "t.jsonl", partial=False)
    ops = {signature.number: signature.op for signature in trace.signatures}
    names = ["aten.sin.default", "aten.view.default", "aten.cos.default"]
    assert [ops[number] for number in template.calls] == names
    calls = trace.calls["op"].tolist()
    assert calls == ["aten.sin.default", "aten.cos.default", "aten.ones.default", *names * 5]
    table = trace.summary().set_index("op")
    assert table["calls"][names].tolist() == [6, 5, 6]
    assert trace.call_count == len(calls)
    launched = trace.calls[trace.calls["device"] == "sim:0"].tail(15)
    times = launched.groupby("op", observed=True)["device_ns"].sum()[names].tolist()
    assert times[1] == 0
    assert 300e6 <= sum(times) < 400e6
    assert 1.6 < times[0] / times[2] < 2.4
    (graph_row,) = trace.graphs.itertuples()
    assert (graph_row.calls, graph_row.launches, graph_row.captured) == (3, 5, True)
    assert 0.7 < graph_row.share < 0.95
    printed = info_of(tmp_path / "t.jsonl")
    assert "graphs      5 launches of 1 graph ran 15 calls, 8" in printed
    assert "capture the trace does not have" not in printed


@on_simulator(SIM_DURATIONS="aten::sin=9000;aten::cos=1000")
def test_launch_is_divided_by_replayed_times(tmp_path: Path) -> None:
    x, y = (torch.ones(1000, device="sim") for _ in range(2))
    graph = torch.sim.Graph()
    with Capture(tmp_path / "t.jsonl"):
        with torch.sim.graph(graph):
            x.sin().view(10, 100)
            y.cos()
        for _ in range(5):
            graph.replay()

    def rows_of(**options: Any) -> Any:
        return replay(tmp_path / "t.jsonl", device="sim:0", iterations=3, **options).frame.set_index("op")

    # no call outside of the graph has a time: the estimate is by the bytes of the tensors
    estimated = rows_of(top=1)
    assert estimated["captured_us"].tolist() == pytest.approx([5000], rel=0.1)
    assert estimated["launches_divided_by"].isna().all()
    rows = rows_of()
    assert rows["captured_us"]["aten.sin.default"] == pytest.approx(9000, rel=0.1)
    assert rows["captured_us"]["aten.cos.default"] == pytest.approx(1000, rel=0.1)
    assert rows["share"]["aten.sin.default"] == pytest.approx(0.9, abs=0.02)
    assert rows["share"].sum() == pytest.approx(1)
    assert set(rows["launches_divided_by"].dropna()) == {"replayed times"}
    assert rows["captured_spread"].isna().all()


@on_simulator(SIM_DURATIONS="aten::sin=2000")
def test_launches_of_a_graph_captured_earlier_are_recorded(tmp_path: Path) -> None:
    x, graph = torch.ones(1000, device="sim"), torch.sim.Graph()
    with torch.sim.graph(graph):
        x.sin()
    with Capture(tmp_path / "t.jsonl"):
        for _ in range(3):
            graph.replay()
    calls = load(tmp_path / "t.jsonl", partial=False).calls
    assert calls["op"].tolist() == ["torch.sim:Graph.replay"] * 3
    assert calls["device"].tolist() == ["sim:0"] * 3
    assert (calls["device_ns"] >= 2e6).all()
    printed = info_of(tmp_path / "t.jsonl")
    assert printed.startswith("doubtful    100% of the device's time is in launches of graphs whose capture")
    assert opreplay([str(tmp_path / "t.jsonl"), "--device", "sim:0", "-o", str(tmp_path / "rows.json")]) == 1
    (row,) = json.loads((tmp_path / "rows.json").read_text())["results"]
    assert (row["status"], row["count"]) == ("unsupported", 3)
    assert "start the capture before" in row["error"]


class Served(torch.nn.Module):
    """Model that launches a graph, like a server's."""

    def __init__(self, graph: Any) -> None:
        super().__init__()
        self.graph = graph

    def forward(self) -> None:
        self.graph.replay()


@on_simulator(XDG_RUNTIME_DIR="/tmp")
def test_on_demand_recording_knows_graphs_captured_before_it(tmp_path: Path) -> None:
    session.load()
    x, graph = torch.ones(1000, device="sim"), torch.sim.Graph()
    with torch.sim.graph(graph):
        x.sin().cos()
    served = Served(graph)
    asked = opgrip_capture.trigger(tmp_path / "t.jsonl", steps=3, warmup=0)
    while not asked.wait(0.0):
        served()
    assert asked.problem is None
    trace = load(tmp_path / "t.jsonl", partial=False)
    calls = trace.own_calls
    assert calls["op"].tolist() == ["aten.sin.default", "aten.cos.default"] * 3
    assert (calls["device_ns"] > 0).all()
    assert not trace.doubts
