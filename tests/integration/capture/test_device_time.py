"""Tests of times on an accelerator, without a GPU: only events and tensors' devices are stand-ins."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from opgrip.capture import Capture
from opgrip.capture.hooks import wrapped_operators
from opgrip.capture.program.accelerators import DeviceQueries
from opgrip.capture.timing import device_time
from opgrip.traces import load


class Clock:
    """Device on which consecutive events are one millisecond apart."""

    now = 0
    events = 0
    waited = 0


class Mark:
    def __init__(self) -> None:
        Clock.events += 1
        self.time = 0

    def record(self, stream: Any = None) -> None:
        Clock.now += 1
        self.time = Clock.now

    def synchronize(self) -> None:
        Clock.waited += 1

    def elapsed_time(self, later: Any) -> float:
        return float(later.time - self.time)


@pytest.fixture
def _device(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock.now = Clock.events = Clock.waited = 0

    def device_of(tensors: Any, values: Any) -> torch.device | None:
        return torch.device("cuda:0") if any(tensor.numel() > 10 for tensor in tensors) else None

    monkeypatch.setattr(device_time, "make_event", lambda device: Mark())
    monkeypatch.setattr(device_time, "current_stream", lambda device: None)
    queries = DeviceQueries(lambda: False, lambda: 0, lambda index: 0)
    monkeypatch.setattr(device_time, "queries_of", lambda kind: queries)
    monkeypatch.setattr(device_time, "on_device", nullcontext)
    monkeypatch.setattr(wrapped_operators, "accelerator_of", device_of)


@pytest.mark.usefixtures("_device")
def test_only_calls_on_a_device_have_device_times(tmp_path: Path) -> None:
    large, small = torch.ones(20), torch.ones(3)
    with Capture(tmp_path / "t.jsonl", device_time="events"):
        for _ in range(40):
            large.sin()
            small.sin()
        assert Clock.waited == 0
    trace = load(tmp_path / "t.jsonl", partial=False)
    times = trace.calls["device_ns"]
    assert times[0::2].tolist() == [1e6] * 40
    assert times[1::2].isna().all()


@pytest.mark.usefixtures("_device")
def test_operator_that_fails_on_a_device_is_recorded(tmp_path: Path) -> None:
    large = torch.ones(20)
    with Capture(tmp_path / "t.jsonl", device_time="events") as watched:
        with pytest.raises(RuntimeError):
            large.view(7)
        large.sin()
    assert (watched.calls, watched.dropped) == (2, 0)
    assert load(tmp_path / "t.jsonl").calls["device_ns"].isna().tolist() == [True, False]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_calls_on_a_gpu_are_timed(tmp_path: Path) -> None:
    x = torch.rand(2048, 2048, device="cuda")
    with Capture(tmp_path / "t.jsonl"):
        for _ in range(20):
            x @ x
    times = load(tmp_path / "t.jsonl", partial=False).calls
    assert (times[times["op"] == "aten.mm.default"]["device_ns"] > 0).all()
