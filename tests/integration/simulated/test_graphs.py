"""Graphs on the simulated accelerator: replays of calls and steps, and programs that use them in unusual ways."""

import contextlib
import gc
import io
import json
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from simulation import on_simulator
from torch import Tensor, nn

import opgrip.capture as opgrip_capture
from opgrip.capture import Capture
from opgrip.capture.on_demand import session
from opgrip.errors import UserError
from opgrip.replay import replay
from opgrip.replay.command.opreplay import main as opreplay
from opgrip.replay.run.request import RunRequest
from opgrip.replay.run.workload import workload_for
from opgrip.replay.sequences.call_timers import sequence_settings
from opgrip.replay.sequences.step_replay import SequenceResult, replay_sequence
from opgrip.tools.opgrip import main as opgrip
from opgrip.traces import Trace, load, read
from opgrip.traces.schema.records import Graph


def info_of(trace: Path) -> str:
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


STEPS = 3

SIN_MS = 5  # duration of a sine on the device


def waves(x: torch.Tensor) -> torch.Tensor:
    return x.sin().add_(1).cos()


def selection(x: torch.Tensor) -> torch.Tensor:
    """Run four calls that no graph holds: a mask's indices, a number for the host, and copies from and to the host."""
    y = x.sin()
    rows = (y > 0.5).nonzero()[:, 0]
    y[rows].sum().item()
    return y.cpu().to("sim").mul_(0.9)


def captured(path: Path, program: Any) -> Path:
    with Capture(path):
        x = torch.linspace(0, 2, 1000, device="sim")
        for _ in range(STEPS):
            x = program(x)
    return path


@on_simulator(SIM_DURATIONS=f"aten::sin={SIN_MS}000")
def test_step_without_waits_is_one_graph(tmp_path: Path) -> None:
    trace = captured(tmp_path / "t.jsonl", waves)
    results = replay(trace, sequence=True, exec_mode="graph", device="sim:0", iterations=3)
    step = results.header["sequence"]
    assert (step["replayed"], step["graphs"], step["between_graphs"]) == (1 + 3 * STEPS, 1, 0)
    assert min(step["passes"]["replayed_ms"]) >= SIN_MS * STEPS
    assert set(results.frame["note"]) == {"in a graph"}
    assert results.frame["median_us"].isna().all()


@on_simulator()
def test_calls_that_a_graph_cannot_hold_run_between_graphs(tmp_path: Path) -> None:
    trace = captured(tmp_path / "t.jsonl", selection)
    results = replay(trace, sequence=True, exec_mode="graph", device="sim:0", iterations=3)
    step = results.header["sequence"]
    assert step["failure"] == ""
    assert step["replayed"] == step["calls"]
    assert (step["graphs"], step["between_graphs"]) == (2 * STEPS + 1, 4 * STEPS)
    notes = results.frame.groupby("op", observed=True)["note"].first()
    assert notes["aten.nonzero.default"] == notes["aten._local_scalar_dense.default"] == "3 of 3 calls between graphs"
    assert notes["aten.sin.default"] == notes["aten.mul_.Tensor"] == "in a graph"


@on_simulator()
def test_step_in_graphs_needs_an_accelerator_and_eager_calls(tmp_path: Path) -> None:
    trace = captured(tmp_path / "t.jsonl", waves)
    with pytest.raises(UserError, match="graph runs all calls in eager"):
        replay(trace, sequence=True, exec_mode="graph", mode="jit", device="sim:0")
    with pytest.raises(UserError, match="graph needs the clock of a GPU"):
        replay(trace, sequence=True, exec_mode="graph", device="cpu")
    assert opreplay([str(trace), "--sequence", "--exec-mode", "events"]) == 2


@on_simulator()
def test_step_that_changes_outside_memory_runs_in_a_graph(tmp_path: Path) -> None:
    weights = torch.randn(1000, device="sim")
    rows = torch.randint(0, 1000, (50,), device="sim")

    def train(x: torch.Tensor) -> torch.Tensor:
        # the index is a result of the graph
        y = weights[rows.flip(0)] * x[:50]
        weights.sub_(y.sum(), alpha=1e-3)
        return x

    trace = captured(tmp_path / "t.jsonl", train)
    step = replay(trace, sequence=True, exec_mode="graph", device="sim:0", iterations=3).header["sequence"]
    assert (step["failure"], step["graphs"], step["between_graphs"]) == ("", 1, 0)


WIDTH = 512


def capture_training(path: Path) -> Trace:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(12))).to("sim")
    optimizer = torch.optim.Adam(model.parameters(), fused=False, foreach=False)
    rows = torch.rand(8, WIDTH, device="sim")

    def step() -> None:
        optimizer.zero_grad()
        model(rows).sum().backward()
        optimizer.step()

    step()
    with Capture(path):
        step()
    return load(path, partial=False)


