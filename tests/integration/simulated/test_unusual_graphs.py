"""Tests of captures of programs that use graphs and streams in unusual ways, on the simulated accelerator."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from simulation import on_simulator
from torch import Tensor

from opgrip.capture import Capture
from opgrip.traces import load


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
