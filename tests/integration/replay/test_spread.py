"""Tests of distributing cases to devices, and of reading the output of several processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from opgrip.capture import Capture
from opgrip.errors import UserError
from opgrip.replay import replay
from opgrip.replay.replay_options import request_with
from opgrip.replay.run.workload import Workload, load_workload
from opgrip.replay.workers.scheduling import PARTS, DealtWindows


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("spread") / "t.jsonl"
    with Capture(path):
        for size in range(1, 22):
            torch.ones(size).sin()
    return path


def loaded_on(trace: Path, device: str) -> Workload:
    return load_workload(request_with(trace, device=device, op="aten.sin*", cache="warm"))


def numbers(cases: Iterator[list[Any]]) -> list[list[int]]:
    return [[case.number for case in window] for window in cases]


def test_devices_start_with_equal_parts_and_a_finished_one_takes_more(trace: Path) -> None:
    loaded = loaded_on(trace, "cuda,cuda:1")
    windows = DealtWindows(loaded, done=())
    dealt = {device: len(windows.dealt_to(device)) for device in ("cuda:0", "cuda:1")}
    assert dealt == {"cuda:0": 12, "cuda:1": 9}
    slow, quick = windows.take("cuda:0"), windows.take("cuda:1")
    first = numbers(iter([next(slow)]))
    others = numbers(quick)
    assert len(others) > PARTS - 1
    assert numbers(slow) == []
    assert sorted(number for window in first + others for number in window) == sorted(
        case.number for case in loaded.cases
    )


@pytest.mark.parametrize("devices", ["cpu,cpu", "cpu,meta"])
def test_cases_are_spread_only_over_accelerators(trace: Path, devices: str) -> None:
    with pytest.raises(UserError, match="several devices must be different accelerators, got cpu, "):
        replay(trace, device=devices)
