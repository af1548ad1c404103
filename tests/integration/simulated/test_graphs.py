"""Tests of replays as graphs on the simulated accelerator, whose captures fail for the same operations as CUDA's."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from simulation import on_simulator

from opgrip.capture import Capture
from opgrip.replay.command.opreplay import main as opreplay


@on_simulator(SIM_DURATIONS="aten::sin=700", SIM_ONE_FAILED_CAPTURE="1")
def test_a_call_that_no_graph_holds_costs_one_row_and_spoils_none_after_it(tmp_path: Path) -> None:
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
