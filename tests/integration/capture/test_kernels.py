"""Times of calls and kernels of accelerators without a GPU, see `kernel_records`, and programs that capture a graph."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from threading import Thread, get_native_id
from time import sleep, time_ns
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_records import DURATIONS, LARGE, Event, ProfileOnCpu, ProfileWithoutRecords, record_on_cpu, times_of
from programs import ROOT, run_python
from settings import rows_of, settings_of
from torch.profiler import ProfilerActivity

from opgrip.capture import Capture, Schedule
from opgrip.capture.command.capture_options import make_parser
from opgrip.capture.command.opcapture import run as opcapture
from opgrip.capture.hooks import graphs
from opgrip.capture.program.accelerators import DeviceQueries, GraphCaptures
from opgrip.capture.recording import recorder as recording
from opgrip.capture.recording import wrapped_operators
from opgrip.capture.timing import device_time, kernel_times
from opgrip.capture.timing.kernel_times import WrittenCalls, innermost_calls
from opgrip.errors import UserError
from opgrip.platform import activity_records
from opgrip.platform.activity_records import LaunchedWork, launched_by
from opgrip.replay.cases.cases import make_cases
from opgrip.replay.operators import devices
from opgrip.replay.reports.cells import to_frame
from opgrip.replay.results.results import OK, RAN, Result, Row
from opgrip.replay.run import measure
from opgrip.replay.run.kernels import KernelColumns, fill_kernels, kernel_columns
from opgrip.traces import load


@pytest.fixture(params=[True, False], ids=["activity types", "device types"])
def _kinds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Separate launches and device work as torch with `activity_type` does, and as torch 2.11 does without it."""
    monkeypatch.setattr(activity_records, "_has_activity_type", request.param)


@pytest.fixture
def _device(monkeypatch: pytest.MonkeyPatch) -> None:
    record_on_cpu(monkeypatch)


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


class Graph:
    """Graph of the operators that run while it is captured; a launch does not run them."""

    def __init__(self) -> None:
        self.began_ns = self.ended_ns = 0
        self.launched_ns: list[int] = []

    def capture_begin(self) -> None:
        self.began_ns = time_ns()

    def capture_end(self) -> None:
        self.ended_ns = time_ns()

    def replay(self) -> None:
        self.launched_ns.append(time_ns())


@pytest.mark.usefixtures("_device", "_kinds")
@pytest.mark.parametrize("lost", [0, 1])
def test_kernels_of_a_graph_belong_to_its_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: int) -> None:
    class Profile(ProfileOnCpu):
        """Profile in which a captured operator launches a kernel in each launch of the graph, from the last on."""

        def stop(self) -> list[Event]:
            events = super().stop()
            pairs = list(zip(events[::2], events[1::2], strict=True))
            captured = [pair for pair in pairs if graph.began_ns < pair[0].start < graph.ended_ns]
            others = [event for pair in pairs if pair not in captured for event in pair]
            launches = [
                Event("cuda_runtime", number, "cudaGraphLaunch", at, 10, get_native_id())
                for number, at in enumerate(graph.launched_ns, 1000)
            ]
            kernels = [
                Event("kernel", launch.correlation, kernel.title, launch.start + 9 * place, kernel.duration, 7)
                for launch in launches
                for place, (_, kernel) in enumerate(captured[lost:])
            ]
            return [*others, *(launch for launch, _ in captured), *launches, *kernels[::-1]]

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(kernel_times, "ActivityProfile", Profile)
    monkeypatch.setattr(graphs, "with_index", lambda device: torch.device("cuda:0"))
    monkeypatch.setattr(recording, "device_of", lambda signature: "cuda:0")
    large, graph = torch.ones(LARGE), Graph()
    with Capture(tmp_path / "t.jsonl", device_time="kernels") as capture:
        large.cos()
        graph.capture_begin()
        large.sin()
        large.view(2, -1)
        large.cos()
        graph.capture_end()
        for _ in range(3):
            graph.replay()
        large.sin()
    assert capture.dropped == 0
    trace = load(tmp_path / "t.jsonl", partial=False)
    sines, cosines = (times_of(tmp_path / "t.jsonl", f"aten.{name}.default") for name in ("sin", "cos"))
    assert (cosines[0], sines[-1]) == (900, 700)
    by_op = trace.kernels_by_operator().set_index("op")["launches"].to_dict()
    if lost:
        # the time of fewer kernels than nodes is divided like that of the same calls outside of the graph
        assert by_op == {"aten.cos.default": 1, "aten.sin.default": 1, "torch.cuda:Graph.replay": 3}
        assert sum(sines[:-1]) + sum(cosines[1:]) == 3 * 900
        assert sines[0] / cosines[1] == pytest.approx(7 / 9, rel=0.01)
    else:
        assert by_op == {"aten.cos.default": 4, "aten.sin.default": 4}
        assert (sines, cosines) == ([700] * 4, [900] * 4)
    assert times_of(tmp_path / "t.jsonl", "aten.view.default") == [0] * 3


