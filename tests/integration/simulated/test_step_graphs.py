"""Step replay in graphs on the simulated accelerator, which refuses to capture calls that wait."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from simulation import on_simulator
from torch import nn

from opgrip.capture import Capture
from opgrip.errors import UserError
from opgrip.replay import replay
from opgrip.replay.command.opreplay import main as opreplay
from opgrip.replay.run.request import RunRequest
from opgrip.replay.run.workload import workload_for
from opgrip.replay.sequences.call_timers import sequence_settings
from opgrip.replay.sequences.step_replay import SequenceResult, replay_sequence
from opgrip.traces import Trace, load

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
    """Capture a step that changes all of its weights and their state."""
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
