"""Tests of values of a device's tensors, which are read and fitted later, on the simulated accelerator."""

from __future__ import annotations

import os
import weakref
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
def test_samples_become_smaller_while_many_copies_wait() -> None:
    deferred, tensor = Deferred(), torch.rand(1 << 18, device="sim")
    with mock.patch.object(fitting, "MOST_BYTES", 4 << 20):
        reasons = [deferred.add(number, "aten.sum.default", "self", tensor) for number in range(40)]
    sizes = [values.numel() for values, _ in deferred.ready(GraphCaptures(), wait=True)]
    assert reasons == [None] * 40
    assert sizes[0] == 1 << 18
    assert sizes == sorted(sizes, reverse=True)
    assert 1000 < sizes[-1] <= 1 << 12


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
def test_many_values_of_a_dtype_take_one_transfer() -> None:
    deferred = Deferred()
    copied = [torch.full((3, 2), number, device="sim") for number in range(50)]
    copied += [torch.full((4,), number + 0.5, device="sim") for number in range(50)]
    for number, tensor in enumerate(copied):
        deferred.add(number, "aten.sum.default", "self", tensor)
    transfers = []

    def to_host(tensor: torch.Tensor) -> torch.Tensor:
        transfers.append(tensor)
        return tensor.to("cpu")

    with mock.patch.object(torch.Tensor, "cpu", to_host):
        arrived = list(deferred.ready(GraphCaptures(), wait=True))
    assert len(transfers) == 2
    assert [item.number for _, item in arrived] == list(range(100))
    assert all(torch.equal(values, tensor.cpu()) for (values, _), tensor in zip(arrived, copied, strict=True))


@on_simulator()
def test_fitting_yields_to_waiting_jobs(tmp_path: Path) -> None:
    large = [torch.rand(50 + place, device="sim") for place in range(20)]
    with Capture(tmp_path / "t.jsonl") as capture:
        for tensor in large:
            tensor.sum()
        flusher = capture._flusher
        assert flusher is not None
        waiting = mock.Mock()
        waiting.empty.return_value = False

        torch.sim.synchronize()
        with mock.patch.object(flusher, "_jobs", waiting):
            flusher._fit_deferred(pause_s=1e-6)
        assert len(capture._recorder.fitter._deferred._arrived) == 19
    assert unknown_values(load(tmp_path / "t.jsonl", partial=False)) == 0


@on_simulator()
def test_single_element_with_a_stride_is_transferred() -> None:
    deferred, ids = Deferred(), torch.arange(10, device="sim").view(2, 5)
    for number, tensor in enumerate((ids[:1, 3], ids[:1, 2:3], ids[:, 1], ids.t())):
        assert deferred.add(number, "aten.sum.default", "self", tensor) is None
    arrived = [values.tolist() for values, _ in deferred.ready(GraphCaptures(), wait=True)]
    assert arrived == [[3], [[2]], [1, 6], ids.t().tolist()]


@on_simulator()
def test_device_copies_are_freed_before_fitting() -> None:
    deferred = Deferred()
    for number in range(3):
        deferred.add(number, "aten.sum.default", "self", torch.rand(4, device="sim"))
    copies = [weakref.ref(item.copy) for item in deferred._waiting]
    ready = deferred.ready(GraphCaptures(), wait=True)
    next(ready)
    assert len(deferred._arrived) == 2
    assert [copy() for copy in copies] == [None] * 3
