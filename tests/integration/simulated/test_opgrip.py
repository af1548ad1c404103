"""Tests of opgrip on simulated accelerators: successes, streams, cases on two devices, and failures of a GPU."""

import gzip
import json
import os
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stderr
from io import StringIO
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest import mock

import pandas as pd
import pytest
import torch
from programs import program_path, wait_for
from settings import settings_of
from simulation import on_simulator
from torch import nn

from opgrip.capture import Capture
from opgrip.capture.program.accelerators import GraphCaptures
from opgrip.capture.signatures import fitting
from opgrip.capture.signatures.fitting import Deferred
from opgrip.errors import UserError
from opgrip.platform import peaks
from opgrip.replay import Results, replay
from opgrip.replay.analyses.roofline import measuring
from opgrip.replay.cases.cases import Case
from opgrip.replay.cases.functions import function_case
from opgrip.replay.command.opreplay import main as opreplay
from opgrip.replay.command.run_requests import request_with
from opgrip.replay.operators.devices import DeviceLostError, use_device
from opgrip.replay.results.results import FAILED, OK, Result
from opgrip.replay.run.measure import measure_cases
from opgrip.replay.run.worker import PARTS, DealtWindows
from opgrip.replay.run.workload import Workload, empty_row, load_workload
from opgrip.traces import Trace, load
from opgrip.traces.schema.arguments import tensors

LONG_US = 300_000.0


def capture_layers(path: Path, device: str = "sim:0") -> Capture:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).to(device)
    images, labels = torch.randn(5, 4).to(device), torch.tensor([0, 1, 0, 1, 1]).to(device)
    with Capture(path) as capture:
        nn.functional.cross_entropy(model(images), labels).backward()
    return capture


def replay_rows(trace: Path, *options: str) -> list[dict[str, Any]]:
    out = trace.with_suffix(".rows.json")
    assert opreplay([str(trace), "--budget", "0.01", "-o", str(out), *options]) == 0
    rows: list[dict[str, Any]] = json.loads(out.read_text())["results"]
    return rows


@on_simulator()
def test_results_of_the_device_are_compared_with_those_of_the_cpu(tmp_path: Path) -> None:
    capture_layers(tmp_path / "t.jsonl")
    x = torch.ones(4, device="sim:0")
    with Capture(tmp_path / "written.jsonl"):
        x.add_(x), torch.arange(3, device="sim:0"), x.sort()
    for name, *options in (("t", "--backward"), ("written",)):
        rows = replay_rows(tmp_path / f"{name}.jsonl", "--reference", "cpu", *options)
        assert {row["mode"] for row in rows} == {"cpu", "eager"}
        assert not {"wrong", "failed"} & {row["status"] for row in rows}, [row["error"] for row in rows]


