"""Captures next to accelerators, without a GPU: times of calls, and programs that capture a graph."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from programs import run_python

from opgrip.capture import Capture
from opgrip.capture.hooks import wrapped_operators
from opgrip.capture.program.accelerators import DeviceQueries, GraphCaptures
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


STARTED_BY_NOBODY = """
import sys, torch
from opgrip.capture import Capture
def started(*args, **kwargs):
    raise AssertionError("the capture starts CUDA, or asks whether there is a GPU, which spoils forks")
for name in ("_lazy_init", "is_available", "device_count", "get_device_name", "current_device", "init"):
    setattr(torch.cuda, name, started)
torch.cuda._lazy_init = started
with Capture(sys.argv[1], model=torch.nn.Linear(3, 3)) as watched:
    with torch.autocast("cpu"):
        torch.nn.Linear(3, 3)(torch.ones(2, 3)).sum().backward()
assert watched.failure is None and watched.dropped == 0 and watched.calls > 3, (watched.failure, watched.dropped)
"""


@pytest.mark.slow
def test_capture_initializes_no_gpu(tmp_path: Path) -> None:
    done = run_python("-c", STARTED_BY_NOBODY, tmp_path / "t.jsonl", fresh=True, status=0)
    assert "warn" not in done.stderr.lower()


def test_devices_started_by_the_program_are_in_the_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Capture(tmp_path / "t.jsonl"):
        torch.ones(3).sin()
        # the device starts in the middle of the capture
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"Stand-in {index}")
    monkeypatch.undo()
    devices = load(tmp_path / "t.jsonl", partial=False).header["devices"]
    assert sorted(devices) == ["cpu", "cuda:0", "cuda:1"]
    assert devices["cuda:1"] == "Stand-in 1"


class Graph:
    """Graph that captures nothing."""

    def capture_begin(self) -> None:
        if torch.is_anomaly_enabled():
            raise RuntimeError("planted")

    def capture_end(self) -> None:
        pass


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> GraphCaptures:
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(CUDAGraph=Graph))
    return GraphCaptures()


def may_ask(graphs: GraphCaptures) -> bool:
    with graphs.question() as answer:
        return answer


def test_devices_are_queried_only_between_graph_captures(graphs: GraphCaptures) -> None:
    with graphs:
        graph = Graph()
        assert may_ask(graphs)
        graph.capture_begin()
        assert not may_ask(graphs)
        graph.capture_end()
        assert may_ask(graphs)
        with torch.autograd.set_detect_anomaly(True, check_nan=False), pytest.raises(RuntimeError, match="planted"):
            graph.capture_begin()
        assert may_ask(graphs)
    assert Graph.capture_begin.__qualname__ == "Graph.capture_begin"
    assert not hasattr(Graph.capture_begin, "__wrapped__")
