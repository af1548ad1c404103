"""Step replay in graphs on the simulated accelerator, which refuses to capture calls that wait."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from simulation import on_simulator

from opgrip.capture import Capture
from opgrip.errors import UserError
from opgrip.replay import replay
from opgrip.replay.command.opreplay import main as opreplay

STEPS = 3
SIN_MS = 5
"""duration of a sine on the device"""


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