class OfTheBackend(torch.autograd.Function):
    """A gelu with the backend's own gradient, as backends register it."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = context.saved_tensors
        return gradient * (x > 0)


@on_simulator()
def test_kernels_that_a_private_backend_registers_run_as_without_a_capture(tmp_path: Path) -> None:
    reached: list[str] = []

    def kernel(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: (reached.append(name), run(*args, **kwargs))[1]

    def dropout(x: torch.Tensor, p: float, train: bool | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, x > 0

    library = torch.library.Library("aten", "IMPL")
    # composite operators of which a backend has its own kernels, below autograd, for autograd and for autocast
    library.impl("linear", kernel("linear", lambda x, weight, bias: torch.addmm(bias, x, weight.t())), "PrivateUse1")
    library.impl("matmul", kernel("matmul", torch.mm), "AutogradPrivateUse1")
    library.impl("gelu", kernel("gelu", lambda x, approximate="none": OfTheBackend.apply(x)), "AutogradPrivateUse1")
    library.impl("native_dropout", kernel("dropout", dropout), "PrivateUse1")
    library.impl("softplus", kernel("softplus", lambda x, beta=1, threshold=20: x.float() + 1), "AutocastPrivateUse1")

    def program() -> list[list[float]]:
        reached.clear()
        x = torch.arange(6.0).view(2, 3).to("sim").requires_grad_()
        weight, bias = torch.full((3, 3), 0.5).to("sim"), torch.ones(3).to("sim")
        y = nn.functional.gelu(torch.matmul(x, weight))
        y.sum().backward()
        with torch.no_grad():
            z = nn.functional.dropout(nn.functional.linear(x, weight, bias))
        with torch.autocast("sim", dtype=torch.bfloat16):
            z = z + nn.functional.softplus(y)
        assert x.grad is not None
        return [[*item.flatten().tolist()] for item in (y.detach().cpu(), x.grad.cpu(), z.detach().cpu())]

    alone, kernels = program(), [*reached]
    assert {"linear", "matmul", "gelu", "dropout", "softplus"} <= {*kernels}
    with Capture(tmp_path / "t.jsonl"):
        watched = program()
    assert (watched, reached) == (alone, kernels)
    ops = set(load(tmp_path / "t.jsonl").calls["op"])
    assert {"aten.linear.default", "aten.native_dropout.default"} <= ops
    rows = replay_rows(tmp_path / "t.jsonl")
    assert not {"wrong", "failed"} & {row["status"] for row in rows}, [row["error"] for row in rows]


@on_simulator()
def test_capture_on_the_device_has_all_calls(tmp_path: Path) -> None:
    capture = capture_layers(tmp_path / "t.jsonl")
    trace = load(tmp_path / "t.jsonl", partial=False)
    assert capture.dropped == 0
    # the program had started the device before the capture
    assert "sim:1" in json.loads((tmp_path / "t.jsonl").read_text().splitlines()[0])["accelerator"]["devices"]
    assert {"forward", "backward"} <= set(trace.calls["phase"])
    assert list(trace.calls["op"]).count("aten.addmm.default") == 2
    devices = {spec.device for signature in trace.signatures for spec in tensors([signature.args, signature.kwargs])}
    assert devices == {"sim:0"}


@on_simulator(PYTORCH_ALLOC_CONF="expandable_segments:True")
def test_trace_and_results_describe_the_device_and_its_settings(tmp_path: Path) -> None:
    with Capture(tmp_path / "t.jsonl"):
        torch.ones(3, device="sim:1").sin()
    trace = load(tmp_path / "t.jsonl", partial=False)
    header = trace.header
    assert not trace.unknown
    assert list(header["accelerator"]["devices"]) == ["sim:0", "sim:1"]
    assert header["accelerator"]["devices"]["sim:1"]["l2_bytes"] > 0
    out = tmp_path / "rows.json"
    assert opreplay([str(tmp_path / "t.jsonl"), "--budget", "0.01", "-o", str(out)]) == 0
    accelerator = json.loads(out.read_text())["accelerator"]
    assert list(accelerator["devices"]) == ["sim:1"]
    assert accelerator["devices"]["sim:1"] == header["accelerator"]["devices"]["sim:1"]
    for facts in (header["accelerator"], accelerator):
        assert facts["settings"]["environment"] == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
        assert "flash" in facts["settings"]["attention"]


@on_simulator(SIM_DURATIONS="aten::sin=500;aten::cos=9000")
def test_calls_on_two_devices_have_device_times(tmp_path: Path) -> None:
    first, second = torch.ones(3, device="sim:0"), torch.ones(3, device="sim:1")
    with Capture(tmp_path / "t.jsonl") as capture:
        for _ in range(3):
            first.sin()
            second.cos()
            capture._flusher.flush()
    trace = load(tmp_path / "t.jsonl", partial=False)
    calls = trace.calls
    assert (calls[calls["op"] == "aten.sin.default"]["device_ns"] >= 500e3).all()
    assert (calls[calls["op"] == "aten.cos.default"]["device_ns"] >= 9000e3).all()
    devices = trace.summary("device")["device"].tolist()
    assert [name for name in devices if name != "cpu"] == ["sim:1", "sim:0"]


@on_simulator(SIM_DURATIONS="aten::cos=9000")
def test_calls_have_their_stream(tmp_path: Path) -> None:
    x, side = torch.ones(3, device="sim:0"), torch.sim.Stream()
    torch.sim.synchronize()
    with Capture(tmp_path / "t.jsonl"):
        x.sin()
        with torch.sim.stream(side):
            x.cos()
        torch.ones(3).tan()
    trace = load(tmp_path / "t.jsonl", partial=False)
    stream_of = dict(zip(trace.calls["op"], trace.calls["stream"].astype(object), strict=True))
    assert stream_of["aten.sin.default"] == 0
    assert stream_of["aten.cos.default"] == side.stream_id != 0
    assert stream_of["aten.tan.default"] is pd.NA
    table = trace.summary(["device", "stream"])
    places = list(zip(table["device"], table["stream"], strict=True))
    assert places[0] == ("sim:0", side.stream_id)
    assert {("sim:0", 0), ("cpu", pd.NA)} <= set(places)


@on_simulator()
def test_flusher_does_not_disturb_graph_capture(tmp_path: Path) -> None:
    x = torch.ones(3, device="sim")
    with Capture(tmp_path / "t.jsonl") as capture:
        for _ in range(3):
            x.sin()
        graph = torch.sim.Graph()
        with torch.sim.graph(graph):
            x.sin()
            thread = threading.Thread(target=capture._flusher.flush)
            thread.start()
            thread.join()
        graph.replay()
    calls = load(tmp_path / "t.jsonl", partial=False).calls
    assert calls[calls["op"] == "aten.sin.default"]["device_ns"].notna().tolist() == [True] * 4


@on_simulator(SIM_DURATIONS="aten::relu=700;aten::clamp_min=700")
def test_call_on_the_second_device_is_timed_there(tmp_path: Path) -> None:
    capture_layers(tmp_path / "t.jsonl", "cpu")
    options = ("--device", "sim:1", "--exec-mode", "events", "--op", "aten.relu.default")
    (row,) = replay_rows(tmp_path / "t.jsonl", *options)
    assert row["median_us"] >= 700


@on_simulator()
def test_values_of_a_side_stream_are_correct_without_waiting(tmp_path: Path) -> None:
    table, index = torch.rand(50, 3, device="sim"), torch.arange(40, device="sim")
    torch.sim.set_duration("aten::add", LONG_US)
    with Capture(tmp_path / "t.jsonl"):
        start = perf_counter()
        side = torch.sim.Stream()
        side.wait_stream(torch.accelerator.current_stream())
        with torch.sim.stream(side):
            table[index + 7]
        taken_s = perf_counter() - start
    assert taken_s < LONG_US / 1e6
    values = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    assert any(record.get("data") == list(range(7, 47)) for record in values)


@on_simulator(SIM_MEMORY=str(96 << 20))
def test_waiting_values_leave_memory_for_the_program(tmp_path: Path) -> None:
    with Capture(tmp_path / "t.jsonl") as capture:
        tensors = [torch.ones(3 << 18, device="sim") for _ in range(24)]
        for tensor in tensors:
            tensor.add_(1)
        largest = torch.empty(20 << 18, device="sim")
    assert largest.numel()
    assert capture.dropped == 0


@on_simulator()
def test_memory_columns_show_allocator_use_of_a_call(tmp_path: Path) -> None:
    table = torch.ones(500, 100, device="sim:1")
    with Capture(tmp_path / "t.jsonl"):
        table.view(-1)
        table.repeat(2, 3)
        (table[:250] * 2).sum()
    rows = {row["op"]: row for row in replay_rows(tmp_path / "t.jsonl")}
    assert rows["aten.mul.Tensor"]["reserved_bytes"] == rows["aten.mul.Tensor"]["peak_bytes"] == 250 * 100 * 4
    assert rows["aten.view.default"]["reserved_bytes"] == rows["aten.view.default"]["allocated_bytes"] == 0


@pytest.mark.alone
@on_simulator(SIM_MEMORY=str(64 << 20))
def test_device_peaks_are_measured_and_limit_its_rows(tmp_path: Path) -> None:
    os.environ["OPGRIP_CACHE"] = str(tmp_path)
    measuring.SIZES, measuring.LAUNCHES, peaks.MOST_COPIES = (64,), 20, 2
    capture_layers(tmp_path / "t.jsonl")
    rows = replay_rows(tmp_path / "t.jsonl", "--roofline", "--op", "aten.addmm*")
    assert all(row["limit_us"] > 0 for row in rows)
    [file] = (tmp_path / "machine").iterdir()
    ceilings = json.loads(file.read_text())
    assert ceilings["device"] == "sim"
    assert [level["name"] for level in ceilings["levels"]] == ["L2", "memory"]
    assert {"float32", "bfloat16", "float16"} <= ceilings["rates"].keys()


@on_simulator(SIM_DURATIONS="aten::relu=5000;aten::clamp_min=5000")
def test_device_time_is_used_for_shares_and_rows(tmp_path: Path) -> None:
    x = torch.ones(3, device="sim:0")
    with Capture(tmp_path / "t.jsonl"):
        for _ in range(3):
            x.relu()
            x.view(3, 1)
    trace = load(tmp_path / "t.jsonl", partial=False)
    calls = trace.calls[trace.calls["op"] == "aten.relu.default"]
    assert (calls["time_ns"] == calls["device_ns"]).all()
    assert trace.summary().iloc[0]["op"] == "aten.relu.default"
    row = next(row for row in replay_rows(tmp_path / "t.jsonl") if row["op"] == "aten.relu.default")
    assert row["share"] > 0.9
    assert row["method"] == "events"
    assert row["captured_us"] >= 5000 > row["captured_host_us"]
    assert 5000 <= row["median_us"] < 5100


@on_simulator(SIM_DEVICES="3")
def test_capture_creates_no_context_on_unused_devices(tmp_path: Path) -> None:
    x, index = torch.rand(50, 3, device="sim:1"), torch.arange(40, device="sim:1")
    assert [torch.sim.has_context(device) for device in range(3)] == [False, True, False]
    with Capture(tmp_path / "t.jsonl") as capture:
        for _ in range(3):
            x[index].sin()
        thread = threading.Thread(target=capture._flusher.flush)
        thread.start()
        thread.join()
        x.cos()
    assert [torch.sim.has_context(device) for device in range(3)] == [False, True, False]
    calls = load(tmp_path / "t.jsonl", partial=False).calls
    assert calls[calls["op"].isin(["aten.sin.default", "aten.cos.default"])]["device_ns"].notna().tolist() == [True] * 4


ASSERT = "device-side assert triggered"
MB = 1 << 20


def settings_on(device: str, **options: Any) -> Workload:
    few = {"iterations": 3, "warmup": 2, "cache": "warm", "clock_warmup": 0} | options
    use_device(device)
    return settings_of(device=device, memory=True, **few)


def case_of(number: int, function: Callable[[torch.Tensor], Any], size: int = 4) -> Case:
    return function_case(function, [torch.ones(size)], name=f"case{number}", number=number)


def failing(is_bad: Callable[[torch.Tensor], bool]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function whose kernel fails if `is_bad`, which shows at the next synchronization."""

    def call(x: torch.Tensor) -> torch.Tensor:
        if x.device.type == "sim" and is_bad(x):
            torch.sim.fail("aten::cos", ASSERT)
        return x.cos()

    return call