@pytest.mark.usefixtures("_device")
def test_profile_that_cannot_start_loses_only_the_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: ProfileOnCpu) -> None:
        raise RuntimeError("Profiler is already enabled on this thread")

    monkeypatch.setattr(ProfileOnCpu, "start", fail)
    with pytest.warns(RuntimeWarning, match=r"lacks the times of kernels: .*already enabled"):  # noqa: SIM117
        with Capture(tmp_path / "t.jsonl", device_time="kernels"):
            torch.ones(LARGE).sin()
    assert load(tmp_path / "t.jsonl", partial=False).calls["device_ns"].isna().all()


@pytest.mark.usefixtures("_kinds")
def test_kernel_belongs_to_the_thread_that_launched_it() -> None:
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
def test_kernel_of_a_nested_call_counts_for_both_calls() -> None:
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


def test_device_time_kernels_is_refused_without_kernel_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernel_times, "recorded_activities", dict)
    with pytest.raises(UserError, match="no device here records its kernels"):  # noqa: SIM117
        with Capture(tmp_path / "t.jsonl", device_time="kernels"):
            pass
    monkeypatch.setattr(kernel_times, "recorded_activities", lambda: {"cuda": ProfilerActivity.CUDA})
    monkeypatch.setattr(kernel_times, "synchronize", lambda device: None)
    args = make_parser().parse_args(["--device-time", "kernels", "-o", str(tmp_path / "t.jsonl")])
    with pytest.raises(UserError, match="the device cpu does not record its kernels"):
        opcapture(args, None)
    assert not (tmp_path / "t.jsonl").exists()


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


def timed_by_events(path: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
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
def test_calls_after_the_last_kernel_record_have_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Profile(ProfileWithoutRecords):
        def stop(self) -> list[Event]:
            return [Event("cuda_runtime", 1, "cudaLaunchKernel", start=full_ns)]

    monkeypatch.setattr(kernel_times, "ActivityProfile", Profile)
    monkeypatch.setattr(kernel_times, "CUT_NS", 1_000_000)
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
@pytest.mark.parametrize(("lost", "unknown"), [(1, 0), (3, 2)])
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


# records of five runs of each call, by torch 2.11: name, device type, begin and duration in ns, correlation number
H200 = ROOT / "tests/support/fakes/h200_records.json"


def replay_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "records_work", lambda device: True)
    monkeypatch.setattr(activity_records, "ActivityProfile", ProfileOnCpu)


def replay_calls(folder: Path, call: Callable[[], object], **options: Any) -> list[Result]:
    with Capture(folder / "t.jsonl"):
        call()
    rows = rows_of(make_cases(load(folder / "t.jsonl")), settings_of(**({"iterations": 5} | options)))
    assert all(row.status in RAN for row in rows), rows
    return rows


