"""Streams and values of tensors of the simulated accelerator: what ran where, and values that are fitted later."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from simulation import on_simulator

from opgrip.capture import Capture
from opgrip.capture.program.accelerators import GraphCaptures
from opgrip.capture.signatures import fitting
from opgrip.capture.signatures.fitting import Deferred
from opgrip.replay import replay
from opgrip.traces import Trace, load
from opgrip.traces.schema.arguments import tensors

STEPS = 3
SIN_MS = 20  # duration of a sine and of a cosine on the device


def run(x: torch.Tensor, with_streams: bool = True) -> None:
    """Run a sine and a cosine at the same time, and add the results."""
    main = torch.sim.current_stream()
    side = torch.sim.Stream() if with_streams else main
    for _ in range(STEPS):
        side.wait_stream(main)
        with torch.sim.stream(side if with_streams else None):
            y = x.sin()
            done = side.record_event()
        z = x.cos()
        main.wait_event(done)
        y.add_(z)


def captured(path: Path, **options: Any) -> Trace:
    x = torch.ones(1000, device="sim")
    with Capture(path) as capture:
        run(x, **options)
    assert capture.dropped == 0
    return load(path, partial=False)


def streams_of(trace: Trace, op: str) -> list[int]:
    numbers: list[int] = trace.calls[trace.calls["op"] == op]["stream"].tolist()
    return numbers


@on_simulator()
def test_calls_have_streams_and_the_waits_between_them(tmp_path: Path) -> None:
    trace = captured(tmp_path / "t.jsonl")
    side = streams_of(trace, "aten.sin.default")[0]
    assert side > 0
    assert streams_of(trace, "aten.sin.default") == [side] * STEPS
    assert streams_of(trace, "aten.cos.default") == [0] * STEPS
    assert [(wait.stream, wait.on_stream) for wait in trace.waits] == [(side, 0), (0, side)] * STEPS
    assert {wait.device for wait in trace.waits} == {wait.on_device for wait in trace.waits} == {"sim:0"}
    starts = trace.calls["start_ns"].tolist()
    first, second = trace.waits[:2]
    assert first.until_ns <= first.at_ns < starts[0] < second.until_ns < starts[1] < second.at_ns < starts[2]


@on_simulator()
def test_backward_pass_has_the_streams_of_its_forward_pass(tmp_path: Path) -> None:
    x = torch.ones(1000, device="sim", requires_grad=True)
    side = torch.sim.Stream()
    side.wait_stream(torch.sim.current_stream())
    with Capture(tmp_path / "t.jsonl"):
        with torch.sim.stream(side):
            y = x.sin()
        torch.sim.current_stream().wait_stream(side)
        y.sum().backward()
    trace = load(tmp_path / "t.jsonl", partial=False)
    assert streams_of(trace, "aten.cos.default") == [side.stream_id]


@on_simulator()
def test_program_with_one_stream_records_no_waits(tmp_path: Path) -> None:
    trace = captured(tmp_path / "t.jsonl", with_streams=False)
    assert trace.waits == []
    assert '"streams":' not in (tmp_path / "t.jsonl").read_text()


@on_simulator(SIM_DURATIONS=f"aten::sin={SIN_MS}000;aten::cos={SIN_MS}000")
def test_step_replay_overlaps_streams_as_recorded(tmp_path: Path) -> None:
    captured(tmp_path / "streams.jsonl")
    captured(tmp_path / "one.jsonl", with_streams=False)
    steps = {
        name: replay(tmp_path / f"{name}.jsonl", sequence=True, device="sim:0", iterations=3).header["sequence"]
        for name in ("streams", "one")
    }
    # a call that lacks a wait raises on this device
    assert [step["replayed"] for step in steps.values()] == [3 * STEPS] * 2
    assert [step["streams"] for step in steps.values()] == [2, 1]
    # by the fastest pass, because others may be contended
    fastest = {name: min(step["passes"]["replayed_ms"]) for name, step in steps.items()}
    assert SIN_MS * STEPS <= fastest["streams"] < 1.7 * SIN_MS * STEPS
    assert fastest["one"] >= 2 * SIN_MS * STEPS


@on_simulator()
def test_step_replay_adds_the_waits_that_a_trace_lacks(tmp_path: Path) -> None:
    captured(tmp_path / "t.jsonl")
    lines = (tmp_path / "t.jsonl").read_text().splitlines(keepends=True)
    without = tmp_path / "without.jsonl"
    without.write_text("".join(line for line in lines if '"type":"wait"' not in line))
    assert load(without).waits == []
    step = replay(without, sequence=True, device="sim:0", iterations=2).header["sequence"]
    assert (step["replayed"], step["streams"], step["failure"]) == (3 * STEPS, 2, "")


LARGE = 1 << 16
CYCLES_OF_A_MINUTE = 60_000_000_000


def unknown_values(trace: Trace) -> int:
    """Return the number of input tensors without values."""
    specs = [spec for signature in trace.signatures for spec in tensors([signature.args, signature.kwargs])]
    return sum(spec.values not in trace.values for spec in specs)


def capture_sums(path: Path, steps: int) -> Trace:
    """Capture sums of 24 large tensors of different sizes, for a few of which a device has space."""
    large = [torch.rand(LARGE + place, device="sim") for place in range(24)]
    with Capture(path) as capture:
        for _ in range(steps):
            for tensor in large:
                tensor.sum()
            assert capture._flusher is not None
            torch.sim.synchronize()
            capture._flusher.run_job(capture._flusher.flush)
    return load(path, partial=False)


@on_simulator()
def test_values_without_space_are_counted(tmp_path: Path) -> None:
    with mock.patch.object(fitting, "MOST_BYTES", 300_000):
        trace = capture_sums(tmp_path / "t.jsonl", steps=1)
    assert trace.end is not None
    (lost,) = trace.end.without_values
    assert lost.op == "aten.sum.default"
    assert "no space" in lost.reason
    assert lost.count == unknown_values(trace) > 0


@on_simulator()
def test_values_without_space_are_read_at_the_next_call(tmp_path: Path) -> None:
    with mock.patch.object(fitting, "MOST_BYTES", 300_000):
        trace = capture_sums(tmp_path / "t.jsonl", steps=15)
    assert trace.end is not None
    assert trace.end.without_values == []
    assert unknown_values(trace) == 0


@on_simulator()
def test_values_reach_the_host_while_the_program_stream_is_busy(tmp_path: Path) -> None:
    x = torch.arange(100, device="sim")
    with Capture(tmp_path / "t.jsonl") as capture:
        x.sin()
        torch.sim.synchronize()
        torch.sim._sleep(CYCLES_OF_A_MINUTE)
        done = torch.Event(device="sim")
        done.record()
        assert capture._flusher is not None
        capture._flusher.run_job(capture._flusher._fit_deferred)
        assert not done.query()
        assert not capture._recorder.fitter._deferred._waiting
        lines = b"".join(line for _, line in capture._recorder.pending.lines)
        assert any(b"progression" in line for line in lines.splitlines())
        capture.discard()
        os._exit(0)


@on_simulator()
def test_single_element_with_a_stride_is_transferred() -> None:
    deferred, ids = Deferred(), torch.arange(10, device="sim").view(2, 5)
    for number, tensor in enumerate((ids[:1, 3], ids[:1, 2:3], ids[:, 1], ids.t())):
        assert deferred.add(number, "aten.sum.default", "self", tensor) is None
    arrived = [values.tolist() for values, _ in deferred.ready(GraphCaptures(), wait=True)]
    assert arrived == [[3], [[2]], [1, 6], ids.t().tolist()]
