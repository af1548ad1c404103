"""Tests of values of a device's tensors, which are read and fitted later, on the simulated accelerator."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import torch
from simulation import on_simulator

from opgrip.capture import Capture
from opgrip.capture.program.accelerators import GraphCaptures
from opgrip.capture.signatures import fitting
from opgrip.capture.signatures.fitting import Deferred
from opgrip.traces import Trace, load
from opgrip.traces.schema.arguments import tensors

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
