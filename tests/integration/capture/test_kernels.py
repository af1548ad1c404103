"""Tests of kernel times, without a GPU: launches, kernels and devices imitate the interface of the real profiler's
events, with the times and threads at which the real profiler saw the calls' operators on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any
from unittest import mock

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from opgrip.capture import Capture, Schedule
from opgrip.capture.command.capture_options import make_parser
from opgrip.capture.command.opcapture import run as opcapture
from opgrip.capture.hooks import wrapped_operators
from opgrip.capture.timing import device_time, kernel_times
from opgrip.capture.timing.kernel_times import WrittenCalls, innermost_calls, launched_by
from opgrip.capture.torch_compat import accelerator_private
from opgrip.capture.torch_compat.accelerator_private import ActivityProfile
from opgrip.errors import UserError
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
    """Profile in which each innermost operator of `DURATIONS` launched a kernel at its begin."""

    def __init__(self) -> None:
        self._profile = ActivityProfile([ProfilerActivity.CPU])

    def start(self) -> None:
        self._profile.start()

    def stop(self) -> list[Event]:
        operators = [event for event in self._profile.stop() if event.name() in DURATIONS]
        return [event for number, operator in enumerate(innermost(operators), 1) for event in launch(number, operator)]


def innermost(events: Iterable[Any]) -> Iterator[Any]:
    """Yield the events without an inner event of the same name: outer ones begin before the capture sees the call."""
    ordered = sorted(events, key=lambda event: event.start_ns())
    for event in ordered:
        inside = (other for other in ordered if event.start_ns() < other.start_ns() < event.end_ns())
        if not any(other.device_resource_id() == event.device_resource_id() for other in inside):
            yield event


def launch(number: int, operator: Any) -> tuple[Event, Event]:
    """Return a GPU's events for an operator's kernel."""
    name, thread = operator.name(), operator.device_resource_id()
    return (
        Event("cuda_runtime", number, "cudaLaunchKernel", operator.start_ns(), 10, thread),
        Event("kernel", number, f"{name}_kernel", operator.end_ns() + 10_000, DURATIONS[name], 7),
    )


@pytest.fixture(params=[True, False], ids=["activity types", "device types"])
def _kinds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Separate launches and device work as torch with `activity_type` does, and as torch 2.11 does without it."""
    monkeypatch.setattr(accelerator_private, "_tells_kind", request.param)


@pytest.fixture
def _device(monkeypatch: pytest.MonkeyPatch) -> None:
    def device_of(tensors: Any, values: Any) -> torch.device | None:
        return torch.device("cuda:0") if any(tensor.numel() >= LARGE for tensor in tensors) else None

    monkeypatch.setattr(kernel_times, "ActivityProfile", ProfileOnCpu)
    monkeypatch.setattr(kernel_times, "recorded_activities", lambda: {"cuda": ProfilerActivity.CUDA})
    monkeypatch.setattr(kernel_times, "synchronize", lambda device: None)
    monkeypatch.setattr(kernel_times, "is_started", lambda kind: kind == "cuda")
    monkeypatch.setattr(kernel_times, "is_capturing", lambda kind: False)
    monkeypatch.setattr(wrapped_operators, "accelerator_of", device_of)


def times_of(path: Path, op: str) -> list[float]:
    calls = load(path, partial=False).calls
    times: list[float] = calls[calls["op"] == op]["device_ns"].tolist()
    return times