def in_run(run: int) -> Callable[[torch.Tensor], bool]:
    runs = count(1)
    return lambda x: x.device.type == "sim" and next(runs) == run


def blamed(bad: Case, settings: Workload) -> tuple[int, int]:
    """Return the case and row announced when the device was lost, for a bad case between good ones."""
    announced = []
    cases = [case_of(0, torch.sin), bad, case_of(2, torch.tan)]
    with pytest.raises(DeviceLostError, match=ASSERT):
        list(measure_cases(cases, settings, announce=lambda *at: announced.append(at)))
    return announced[-1]


@on_simulator(SIM_DEVICES="12")
def test_device_assert_in_any_run_is_attributed_to_its_row() -> None:
    for run in range(1, 4):
        bad = case_of(1, failing(in_run(run)))
        assert blamed(bad, settings_on(f"sim:{run}")) == (1, 0), f"in run {run}"


# failures in the second row of a case only, with the options that create two rows
WAYS: list[tuple[Callable[[torch.Tensor], bool], dict[str, str]]] = [
    (lambda _: torch.jit.is_tracing(), {"mode": "eager,jit"}),
    (lambda x: not x.any(), {"values": "recorded,zeros"}),
    (lambda _: torch.get_num_threads() == 2, {"threads": "1,2"}),
]


