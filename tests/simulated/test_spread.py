"""`--device sim:0,sim:1`: cases spread over two devices, with a process for each."""

from __future__ import annotations

import os
import signal
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import hear_ctrl_c, program_path, wait_for
from simulation import on_simulator

from opgrip.capture import Capture
from opgrip.replay import load_results
from opgrip.replay.opreplay import main as opreplay

BOTH = ("--device", "sim:0,sim:1")
FEW = ("--iterations", "2", "--warmup", "0", "--cache", "warm", "--clock-warmup", "0")
LONG = "aten::sin=40000"
"""So long that two devices take half the time of one, whatever else a case takes."""


def capture_calls(path: Path, count: int = 8) -> Path:
    """As many cases of sin on the CPU, and a last one of cos."""
    with Capture(path):
        for size in range(1, count + 1):
            torch.ones(size).sin()
        torch.ones(2).cos()
    return path


def replay(trace: Path, *options: str, status: int = 0) -> Any:
    """The results of a quick replay."""
    output = trace.with_suffix(".rows.json")
    assert opreplay([str(trace), *FEW, *BOTH, "-o", str(output), *options]) == status
    return load_results(output)


def use_devices() -> None:
    """Make contexts, so that no further process has to be started that asks what the devices are."""
    torch.ones(1, device="sim:0"), torch.ones(1, device="sim:1")


@on_simulator()
def test_two_devices_share_the_cases_and_rows_say_where_they_ran(tmp_path: Path) -> None:
    use_devices()
    trace = capture_calls(tmp_path / "t.jsonl")
    rows = replay(trace, "--op", "aten.[sc]*", "--mode", "eager,jit")
    assert set(rows["status"]) == {"ok"}
    assert rows["case"].tolist() == sorted(rows["case"])
    assert set(rows.groupby("case")["device"].nunique()) == {1}
    assert min(Counter(rows["device"])["sim:0"], Counter(rows["device"])["sim:1"]) >= 4