@pytest.mark.usefixtures("_device", "_kinds")
def test_calls_have_the_times_of_the_kernels_that_they_launched(tmp_path: Path) -> None:
    large, small = torch.ones(LARGE), torch.ones(3)
    with Capture(tmp_path / "t.jsonl", device_time="kernels") as capture:
        for _ in range(30):
            large.sin()
            large.cos()
            large.view(2, -1)
            small.neg()
    assert capture.dropped == 0
    trace = load(tmp_path / "t.jsonl", partial=False)
    assert times_of(tmp_path / "t.jsonl", "aten.sin.default") == [700] * 30
    assert times_of(tmp_path / "t.jsonl", "aten.cos.default") == [900] * 30
    assert times_of(tmp_path / "t.jsonl", "aten.view.default") == [0] * 30
    assert trace.calls[trace.calls["op"] == "aten.neg.default"]["device_ns"].isna().all()
    op_by_signature = {signature.number: signature.op for signature in trace.signatures}
    assert [(op_by_signature[item.signature], item.names, item.launches, item.device_ns) for item in trace.kernels] == [
        ("aten.sin.default", ["aten::sin_kernel"], [30], [21_000]),
        ("aten.cos.default", ["aten::cos_kernel"], [30], [27_000]),
    ]


@pytest.mark.usefixtures("_device")
def test_kernels_of_another_thread_go_to_its_calls(tmp_path: Path) -> None:
    large = torch.ones(LARGE)

    def sines() -> None:
        for _ in range(5):
            large.sin()

    with Capture(tmp_path / "t.jsonl", device_time="kernels"):
        thread = Thread(target=sines)
        # the real profiler sees only operators of the thread that started it
        large.cos()
        thread.start()
        thread.join()
        large.cos()
    assert times_of(tmp_path / "t.jsonl", "aten.cos.default") == [900] * 2


@pytest.mark.usefixtures("_device")
def test_an_extension_s_function_has_the_kernels_of_all_that_it_calls(tmp_path: Path) -> None:
    large = torch.ones(LARGE)
    import operator

    with Capture(tmp_path / "t.jsonl", device_time="kernels", extensions=["operator"]):
        operator.mul(large, large)
    calls = load(tmp_path / "t.jsonl", partial=False).calls
    assert calls["device_ns"].tolist() == [50, 50]
    assert calls["inside"].notna().tolist() == [False, True]


@pytest.mark.usefixtures("_device")
def test_each_recorded_step_has_its_kernels(tmp_path: Path) -> None:
    large = torch.ones(LARGE)
    schedule = Schedule(skip=1, active=1, repeat=3)
    with Capture(tmp_path / "t.jsonl", device_time="kernels", schedule=schedule) as capture:
        for step in range(6):
            large.sin()
            large.cos()
            capture.step()
            if step == 2 and capture._flusher is not None:
                capture._flusher.flush()
    assert times_of(tmp_path / "t.jsonl", "aten.sin.default") == [700] * 3
    assert times_of(tmp_path / "t.jsonl", "aten.cos.default") == [900] * 3


@pytest.mark.usefixtures("_device")
def test_a_profile_that_cannot_begin_costs_the_times_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: ProfileOnCpu) -> None:
        raise RuntimeError("Profiler is already enabled on this thread")

    monkeypatch.setattr(ProfileOnCpu, "start", fail)
    with pytest.warns(RuntimeWarning, match=r"lacks times of kernels: .*already enabled"):  # noqa: SIM117
        with Capture(tmp_path / "t.jsonl", device_time="kernels"):
            torch.ones(LARGE).sin()
    assert load(tmp_path / "t.jsonl", partial=False).calls["device_ns"].isna().all()


@pytest.mark.usefixtures("_device")
def test_a_program_may_profile_itself(tmp_path: Path) -> None:
    large = torch.ones(LARGE)
    with pytest.warns(RuntimeWarning, match=r"lacks times of kernels: the program profiled itself"):  # noqa: SIM117
        with Capture(tmp_path / "t.jsonl", device_time="kernels"):
            large.sin()
            with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as own:
                large.cos()
    assert "aten::cos" in {event.name for event in own.events()}
    assert times_of(tmp_path / "t.jsonl", "aten.sin.default") == [700]
    assert torch.autograd.profiler._prepare_profiler.__module__ != kernel_times.__name__