@on_simulator(SIM_DEVICES="4")
def test_device_assert_in_one_variant_loses_only_its_row() -> None:
    for is_bad, options in WAYS:
        bad, settings = case_of(1, failing(is_bad)), settings_on("sim:3", **options)
        lost = empty_row(bad, settings.variants(bad)[1], settings, FAILED, ASSERT)
        assert statuses([bad, case_of(2, torch.tan)], settings, {1: {1: lost}}) == {1: [OK, FAILED], 2: [OK, OK]}
    for place, (is_bad, options) in enumerate(WAYS):
        bad = case_of(1, failing(is_bad))
        assert blamed(bad, settings_on(f"sim:{place}", **options)) == (1, 1), options


def statuses(
    cases: list[Case], settings: Workload, cached_rows: Mapping[int, Mapping[int, Result]] | None = None
) -> dict[int, list[str]]:
    all_rows = measure_cases(cases, settings, cached_rows=cached_rows)
    return {rows[0].case: [row.status for row in rows] for rows in all_rows}


@on_simulator(SIM_FAIL=f"aten::cos={ASSERT}")
def test_device_assert_loses_one_row(tmp_path: Path) -> None:
    trace, output = tmp_path / "t.jsonl", tmp_path / "rows.json"
    with Capture(trace):
        torch.ones(3).cos()
        torch.ones(3).sin()
    few = ("--iterations", "2", "--warmup", "0", "--cache", "warm", "--clock-warmup", "0")
    assert opreplay([str(trace), "--device", "sim:1", "--op", "aten.[cs][oi]*", *few, "-o", str(output)]) == 0
    rows = Results.load(output).frame.set_index("op")
    assert rows["status"].to_dict() == {"aten.cos.default": FAILED, "aten.sin.default": OK}
    assert rows.loc["aten.cos.default", "error"] == f"it made the device unusable: SIM error: {ASSERT}"


