"""Kernels' records without a GPU: launches, kernels and devices imitate the interface of the real profiler's events,
with the times and threads at which the real profiler saw the calls' operators on the CPU.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from opgrip.capture.recording import wrapped_operators
from opgrip.capture.timing import kernel_times
from opgrip.traces import load

LARGE = 20
DURATIONS = {"aten::sin": 700, "aten::cos": 900, "aten::mul": 50}


@dataclass(frozen=True)
class Event:
    """Attributes of `torch._C._autograd._KinetoEvent` that `launched_by` reads, of torch with and without
    `activity_type`.
    """

    kind: str
    correlation: int
    title: str = ""
    start: int = 0
    duration: int = 0
    resource: int = 0

    def activity_type(self) -> str:
        return self.kind

    def device_type(self) -> DeviceType:
        is_on_host = self.kind.endswith(("_runtime", "_driver")) or self.kind == "cpu_op"
        return DeviceType.CPU if is_on_host else DeviceType.CUDA

    def is_user_annotation(self) -> bool:
        return self.kind == "gpu_user_annotation"

    def correlation_id(self) -> int:
        # torch does not report the correlation of operators as one of launches
        return 0 if self.kind == "cpu_op" else self.correlation

    def name(self) -> str:
        return self.title

    def start_ns(self) -> int:
        return self.start

    def duration_ns(self) -> int:
        return self.duration

    def device_resource_id(self) -> int:
        return self.resource


class ProfileOnCpu:
    """Profile of the CPU with records as if each innermost operator in `DURATIONS` had launched a kernel."""

    def __init__(self) -> None:
        self._profile: Any = torch.autograd.profiler.profile(use_cpu=True, use_kineto=True)

    def start(self) -> None:
        self._profile.__enter__()

    def stop(self) -> list[Event]:
        self._profile.__exit__(None, None, None)
        operators = [event for event in self._profile.kineto_results.events() if event.name() in DURATIONS]
        return [event for number, operator in enumerate(innermost(operators), 1) for event in launch(number, operator)]


def innermost(events: Iterable[Any]) -> Iterator[Any]:
    """Yield the events that contain no other event of their thread; outer ones begin before the capture's call does."""
    ordered = sorted(events, key=lambda event: event.start_ns())
    for event in ordered:
        inside = (other for other in ordered if event.start_ns() < other.start_ns() < event.end_ns())
        if not any(other.device_resource_id() == event.device_resource_id() for other in inside):
            yield event


def launch(number: int, operator: Any) -> tuple[Event, Event]:
    """Return the events of a kernel launch and of the kernel, as a GPU records them for an operator."""
    name, thread = operator.name(), operator.device_resource_id()
    return (
        Event("cuda_runtime", number, "cudaLaunchKernel", operator.start_ns(), 10, thread),
        Event("kernel", number, f"{name}_kernel", operator.end_ns() + 10_000, DURATIONS[name], 7),
    )


class ProfileWithoutRecords:
    """Profile that does not use torch's profiler, and counts starts and stops."""

    begun = ended = 0

    def start(self) -> None:
        type(self).begun += 1

    def stop(self) -> list[Event]:
        type(self).ended += 1
        return []


def record_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make captures treat tensors of at least `LARGE` elements as tensors on a GPU, with kernels by `ProfileOnCpu`."""

    def device_of(tensors: Any, values: Any) -> torch.device | None:
        return torch.device("cuda:0") if any(tensor.numel() >= LARGE for tensor in tensors) else None

    monkeypatch.setattr(kernel_times, "ActivityProfile", ProfileOnCpu)
    monkeypatch.setattr(kernel_times, "recorded_activities", lambda: {"cuda": ProfilerActivity.CUDA})
    monkeypatch.setattr(kernel_times, "synchronize", lambda device: None)
    monkeypatch.setattr(kernel_times, "is_started", lambda kind: kind == "cuda")
    monkeypatch.setattr(kernel_times, "is_capturing", lambda kind: False)
    monkeypatch.setattr(kernel_times, "launch_nothing", lambda kind: False)
    monkeypatch.setattr(wrapped_operators, "accelerator_of", device_of)


def times_of(path: Path, op: str) -> list[float]:
    calls = load(path, partial=False).calls
    times: list[float] = calls[calls["op"] == op]["device_ns"].tolist()
    return times