@pytest.mark.usefixtures("_device")
def test_a_program_may_emit_ranges_for_another_profiler(tmp_path: Path) -> None:
    large = torch.ones(LARGE)
    with pytest.warns(RuntimeWarning, match=r"lacks times of kernels: the program profiled itself"):  # noqa: SIM117
        with Capture(tmp_path / "t.jsonl"):
            large.sin()
            with torch.autograd.profiler.emit_itt():
                large.cos()
    assert times_of(tmp_path / "t.jsonl", "aten.sin.default") == [700]


class ProfileWithoutRecords:
    """Profile that begins and ends none of torch's, and counts both."""

    begun = ended = 0

    def start(self) -> None:
        type(self).begun += 1

    def stop(self) -> list[Event]:
        type(self).ended += 1
        return []


@pytest.mark.usefixtures("_device")
def test_a_profile_of_another_thread_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Profile(ProfileWithoutRecords):
        pass

    monkeypatch.setattr(kernel_times, "ActivityProfile", Profile)
    large, own = torch.ones(LARGE), torch.profiler.profile(activities=[ProfilerActivity.CPU])

    def profiled() -> None:
        with own:
            large.cos()

    with pytest.warns(RuntimeWarning, match="the program profiled itself"):  # noqa: SIM117
        with Capture(tmp_path / "t.jsonl"):
            large.sin()
            thread = Thread(target=profiled)
            thread.start()
            thread.join()
    assert "aten::cos" in {event.name for event in own.events()}
    # torch crashes if the first of two profiles ends after the other one
    assert (Profile.begun, Profile.ended) == (1, 0)


@pytest.mark.usefixtures("_device")
@pytest.mark.parametrize("device_time", ["auto", "kernels"])
def test_no_records_begin_while_another_thread_profiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device_time: str
) -> None:
    class Profile(ProfileWithoutRecords):
        pass

    monkeypatch.setattr(kernel_times, "ActivityProfile", Profile)
    monkeypatch.setattr(torch.autograd.profiler, "_is_profiler_enabled", True)
    with pytest.warns(RuntimeWarning, match="the program profiles itself"):  # noqa: SIM117
        with Capture(tmp_path / "t.jsonl", device_time=device_time):
            torch.ones(LARGE).sin()
    assert Profile.begun == 0


@pytest.mark.usefixtures("_kinds")
def test_the_work_of_a_device_goes_to_the_thread_that_launched_it() -> None:
    events = [
        Event("cuda_runtime", 1, "cudaLaunchKernel", 1_100, 5, 41),
        Event("kernel", 1, "add", 5_000, 30, 7),
        Event("cuda_driver", 2, "cuLaunchKernel", 1_200, 5, -2),
        Event("gpu_memcpy", 2, "Memcpy HtoD", 6_000, 40, 7),
        Event("gpu_memset", 3, "of a launch before the profile", 6_500, 9, 7),
        Event("cpu_op", 4, "aten::add", 1_000, 500, 41),
        Event("gpu_user_annotation", 1, "step", 4_000, 9_000, 7),
    ]
    launched = launched_by(events, 1_000)
    assert [(item.name, item.thread, item.at_ns, item.duration_ns) for item in launched] == [
        ("add", 41, 100, 30),
        ("Memcpy HtoD", (1 << 32) - 2, 200, 40),
    ]


@pytest.mark.usefixtures("_kinds")
def test_what_is_launched_in_a_call_within_another_counts_to_both() -> None:
    block = WrittenCalls(0, (41,), 0, [5, 6, 7], [20, 10, 70], [30, 50, 90], [-1, 0, 0])
    launched = launched_by(
        [
            Event(kind, number, name, at, 3, 41)
            for number, (name, at) in enumerate([("in", 25), ("around", 40), ("between", 60), ("after", 95)], 1)
            for kind in ("cuda_runtime", "kernel")
        ],
        0,
    )
    inner = [(block.signatures[place], item.name) for block, place, item in innermost_calls([block], launched)]
    assert inner == [(5, "in"), (6, "around")]
    assert block.device_ns == [3, 6, 0]