@on_simulator(SIM_FAIL=f"aten::cos={ASSERT}")
def test_device_assert_in_a_sequence_loses_one_call(tmp_path: Path) -> None:
    trace, output = tmp_path / "t.jsonl", tmp_path / "sequence.json"
    with Capture(trace):
        torch.ones(3).sin().cos().tan()
    assert opreplay([str(trace), "--device", "sim:1", "--sequence", "--iterations", "1", "-o", str(output)]) == 0
    result = json.loads(output.read_text())["sequence"]
    assert result["calls"] == 4
    (lost,) = result["not_replayed"]
    assert (lost["op"], lost["status"], lost["count"]) == ("aten.cos.default", "unsupported", 1)
    assert lost["reason"] == f"it made the device unusable: SIM error: {ASSERT}", lost


@on_simulator(SIM_MEMORY=str(64 * MB))
def test_case_that_runs_out_of_memory_frees_it_for_the_next() -> None:
    for run in range(1, 6):
        is_run = in_run(run)

        def want_more(x: torch.Tensor, is_run: Callable[[torch.Tensor], bool] = is_run) -> torch.Tensor:
            held = torch.empty(30 * MB, dtype=torch.uint8, device=x.device)
            if is_run(x):
                torch.empty(50 * MB, dtype=torch.uint8, device=x.device)
            return held[:1]

        def take_most(x: torch.Tensor) -> torch.Tensor:
            return torch.empty(55 * MB, dtype=torch.uint8, device=x.device)[:1]

        cases = [case_of(1, want_more), case_of(2, take_most)]
        assert statuses(cases, settings_on("sim:0")) == {1: [FAILED], 2: [OK]}, f"in run {run}"
        assert torch.sim.memory_allocated("sim:0") < MB, f"in run {run}"


STEPS = 3
SIN_MS = 20  # duration of a sine and of a cosine on the device


def run(x: torch.Tensor, with_streams: bool = True) -> None:
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


BOTH = ("--device", "sim:0,sim:1")
FEW = ("--iterations", "2", "--warmup", "0", "--cache", "warm", "--clock-warmup", "0")


def capture_calls(path: Path, count: int = 7) -> Path:
    with Capture(path):
        for size in range(1, count + 1):
            torch.ones(size).sin()
        torch.ones(2).cos()
    return path


def replay_on_both(trace: Path, *options: str) -> Any:
    output = trace.with_suffix(".rows.json")
    # create contexts, so that no further process starts to query the devices
    for device in ("sim:0", "sim:1"):
        torch.ones(1, device=device)
    assert opreplay([str(trace), *FEW, *BOTH, "--op", "aten.[sc][io]*", "-o", str(output), *options]) == 0
    return Results.load(output).frame