@pytest.mark.parametrize("options", [{}, {"cache": "cold"}, {"exec_mode": "continuous"}, {"mode": "eager,jit"}])
def test_row_has_the_kernels_of_one_run(
    options: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay_on_cpu(monkeypatch)
    x = torch.ones(9)
    rows = replay_calls(tmp_path, lambda: (x.sin(), x.view(3, 3)), **options)
    columns = {(row.op, row.mode): KernelColumns.of(row) for row in rows}
    for (op, _), own in columns.items():
        if op == "aten.sin.default":
            assert own == KernelColumns(1, 1, DURATIONS["aten::sin"] / 1e3, 0.0, False, "aten::sin_kernel x1")
        else:
            assert own == KernelColumns(0, 0, 0.0, 0.0, False, "")
    assert len(columns) == len(rows) == 2 * len(options.get("mode", "eager").split(","))
    assert to_frame(rows)["gpu_us"].tolist() == [KernelColumns.of(row).gpu_us for row in rows]


def test_failing_profile_loses_only_its_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: ProfileOnCpu) -> None:
        raise RuntimeError("Profiler is already enabled on this thread")

    replay_on_cpu(monkeypatch)
    monkeypatch.setattr(ProfileOnCpu, "start", fail)
    x = torch.ones(9)
    [row] = replay_calls(tmp_path, lambda: x.sin())
    assert row.median_us
    assert row.added == {}


def records_of(call: str) -> list[LaunchedWork]:
    rows = json.loads(H200.read_text(encoding="utf-8"))[call]
    kinds = {"CPU": "cuda_runtime", "CUDA": "kernel"}
    return launched_by(
        [Event(kinds[device], number, name, at, duration) for name, device, at, duration, number in rows]
    )


@pytest.mark.parametrize(
    ("call", "each", "gpu_us", "gap_us", "is_bound"),
    [
        ("one_add", 1, 0.928, 0.0, False),
        ("one_sort", 14, 259.98, 22.35, False),
        ("one_nonzero", 6, 23.454, 46.21, True),
    ],
)
def test_columns_are_computed_from_h200_records(
    call: str, each: int, gpu_us: float, gap_us: float, is_bound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activity_records, "_has_activity_type", False)
    work = sorted(records_of(call), key=lambda item: item.launch)
    assert len(work) == 5 * each
    # as in a replay, without the first run
    own = kernel_columns([work[place : place + each] for place in range(each, 5 * each, each)])
    assert (own.kernels, own.launches, own.launch_bound) == (each, each, is_bound)
    assert own.gpu_us == pytest.approx(gpu_us, abs=0.01)
    assert own.launch_gap_us == pytest.approx(gap_us, abs=0.01)


def test_work_on_several_streams_and_in_a_graph_is_counted() -> None:
    """Overlapping work keeps a device busy once, and a graph's kernels have one launch, before any gap."""
    side = [LaunchedWork("a", 0, 0, 50, 1, 5, 100), LaunchedWork("b", 0, 10, 50, 2, 15, 120)]
    graph = [LaunchedWork("c", 0, 0, 10, 3, 125, start) for start in (100, 130, 200)]
    # a launch that began before the device was idle, but returned later
    late = [LaunchedWork("d", 0, 0, 10, 4, 90, 100), LaunchedWork("d", 0, 105, 10, 5, 145, 150)]
    columns = [kernel_columns([run]) for run in (side, graph, late)]
    assert [(own.launches, own.gpu_us, own.launch_gap_us, own.launch_bound) for own in columns] == [
        (2, 0.07, 0.0, False),
        (1, 0.03, 0.08, False),
        (2, 0.02, 0.04, True),
    ]
    assert [own.kernel_names for own in columns] == ["a x1; b x1", "c x3", "d x2"]


def test_rows_have_shares_of_their_gpus_datasheet(monkeypatch: pytest.MonkeyPatch) -> None:
    run = [LaunchedWork("gemm", 0, 0, 200_000, 1, 5, 100)]
    row = Result(0, "aten.mm.default", "", 1, 1.0, "eager", "cuda:0", OK, 1.0, 1.0, median_us=250.0)
    row = replace(row, flops=int(67e12 * 100e-6), bytes_moved=int(4.8e12 * 50e-6), math_dtype="float32")
    monkeypatch.setattr(devices, "name_of", lambda device: "NVIDIA H200")

    def columns_of(row: Result, context: dict[str, Any]) -> KernelColumns:
        filled = Row.of(row)
        fill_kernels(filled, [run], context)
        return KernelColumns.of(filled)

    shares = [
        (own.of_peak_rate, own.of_peak_bandwidth)
        for own in (
            columns_of(with_dtype, context)
            for with_dtype, context in (
                (row, {}),
                (row, {"matmul_precision": "high"}),
                (replace(row, math_dtype="float8_e4m3fn"), {}),
                (replace(row, math_dtype="complex64"), {}),
            )
        )
    ]
    rates = [0.5, 0.5 * 67 / 494.5, 0.5 * 67 / 1979, None]
    assert shares == [(pytest.approx(rate), pytest.approx(0.25)) for rate in rates]
    monkeypatch.setattr(devices, "name_of", lambda device: "NVIDIA A100-SXM4-40GB MIG 1g.5gb")
    assert columns_of(row, {}).of_peak_rate is None