def test_without_records_of_kernels_the_option_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernel_times, "recorded_activities", dict)
    with pytest.raises(UserError, match="no device here keeps records of its kernels"):  # noqa: SIM117
        with Capture(tmp_path / "t.jsonl", device_time="kernels"):
            pass
    monkeypatch.setattr(kernel_times, "recorded_activities", lambda: {"cuda": ProfilerActivity.CUDA})
    monkeypatch.setattr(kernel_times, "synchronize", lambda device: None)
    args = make_parser().parse_args(["--device-time", "kernels", "-o", str(tmp_path / "t.jsonl")])
    with pytest.raises(UserError, match="the device cpu keeps no records of its kernels"):
        opcapture(args, None)
    assert not (tmp_path / "t.jsonl").exists()


def test_an_unknown_way_to_time_a_device_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="choose auto, events or kernels"):
        Capture(tmp_path / "t.jsonl", device_time="clocks")


@pytest.mark.usefixtures("_device")
def test_records_end_when_every_device_has_done_its_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    class Profile(ProfileOnCpu):
        def stop(self) -> list[Event]:
            order.append("stop")
            return super().stop()

    devices = {LARGE: torch.device("cuda:0"), LARGE + 1: torch.device("cuda:1")}
    monkeypatch.setattr(kernel_times, "ActivityProfile", Profile)
    monkeypatch.setattr(kernel_times, "synchronize", lambda device: order.append(str(device)))
    monkeypatch.setattr(wrapped_operators, "accelerator_of", lambda tensors, values: devices.get(tensors[0].numel()))
    first, second = torch.ones(LARGE), torch.ones(LARGE + 1)
    with Capture(tmp_path / "t.jsonl", device_time="kernels"):
        first.sin()
        second.sin()
    assert sorted(order[:2]) == ["cuda:0", "cuda:1"]
    assert order[2:] == ["stop"]


@pytest.mark.usefixtures("_device")
def test_kernels_are_the_default_where_they_are_recorded(tmp_path: Path) -> None:
    large = torch.ones(LARGE)
    with Capture(tmp_path / "t.jsonl"):
        large.sin()
        large.cos()
    assert times_of(tmp_path / "t.jsonl", "aten.sin.default") == [700]
    assert {name for item in load(tmp_path / "t.jsonl").kernels for name in item.names} == {
        "aten::sin_kernel",
        "aten::cos_kernel",
    }


@pytest.mark.usefixtures("_device")
def test_records_begin_when_the_program_starts_its_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    monkeypatch.setattr(kernel_times, "is_started", lambda kind: kind in started)
    asked: list[str] = []

    def activities() -> dict[str, Any]:
        asked.append("activities")
        return {"cuda": ProfilerActivity.CUDA}

    monkeypatch.setattr(kernel_times, "recorded_activities", activities)
    large, small = torch.ones(LARGE), torch.ones(3)
    with Capture(tmp_path / "t.jsonl"):
        small.sin()
        assert asked == []
        started.append("cuda")
        large.sin()
        large.cos()
    assert times_of(tmp_path / "t.jsonl", "aten.sin.default")[1:] == [700]
    assert times_of(tmp_path / "t.jsonl", "aten.cos.default") == [900]


@pytest.mark.usefixtures("_device")
def test_records_do_not_begin_while_a_graph_is_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    monkeypatch.setattr(kernel_times, "is_started", lambda kind: kind in started)
    monkeypatch.setattr(kernel_times, "is_capturing", lambda kind: len(started) == 1)
    large = torch.ones(LARGE)
    with Capture(tmp_path / "t.jsonl"):
        started.append("cuda")
        large.cos()
        started.append("cuda")
        large.sin()
    assert times_of(tmp_path / "t.jsonl", "aten.sin.default") == [700]
    assert load(tmp_path / "t.jsonl").calls["device_ns"].notna().tolist() == [False, True]