@on_simulator(SIM_FAIL="aten::cos=device-side assert triggered", SIM_DURATIONS="aten::sin=50000")
def test_devices_share_the_cases_and_a_failing_case_costs_its_row(tmp_path: Path) -> None:
    rows = replay_on_both(capture_calls(tmp_path / "t.jsonl"))
    assert len(rows) == 8
    bad = rows[~rows["status"].isin(["ok", "contended"])]
    assert bad["op"].tolist() == ["aten.cos.default"]
    assert bad["error"].str.contains("device-side assert").all()
    assert set(rows["device"]) == {"sim:0", "sim:1"}


@on_simulator(SIM_DURATIONS="aten::sin=100000")
def test_killed_replay_on_two_devices_resumes(tmp_path: Path) -> None:
    trace, output = capture_calls(tmp_path / "t.jsonl"), tmp_path / "t.rows.json"
    journal = output.with_name(f"{output.name}.journal")
    command = [program_path("opreplay"), trace, *FEW, *BOTH, "--op", "aten.[sc][io]*", "-o", output]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        wait_for(lambda: journal.exists() and len(journal.read_text().splitlines()) > 2, process)
        process.kill()
    kept = [row for line in journal.read_text().splitlines()[1:] for row in json.loads(line)]
    assert 2 <= len(kept) < 8
    rows = replay_on_both(trace, "--resume")
    assert rows["case"].is_unique
    assert len(rows) == 8
    by_case = rows.set_index("case")
    assert all(by_case.loc[row["case"], "median_us"] == row["median_us"] for row in kept)
    assert not journal.exists()


@on_simulator()
def test_rows_of_a_case_run_on_one_device_and_the_timeline_has_both(tmp_path: Path) -> None:
    rows = replay_on_both(capture_calls(tmp_path / "t.jsonl", 3), "--mode", "eager,jit", "--profile")
    assert len(rows) == 8
    assert set(rows["status"]) == {"ok"}
    assert (rows.groupby("case")["device"].nunique() == 1).all()
    with gzip.open(tmp_path / "t.rows.timeline.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    calls = [event for event in events if event.get("cat") == "user_annotation"]
    assert len({event["pid"] for event in calls}) == 2


@on_simulator(SIM_NAMES="Small;Large")
def test_unequal_devices_are_refused(tmp_path: Path) -> None:
    trace = capture_calls(tmp_path / "t.jsonl", 1)
    done = subprocess.run([program_path("opreplay"), trace, *BOTH], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        "opreplay: error: sim:0 is Small (1.1 GB), and sim:1 is Large (1.1 GB): "
        "name devices of one kind with --device\n"
    )


@on_simulator()
def test_options_for_one_device_are_refused_with_two(tmp_path: Path) -> None:
    trace = capture_calls(tmp_path / "t.jsonl", 1)
    for option, problem in [
        ("--sequence", "--sequence runs on one device"),
        ("--nsys", "nsys profiles one device"),
        ("--ncu", "ncu profiles one device"),
    ]:
        with redirect_stderr(StringIO()) as errors:
            assert opreplay([str(trace), *BOTH, option]) == 2
        assert errors.getvalue() == f"opreplay: error: {problem}: name one with --device\n"


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("spread") / "t.jsonl"
    with Capture(path):
        for size in range(1, 22):
            torch.ones(size).sin()
    return path


def numbers(cases: Iterator[list[Any]]) -> list[list[int]]:
    return [[case.number for case in window] for window in cases]


def test_devices_start_with_equal_parts_and_a_finished_one_takes_more(trace: Path) -> None:
    loaded = load_workload(request_with(trace, device="cuda,cuda:1", op="aten.sin*", cache="warm"))
    windows = DealtWindows(loaded, done=())
    dealt = {device: len(windows.dealt_to(device)) for device in ("cuda:0", "cuda:1")}
    assert dealt == {"cuda:0": 12, "cuda:1": 9}
    slow, quick = windows.take("cuda:0"), windows.take("cuda:1")
    first = numbers(iter([next(slow)]))
    others = numbers(quick)
    assert len(others) > PARTS - 1
    assert numbers(slow) == []
    assert sorted(number for window in first + others for number in window) == sorted(
        case.number for case in loaded.cases
    )


@pytest.mark.parametrize("devices", ["cpu,cpu", "cpu,meta"])
def test_cases_are_spread_only_over_accelerators(trace: Path, devices: str) -> None:
    with pytest.raises(UserError, match="several devices must be different accelerators, got cpu, "):
        replay(trace, device=devices)
