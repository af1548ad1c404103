"""Tests of the simulated accelerator: it works as a device of torch, and fails for operations that CUDA forbids."""

from time import perf_counter

import pytest
import torch
from simulation import on_simulator

LONG_US = 200_000.0


def start_long_write(device: str = "sim:0") -> torch.Tensor:
    torch.sim.set_duration("aten::sin", LONG_US)
    return torch.ones(4, device=device).sin()


@on_simulator()
def test_host_runs_ahead_and_events_measure_device_time() -> None:
    torch.ones(4, device="sim")
    before, after = (torch.sim.Event(enable_timing=True) for _ in range(2))
    start = perf_counter()
    before.record()
    start_long_write()
    after.record()
    assert not after.query()
    with pytest.raises(RuntimeError, match=r"completed|not ready"):
        before.elapsed_time(after)
    after.synchronize()
    assert perf_counter() - start >= LONG_US / 1e6
    assert after.query()
    assert before.elapsed_time(after) >= LONG_US / 1e3


@on_simulator()
def test_missing_wait_between_streams_is_detected() -> None:
    written = start_long_write()
    event = torch.Event("sim")
    event.record()
    stream = torch.sim.Stream()
    with torch.sim.stream(stream):
        with pytest.raises(RuntimeError, match="read before the event"):
            written.cos()
        with pytest.raises(RuntimeError, match="read before the event"):
            written.cpu()
        with pytest.raises(RuntimeError, match="write before the event"):
            written.zero_()
        stream.wait_event(event)
        written.cos()
    assert written.cpu()[0] == torch.ones(1).sin()


@on_simulator()
def test_device_error_is_reported_late_and_persists() -> None:
    x = torch.ones(3, device="sim:0")
    torch.sim.fail("aten::sin", "device-side assert triggered")
    y = x.sin()
    y.cos()
    error = getattr(torch, "AcceleratorError", RuntimeError)
    with pytest.raises(error, match="device-side assert triggered"):
        torch.accelerator.synchronize()
    for use in (lambda: x.cos(), lambda: torch.ones(1, device="sim:0"), x.cpu, torch.sim.synchronize):
        with pytest.raises(error, match="device-side assert triggered"):
            use()
    assert torch.ones(1, device="sim:1").item() == 1


@on_simulator()
def test_forbidden_operation_raises_and_ends_the_graph_capture() -> None:
    x = torch.ones(3, device="sim")

    def query() -> None:
        event = torch.Event("sim")
        event.record()
        event.query()

    for forbidden in (torch.sim.synchronize, x.nonzero, x.cpu, lambda: x.sum().item(), query):
        graph = torch.sim.Graph()
        with (
            pytest.raises(RuntimeError, match="previous error during capture"),
            torch.sim.graph(graph),
            pytest.raises(RuntimeError, match="not permitted"),
        ):
            forbidden()
    assert x.cos().tolist()