@pytest.mark.usefixtures("_device")
def test_records_wait_for_the_graph_of_another_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Profile(ProfileWithoutRecords):
        def stop(self) -> list[Event]:
            return [Event("cuda_runtime", 1, "cudaDeviceSynchronize")]

    started: list[str] = []
    monkeypatch.setattr(kernel_times, "ActivityProfile", Profile)
    monkeypatch.setattr(kernel_times, "MOST_CALLS_OF_WINDOW", 300)
    monkeypatch.setattr(kernel_times, "is_started", lambda kind: kind in started)
    large = torch.ones(LARGE)
    with Capture(tmp_path / "t.jsonl") as capture:
        graphs, flusher = capture._recorder.graphs, capture._flusher
        assert flusher is not None
        started.append("cuda")
        with mock.patch.object(graphs, "_ongoing", 1):
            large.cos()
            assert Profile.begun == 0
        large.sin()
        assert Profile.begun == 1
        kept = [large.sin() for _ in range(400)]
        flusher.run_job(flusher.flush)
        with mock.patch.object(graphs, "_ongoing", 1):
            kept += [large.sin() for _ in range(400)]
            assert Profile.begun == 1
        kept += [large.sin() for _ in range(400)]
        assert Profile.begun == 2


def timed_by_events(path: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Capture a call on the device; return True if it was timed by events."""
    timed: list[object] = []

    def time_by_events(self: Any, operator: Any, device: Any, started: Any) -> Any:
        timed.append(operator)
        return operator

    monkeypatch.setattr(device_time.DeviceTimer, "timed", time_by_events)
    with Capture(path):
        torch.ones(LARGE).sin()
    return bool(timed)


@pytest.mark.usefixtures("_device")
def test_under_another_profiler_events_time_the_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "7")
    with pytest.warns(RuntimeWarning, match="timed by events, not by their kernels: nsys profiles the program"):
        assert timed_by_events(tmp_path / "t.jsonl", monkeypatch)


@pytest.mark.usefixtures("_device")
def test_without_records_events_time_the_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_times, "recorded_activities", dict)
    assert timed_by_events(tmp_path / "t.jsonl", monkeypatch)


@pytest.mark.usefixtures("_device")
def test_records_of_a_long_step_are_taken_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    windows = []

    class Profile:
        """Profile without a real one, which a program may not end inside an operator."""

        def start(self) -> None:
            windows.append(self)

        def stop(self) -> list[Event]:
            return [Event("cuda_runtime", 1, "cudaDeviceSynchronize")]

    monkeypatch.setattr(kernel_times, "ActivityProfile", Profile)
    monkeypatch.setattr(kernel_times, "MOST_CALLS_OF_WINDOW", 300)
    large = torch.ones(LARGE)
    with Capture(tmp_path / "t.jsonl") as capture:
        for _ in range(4):
            kept = [large.sin() for _ in range(400)]
            assert capture._flusher is not None
            capture._flusher.run_job(capture._flusher.flush)
    assert len(kept) == 400
    assert len(windows) >= 3
    # all calls are in a window, in which they launched nothing
    assert times_of(tmp_path / "t.jsonl", "aten.sin.default") == [0] * 1600


@pytest.mark.usefixtures("_device")
def test_a_profile_without_records_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProfileOnCpu, "stop", lambda self: self._profile.stop() and [])
    with pytest.warns(RuntimeWarning, match=r"lacks times of kernels: torch's profiler returned no records"):  # noqa: SIM117
        with Capture(tmp_path / "t.jsonl"):
            torch.ones(LARGE).sin()
    assert load(tmp_path / "t.jsonl", partial=False).calls["device_ns"].isna().all()
