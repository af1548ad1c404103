"""Tests of the simulated accelerator: it works as a device of torch, and fails for operations that CUDA forbids."""

from __future__ import annotations

import os
import threading
from time import perf_counter

import pytest
import torch
from simulation import on_simulator

LONG_US = 200_000.0


def start_long_write(device: str = "sim:0") -> torch.Tensor:
    """Return a tensor that the current stream takes long to write."""
    torch.sim.set_duration("aten::sin", LONG_US)
    return torch.ones(4, device=device).sin()


@on_simulator()
def test_context_is_created_by_the_first_use_and_not_by_counting() -> None:
    torch.randn(3, requires_grad=True).sum().backward()
    torch.manual_seed(1)
    assert torch.sim.device_count() == 2
    assert torch.sim.is_available()
    assert not torch.sim.is_initialized()
    os.environ["SIM_VISIBLE_DEVICES"] = "1"
    torch.ones(1, device="sim")
    assert torch.sim.is_initialized()
    assert torch.sim.device_count() == 1
    assert torch.sim.get_device_properties(0).uuid == "sim-1"


@on_simulator()
def test_forked_process_cannot_use_an_inherited_context() -> None:
    torch.ones(1, device="sim")
    child = os.fork()
    if child == 0:
        problem = ""
        try:
            torch.ones(1, device="sim")
        except RuntimeError as error:
            problem = str(error)
        os._exit(0 if "Cannot re-initialize SIM in forked subprocess" in problem and torch.sim._is_in_bad_fork() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


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
def test_streams_run_concurrently() -> None:
    torch.sim.set_duration("aten::sin", LONG_US)
    x, y = torch.ones(4, device="sim"), torch.ones(4, device="sim")
    torch.accelerator.synchronize()
    events = [torch.Event("sim", enable_timing=True) for _ in range(2)]
    events[0].record()
    x.sin()
    with torch.sim.stream(torch.sim.Stream()):
        y.sin()
        events[1].record()
    torch.accelerator.synchronize()
    assert events[0].elapsed_time(events[1]) < 2 * LONG_US / 1e3


@on_simulator()
def test_event_belongs_to_the_device_that_recorded_it_first() -> None:
    event = torch.Event("sim", enable_timing=True)
    event.record(torch.accelerator.current_stream(0))
    with pytest.raises(RuntimeError, match="Event device 0 does not match recording stream's device 1"):
        event.record(torch.accelerator.current_stream(1))


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
def test_copies_to_pinned_memory_arrive_after_synchronization() -> None:
    x, pinned = torch.ones(3, device="sim"), torch.zeros(3).pin_memory()
    assert pinned.is_pinned()
    pinned.copy_(x, non_blocking=True)
    assert pinned.isnan().all()
    torch.accelerator.current_stream().synchronize()
    assert torch.equal(pinned, torch.ones(3))


@on_simulator()
def test_devices_exchange_tensors_and_mixed_calls_fail() -> None:
    x = torch.ones(3, device="sim:0")
    moved = x.to("sim:1", non_blocking=True)
    assert moved.device == torch.device("sim:1")
    assert torch.equal((moved + 1).cpu(), torch.full((3,), 2.0))
    with pytest.raises(RuntimeError, match="same device"):
        x + moved
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(3)


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


@on_simulator()
def test_another_thread_breaks_a_global_graph_capture_unless_relaxed() -> None:
    x = torch.ones(3, device="sim")
    event = torch.Event("sim")
    event.record()
    errors: list[str] = []

    def use(use_device: object, mode: str = "global") -> None:
        torch.sim.exchange_capture_mode(mode)
        try:
            use_device()  # type: ignore[operator]
        except RuntimeError as error:
            errors.append(str(error))

    for capture_mode, mode, fails in (
        ("global", "global", True),
        ("global", "relaxed", False),
        ("thread_local", "global", False),
    ):
        for use_device in (event.query, event.synchronize, lambda: torch.empty(3, device="sim")):
            errors.clear()
            graph = torch.sim.Graph()
            try:
                with torch.sim.graph(graph, capture_error_mode=capture_mode):
                    x.cos()
                    thread = threading.Thread(target=use, args=(use_device, mode))
                    thread.start()
                    thread.join()
            except RuntimeError as error:
                errors.append(str(error))
            assert len(errors) == (2 if fails else 0), errors