def replay_in(trace: Trace, room_bytes: int | None = None) -> tuple[SequenceResult, int]:
    """Return the result of a step replay, and the most memory of the device that it took."""
    settings = sequence_settings(workload_for(RunRequest(), trace))
    torch.sim.reset_peak_memory_stats()
    before = torch.sim.memory_allocated()
    result = replay_sequence(trace, replace(settings, repeats=3, room_bytes=room_bytes))
    return result, torch.sim.max_memory_allocated() - before


@on_simulator(SIM_DEVICES="1")
def test_step_replay_needs_little_more_memory_than_its_program(tmp_path: Path) -> None:
    trace = capture_training(tmp_path / "t.jsonl")
    result, _ = replay_in(trace)
    program_bytes = result.outside_bytes + result.captured_peak_bytes
    # weights and two states each
    assert result.outside_bytes > 3 * 12 * WIDTH * WIDTH * 4
    assert result.replayed == result.calls
    # on a device that has just that
    result, peak_bytes = replay_in(trace, room_bytes=int(1.3 * program_bytes))
    assert result.replayed == result.calls
    assert peak_bytes <= 1.3 * program_bytes


def numbers() -> Tensor:
    return torch.linspace(0, 2, 1000, device="sim")


def object_captured_again() -> Tensor:
    x, graph = numbers(), torch.sim.Graph()
    with torch.sim.graph(graph):
        x.sin()
    graph.replay()
    with torch.sim.graph(graph):
        y = x.exp().add_(1)
    graph.replay()
    graph.replay()
    return y


def destroyed_graphs() -> Tensor:
    x = y = numbers()
    for number in range(10):
        graph = torch.sim.Graph()
        with torch.sim.graph(graph):
            y = x.sin() if number % 2 else x.cos().tan()
        graph.replay()
        del graph
        gc.collect()
    return y


def launches_of_several_threads() -> Tensor:
    x, graph = numbers(), torch.sim.Graph()
    with torch.sim.graph(graph):
        y = x.sin()
    threads = [threading.Thread(target=lambda: [graph.replay() for _ in range(5)]) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return y


def exception_in_a_capture() -> Tensor:
    x = numbers()
    with suppress(KeyError), torch.sim.graph(torch.sim.Graph()):
        x.sin()
        raise KeyError
    graph = torch.sim.Graph()
    with torch.sim.graph(graph):
        y = x.tan()
    graph.replay()
    return y + x.cos()


def event_used_again() -> Tensor:
    x, event, stream = numbers(), torch.sim.Event(), torch.sim.Stream("sim")
    for _ in range(10):
        event.record()
        stream.wait_event(event)
        with torch.sim.stream(stream):
            y = x.sin()
            event.record(stream)
        torch.sim.current_stream().wait_event(event)
        x = y + 1
    return x


# each program, and (calls, launches) of each graph that it launches
PROGRAMS: dict[str, tuple[Callable[[], Tensor], list[tuple[int, int]]]] = {
    "object captured again": (object_captured_again, [(1, 1), (2, 2)]),
    "destroyed graphs": (destroyed_graphs, [(2, 1), (1, 1)] * 5),
    "launches of several threads": (launches_of_several_threads, [(1, 15)]),
    "exception in a capture": (exception_in_a_capture, [(1, 1)]),
    "event used again": (event_used_again, []),
}


@pytest.mark.parametrize("program", PROGRAMS)
@on_simulator()
def test_program_gets_its_results_and_each_launch_is_counted(tmp_path: Path, program: str) -> None:
    run, graphs = PROGRAMS[program]
    alone = run().cpu()
    with Capture(tmp_path / "t.jsonl") as capture:
        captured = run().cpu()
    assert torch.equal(captured, alone)
    assert capture.dropped == 0
    trace = load(tmp_path / "t.jsonl", partial=False)
    assert [(row.calls, row.launches) for row in trace.graphs.itertuples() if row.launches] == graphs


@on_simulator()
def test_recording_may_end_within_a_graph_capture(tmp_path: Path) -> None:
    x, graph, stream = numbers(), torch.sim.Graph(), torch.sim.Stream("sim")
    torch.sim.synchronize()
    capture = Capture(tmp_path / "t.jsonl")
    with torch.sim.stream(stream):
        with capture:
            graph.capture_begin()
            y = x.sin()
        z = y.cos()
        graph.capture_end()
        graph.replay()
    torch.sim.synchronize()
    assert torch.equal(z.cpu(), numbers().sin().cos().cpu())
    assert capture.dropped == 0
    load(tmp_path / "t.jsonl", partial=False)