class Clock:
    now = 0
    events = 0
    waited = 0


class Mark:
    def __init__(self) -> None:
        Clock.events += 1
        self.time = 0

    def record(self, stream: Any = None) -> None:
        Clock.now += 1
        self.time = Clock.now

    def synchronize(self) -> None:
        Clock.waited += 1

    def elapsed_time(self, later: Any) -> float:
        return float(later.time - self.time)


@pytest.fixture
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock.now = Clock.events = Clock.waited = 0

    def device_of(tensors: Any, values: Any) -> torch.device | None:
        return torch.device("cuda:0") if any(tensor.numel() > 10 for tensor in tensors) else None

    monkeypatch.setattr(device_time, "make_event", lambda device: Mark())
    monkeypatch.setattr(device_time, "current_stream", lambda device: None)
    queries = DeviceQueries(lambda: False, lambda: 0, lambda index: 0)
    monkeypatch.setattr(device_time, "queries_of", lambda kind: queries)
    monkeypatch.setattr(device_time, "on_device", nullcontext)
    monkeypatch.setattr(wrapped_operators, "accelerator_of", device_of)


@pytest.mark.usefixtures("_clock")
def test_only_calls_on_a_device_have_device_times(tmp_path: Path) -> None:
    large, small = torch.ones(20), torch.ones(3)
    with Capture(tmp_path / "t.jsonl", device_time="events"):
        for _ in range(40):
            large.sin()
            small.sin()
        assert Clock.waited == 0
    trace = load(tmp_path / "t.jsonl", partial=False)
    times = trace.calls["device_ns"]
    assert times[0::2].tolist() == [1e6] * 40
    assert times[1::2].isna().all()


@pytest.mark.usefixtures("_clock")
def test_operator_that_fails_on_a_device_is_recorded(tmp_path: Path) -> None:
    large = torch.ones(20)
    with Capture(tmp_path / "t.jsonl", device_time="events") as watched:
        with pytest.raises(RuntimeError):
            large.view(7)
        large.sin()
    assert (watched.calls, watched.dropped) == (2, 0)
    assert load(tmp_path / "t.jsonl").calls["device_ns"].isna().tolist() == [True, False]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_calls_on_a_gpu_are_timed(tmp_path: Path) -> None:
    x = torch.rand(2048, 2048, device="cuda")
    with Capture(tmp_path / "t.jsonl"):
        for _ in range(20):
            x @ x
    times = load(tmp_path / "t.jsonl", partial=False).calls
    assert (times[times["op"] == "aten.mm.default"]["device_ns"] > 0).all()


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


class EmptyGraph:
    def capture_begin(self) -> None:
        if torch.is_anomaly_enabled():
            raise RuntimeError("planted")

    def capture_end(self) -> None:
        pass


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> GraphCaptures:
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(CUDAGraph=EmptyGraph))
    return GraphCaptures()


def may_ask(captures: GraphCaptures) -> bool:
    with captures.question() as answer:
        return answer


def test_devices_are_queried_only_between_graph_captures(captures: GraphCaptures) -> None:
    with captures:
        graph = EmptyGraph()
        assert may_ask(captures)
        graph.capture_begin()
        assert not may_ask(captures)
        graph.capture_end()
        assert may_ask(captures)
        with torch.autograd.set_detect_anomaly(True, check_nan=False), pytest.raises(RuntimeError, match="planted"):
            graph.capture_begin()
        assert may_ask(captures)
    assert EmptyGraph.capture_begin.__qualname__ == "EmptyGraph.capture_begin"
    assert not hasattr(EmptyGraph.capture_begin, "__wrapped__")
