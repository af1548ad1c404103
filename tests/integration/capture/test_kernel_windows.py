"""Tests of the start and end of kernel records without a GPU: by default, next to other profilers, and in windows."""

from __future__ import annotations

from pathlib import Path
from threading import Thread
from time import sleep, time_ns
from typing import Any
from unittest import mock

import pytest
import torch
from kernel_records import LARGE, Event, ProfileOnCpu, ProfileWithoutRecords, record_on_cpu, times_of
from torch.profiler import ProfilerActivity

from opgrip.capture import Capture
from opgrip.capture.timing import device_time, kernel_times, kernel_windows
from opgrip.traces import load


@pytest.fixture
def _device(monkeypatch: pytest.MonkeyPatch) -> None:
    record_on_cpu(monkeypatch)


@pytest.mark.usefixtures("_device")
def test_program_may_profile_itself(tmp_path: Path) -> None:
    large = torch.ones(LARGE)
    with pytest.warns(RuntimeWarning, match=r"lacks the times of kernels: the program started its profiler"):  # noqa: SIM117
        with Capture(tmp_path / "t.jsonl", device_time="kernels"):
            large.sin()
            with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as own:
                large.cos()
    assert "aten::cos" in {event.name for event in own.events()}
    assert times_of(tmp_path / "t.jsonl", "aten.sin.default") == [700]
    assert torch.autograd.profiler._prepare_profiler.__module__ != kernel_times.__name__


@pytest.mark.usefixtures("_device")
def test_program_may_emit_nvtx_ranges(tmp_path: Path) -> None:
    large = torch.ones(LARGE)
    with pytest.warns(RuntimeWarning, match=r"lacks the times of kernels: the program started its profiler"):  # noqa: SIM117
        with Capture(tmp_path / "t.jsonl"):
            large.sin()
            with torch.autograd.profiler.emit_itt():
                large.cos()
    assert times_of(tmp_path / "t.jsonl", "aten.sin.default") == [700]


@pytest.mark.usefixtures("_device")
def test_profile_of_another_thread_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Profile(ProfileWithoutRecords):
        pass

    monkeypatch.setattr(kernel_times, "ActivityProfile", Profile)
    large, own = torch.ones(LARGE), torch.profiler.profile(activities=[ProfilerActivity.CPU])

    def profiled() -> None:
        with own:
            large.cos()

    with pytest.warns(RuntimeWarning, match="the program started its profiler"):  # noqa: SIM117
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
def test_kernel_records_do_not_start_while_another_thread_profiles(
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


@pytest.mark.usefixtures("_device")
def test_kernel_times_are_the_default_if_kernels_are_recorded(tmp_path: Path) -> None:
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
def test_kernel_records_start_when_the_program_initializes_its_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_kernel_records_do_not_start_during_a_graph_capture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_kernel_records_wait_for_the_graph_capture_of_another_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Profile(ProfileWithoutRecords):
        def stop(self) -> list[Event]:
            return [Event("cuda_runtime", 1, "cudaDeviceSynchronize", start=time_ns())]

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
def test_events_time_the_calls_under_another_profiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "7")
    with pytest.warns(
        RuntimeWarning, match="timed with events, not with records of their kernels: nsys profiles the program"
    ):
        assert timed_by_events(tmp_path / "t.jsonl", monkeypatch)


@pytest.mark.usefixtures("_device")
def test_events_time_the_calls_without_kernel_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_times, "recorded_activities", dict)
    assert timed_by_events(tmp_path / "t.jsonl", monkeypatch)


@pytest.mark.usefixtures("_device")
def test_kernel_records_of_a_long_step_are_taken_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    windows = []

    class Profile:
        """Profile without a real one, which a program may not end inside an operator."""

        def start(self) -> None:
            windows.append(self)

        def stop(self) -> list[Event]:
            return [Event("cuda_runtime", 1, "cudaDeviceSynchronize", start=time_ns())]

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
def test_profile_without_records_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProfileOnCpu, "stop", lambda self: self._profile.__exit__(None, None, None) or [])
    with pytest.warns(RuntimeWarning, match=r"lacks the times of kernels: torch's profiler returned no records"):  # noqa: SIM117
        with Capture(tmp_path / "t.jsonl"):
            torch.ones(LARGE).sin()
    assert load(tmp_path / "t.jsonl", partial=False).calls["device_ns"].isna().all()


@pytest.mark.usefixtures("_device")
def test_calls_after_the_last_kernel_record_have_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Profile(ProfileWithoutRecords):
        def stop(self) -> list[Event]:
            return [Event("cuda_runtime", 1, "cudaLaunchKernel", start=full_ns)]

    monkeypatch.setattr(kernel_times, "ActivityProfile", Profile)
    monkeypatch.setattr(kernel_windows, "CUT_NS", 1_000_000)
    large = torch.ones(LARGE)
    with pytest.warns(RuntimeWarning, match="lacks times of some kernels"):  # noqa: SIM117
        with Capture(tmp_path / "t.jsonl"):
            large.sin()
            sleep(0.01)
            full_ns = time_ns()
            sleep(0.01)
            large.cos()
    assert times_of(tmp_path / "t.jsonl", "aten.sin.default") == [0]
    assert load(tmp_path / "t.jsonl").calls["device_ns"].notna().tolist() == [True, False]


@pytest.mark.usefixtures("_device")
@pytest.mark.parametrize(("lost", "unknown"), [(0, 0), (1, 0), (2, 1), (3, 2)])
def test_calls_before_the_first_record_have_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: int, unknown: int
) -> None:
    begun: list[int] = []

    def launch(kind: str) -> bool:
        begun[:] = [time_ns(), time_ns()]
        return True

    def stop(self: ProfileOnCpu) -> list[Event]:
        own = [
            event
            for number, at in enumerate(begun, 90)
            for event in (Event("cuda_runtime", number, "cudaLaunchKernel", at), Event("kernel", number, duration=1))
        ]
        events = own + original(self)
        kernels = [event for event in events if event.kind == "kernel"]
        # launches stay, as in torch's profiler
        return [event for event in events if event not in kernels[:lost]]

    original = ProfileOnCpu.stop
    monkeypatch.setattr(kernel_times, "launch_nothing", launch)
    monkeypatch.setattr(ProfileOnCpu, "stop", stop)
    large = torch.ones(LARGE)
    with Capture(tmp_path / "t.jsonl"):
        for _ in range(4):
            large.sin()
        large.view(2, -1)
    times = load(tmp_path / "t.jsonl", partial=False).calls["device_ns"]
    # also unknown: the call that launched the first recorded kernel, because it may have launched a lost one before
    assert times.isna().tolist() == [True] * unknown + [False] * (5 - unknown)
    assert times[unknown:].tolist() == [700] * (4 - unknown) + [0]
