"""Tests of captures next to accelerators: a capture starts none, and queries none while the program captures a graph.

Without a GPU: only graphs and devices are stand-ins.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from programs import run_python

from opgrip.capture import Capture
from opgrip.capture.program.accelerators import GraphCaptures
from opgrip.traces import load

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
