"""Check each way to measure time against torch's profiler for the same work."""

from __future__ import annotations

import gzip
import json
from dataclasses import asdict
from statistics import median

import torch

from gpu.kernels import kernel_names, kernel_us, kernels_in, kernels_of, work_of
from gpu.programs import SHIPPED, capture_calls, median_us, replay_rows, row_of
from gpu.step import Facts, NotHereError, Place, Step, expect, expect_between
from opgrip.capture import Capture
from opgrip.platform.machine import find_gpu
from opgrip.replay.operators.devices import with_index
from opgrip.replay.results.results import CONTENDED, OK, RAN, UNSUPPORTED
from opgrip.replay.run.kernels import KernelColumns
from opgrip.traces import load

METHODS = ("discrete", "events", "graph")
EVENT_US = 4.0  # largest time that two events add to a kernel; a launch would add more
KERNEL_US = 1.0  # difference allowed between two profiles of a kernel
LAUNCH_US = 60.0  # largest time of a launch and the wait for it
NEAR = 0.15  # relative difference allowed between two clocks for the same work
PRODUCTS = (1024, 2048, 4096)  # rows of square matrices whose products take from tens of microseconds to milliseconds


def check_captured_times(place: Place) -> None:
    """Check that `device_ns` by events equals the kernels' time if the host does not delay the program."""
    matrices = [torch.rand(rows, rows, device=place.device) for rows in PRODUCTS]
    expected = [kernel_us(lambda x=x: torch.mm(x, x)) for x in matrices]  # type: ignore[misc]
    trace = place.folder / "times.jsonl"
    with Capture(trace, device_time="events"):
        for _ in range(20):
            for x in matrices:
                torch.mm(x, x)
    times = load(trace, partial=False).calls.query("op == 'aten.mm.default'")["device_ns"] / 1e3
    actual = [float(times[place::3].median()) for place in range(len(PRODUCTS))]
    place.note(device_us=actual, kernels_us=expected)
    for us, kernels_us in zip(actual, expected, strict=True):
        expect_between(us, (1 - NEAR) * kernels_us, (1 + NEAR) * kernels_us + 2 * EVENT_US, "device_ns in us")


def check_times_of_kernels(place: Place) -> None:
    """Check `device_ns` from the device's own records, also for a short call, and the names of kernels."""
    x, one = torch.rand(1024, 1024, device=place.device), torch.ones(1, device=place.device)
    calls = {"aten.mm.default": lambda: torch.mm(x, x), "aten.add.Tensor": lambda: one + 1}
    expected = {op: (kernel_us(run), kernel_names(kernels_of(run))) for op, run in calls.items()}
    path = place.folder / "kernels.jsonl"
    with Capture(path, device_time="kernels") as capture:
        for _ in range(20):
            for run in calls.values():
                run()
    expect(capture.dropped == 0, f"a capture dropped {capture.dropped} calls")
    trace = load(path, partial=False)
    kernels = trace.kernels_by_operator()
    for op, (kernels_us, names) in expected.items():
        us = float(trace.calls[trace.calls["op"] == op]["device_ns"].median() / 1e3)
        place.note(**{op: us, f"{op} expected": kernels_us})
        near_us = NEAR * kernels_us + KERNEL_US
        expect_between(us, kernels_us - near_us, kernels_us + near_us, f"device_ns by kernels of {op}, in us,")
        seen = set(kernels[kernels["op"] == op]["kernel"])
        expect(seen == names.keys(), f"the trace has the kernels {sorted(seen)} of {op}, not {sorted(names)}")


def check_short_call(place: Place) -> None:
    """Check that the launch is not included in the time of an addition of one element, one or two microseconds."""
    x = torch.ones(1, device=place.device)
    expected = kernel_us(lambda: x + 1)
    trace = capture_calls(place, lambda: x + 1)
    us = {method: median_us(replay_rows(place, trace, exec_mode=method)[0]) for method in METHODS}
    place.note(kernel_us=expected, **us)
    expect(us["discrete"] < LAUNCH_US, f"discrete is {us['discrete']:.1f} us")
    for method in ("events", "graph"):
        expect_between(us[method], 0.5 * expected, expected + EVENT_US, f"{method} of a kernel of {expected:.2f} us")


def check_long_call(place: Place) -> None:
    """Check that a product of milliseconds takes the same time by each method."""
    x = torch.rand(PRODUCTS[-1], PRODUCTS[-1], device=place.device)
    expected = kernel_us(lambda: torch.mm(x, x))
    trace = capture_calls(place, lambda: torch.mm(x, x))
    us = {method: median_us(replay_rows(place, trace, exec_mode=method)[0]) for method in METHODS}
    place.note(kernel_us=expected, **us)
    for method, value in us.items():
        expect_between(value, (1 - NEAR) * expected, (1 + NEAR) * expected + LAUNCH_US, f"{method} of a long product")


def check_kernels_of_rows(place: Place) -> None:
    """Check the columns of kernels in a replay, also of a CUDA graph, against another profile of the same calls."""
    one, x = torch.ones(1, device=place.device), torch.rand(1024, 1024, device=place.device)
    calls = {
        "aten.add.Tensor": lambda: one + 1,
        "aten.mm.default": lambda: torch.mm(x, x),
        "aten.sort.stable": lambda: torch.sort(x.view(-1), stable=True),
        "aten.nonzero.default": lambda: x.nonzero(),
    }
    trace = capture_calls(place, *calls.values())
    rows = replay_rows(place, trace)
    for op, run in calls.items():
        work = work_of(run)
        own = KernelColumns.of(row_of(rows, op))
        us = sum(item.us for item in work)
        place.note(**{op: {**asdict(own), "median_us": row_of(rows, op).median_us, "expected_us": us}})
        expect(own.kernels == len(work), f"{op} has {own.kernels} kernels, copies and fills, not {len(work)}")
        seen = {name.rpartition(" x")[0] for name in (own.kernel_names or "").split("; ")}
        expect(seen == {item.name for item in work}, f"{op} has the kernels {sorted(seen)}")
        near_us = NEAR * us + KERNEL_US * len(work)
        expect_between(own.gpu_us or 0.0, us - near_us, us + near_us, f"gpu_us of {op}")
        longest_us = median_us(row_of(rows, op)) * (1 + NEAR) + EVENT_US
        expect_between((own.gpu_us or 0.0) + (own.launch_gap_us or 0.0), us - near_us, longest_us, f"the span of {op}")
        is_waiting = op == "aten.nonzero.default"
        expect(own.launch_bound == is_waiting, f"launch_bound of {op} is {own.launch_bound}")
    in_graph = KernelColumns.of(
        row_of(replay_rows(place, trace, op=["aten.sort*"], exec_mode="graph"), "aten.sort.stable")
    )
    place.note(graph=asdict(in_graph))
    expect((in_graph.launches, in_graph.launch_bound) == (1, False), "a graph is not one launch without waits")


def check_caches(place: Place) -> None:
    """Check that data in the L2 cache is read faster than other data."""
    cache_bytes = torch.cuda.get_device_properties(place.device).L2_cache_size
    x = torch.rand(cache_bytes // 16, device=place.device)
    trace = capture_calls(place, lambda: x.sum())
    place.note(cache_bytes=cache_bytes)
    for method in ("events", "graph"):
        rows = replay_rows(place, trace, exec_mode=method, cache=["warm", "cold"])
        us = {row.cache: median_us(row) for row in rows}
        place.note(**{f"{method} {cache}": value for cache, value in us.items()})
        expect(us["cold"] > us["warm"], f"{method}: cold {us['cold']:.2f} us, warm {us['warm']:.2f} us")


def check_tf32(place: Place) -> None:
    """Check that products use TF32 exactly if the program allowed it by torch's newer settings."""
    settings = torch.backends.cuda.matmul
    if not hasattr(settings, "fp32_precision"):
        raise NotHereError("torch before 2.9 has no fp32_precision")
    x = torch.rand(4096 if place.kind == "cuda" else 64, 4096, device=place.device)
    traces = []
    for precision in ("ieee", "tf32"):
        settings.fp32_precision = precision
        traces.append(capture_calls(place, lambda: torch.mm(x, x.t()), name=precision))
    contexts = [trace.read_text(encoding="utf-8") for trace in traces]
    expect("cuda.matmul" in contexts[1], "the trace does not have the setting")
    ieee, tf32 = (row_of(replay_rows(place, trace), "aten.mm.default") for trace in traces)
    us_by_precision = {"ieee": median_us(ieee), "tf32": median_us(tf32)}
    place.note(**{f"{precision}_us": us for precision, us in us_by_precision.items()})
    if place.kind == "cuda" and torch.cuda.get_device_capability(place.device) >= (8, 0):
        expected = []
        for precision in ("ieee", "tf32"):
            settings.fp32_precision = precision
            expected.append(kernel_us(lambda: torch.mm(x, x.t())))
        for name, us, kernels_us in zip(us_by_precision, us_by_precision.values(), expected, strict=True):
            least, most = (1 - 2 * NEAR) * kernels_us, (1 + 2 * NEAR) * kernels_us + LAUNCH_US
            expect_between(us, least, most, f"a product by {name}, of {kernels_us:.0f} us,")


def check_clocks(place: Place) -> None:
    """Check that the column `clock_mhz` of a replay has a value that is possible according to NVML."""
    if find_gpu(with_index(place.device)) is None:
        raise NotHereError("NVML is not available: pip install nvidia-ml-py")
    import pynvml

    pynvml.nvmlInit()
    uuid = torch.cuda.get_device_properties(place.device).uuid
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        most = pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM)
    except pynvml.NVMLError as error:
        raise NotHereError(f"NVML does not report the highest clock: {error}") from error
    x = torch.rand(2048, 2048, device=place.device)
    row = replay_rows(place, capture_calls(place, lambda: torch.mm(x, x)))[0]
    place.note(clock_mhz=row.clock_mhz, most_mhz=most, throttled=row.throttled)
    expect(row.clock_mhz is not None, "the column clock_mhz is empty")
    expect_between(row.clock_mhz or 0.0, 0.3 * most, 1.01 * most, "clock_mhz after the clocks were brought up")


def check_shipped(place: Place) -> None:
    """Check the top cases of the shipped trace with each method: a device's own clock includes no launch."""
    cases: list[Facts] = []
    by_case: dict[int, dict[str, float]] = {}
    # elsewhere only the methods that are compared
    for method in METHODS if place.kind == "cuda" else ("discrete", "events"):
        for row in replay_rows(place, SHIPPED, exec_mode=method, top=place.top):
            cases.append(
                {
                    "op": row.op,
                    "shapes": row.shapes,
                    "method": method,
                    "status": row.status,
                    "error": row.error,
                    "median_us": row.median_us,
                    "p10_us": row.p10_us,
                    "p90_us": row.p90_us,
                    "samples": row.samples,
                }
            )
            if row.status == OK and row.median_us is not None:
                by_case.setdefault(row.case, {})[method] = row.median_us
    place.note(cases=cases)
    failed = [case for case in cases if case["status"] not in (*RAN, UNSUPPORTED)]
    expect(not failed, f"{len(failed)} cases are neither ok nor unsupported, such as {failed[:1]}")
    both = [us for us in by_case.values() if us.keys() >= {"events", "discrete"}]
    if not both and any(case["status"] == CONTENDED for case in cases):
        raise NotHereError("other processes used the cores in all runs of too many cases")
    expect(both, "no case is timed by events and discrete")
    place.note(events_of_discrete=median(us["events"] / us["discrete"] for us in both))
    slower = [us for us in both if us["events"] > 1.3 * us["discrete"] + EVENT_US]
    # a device emulated by the host has no time
    if place.kind == "cuda":
        expect(len(slower) <= len(both) / 10, f"{len(slower)} cases take longer by events than with their launch")


def check_timeline(place: Place) -> None:
    """Check that the timeline of `--profile` has the kernels that torch's profiler sees in a program."""
    x = torch.rand(512, 512, device=place.device)
    expected = kernel_names(kernels_of(lambda: torch.mm(x, x)))
    trace, output = capture_calls(place, lambda: torch.mm(x, x)), place.folder / "profiled.json"
    replay_rows(place, trace, profile=True, output=output)
    with gzip.open(place.folder / "profiled.timeline.json.gz", "rt") as file:
        seen = kernel_names(kernels_in(json.load(file)))
    place.note(kernels=seen)
    missing = [name for name in expected if seen.get(name, 0) < 3 * expected[name]]
    expect(not missing, f"the timeline lacks {missing[:1]}")


BY_PROFILER = "torch.profiler sees only kernels of CUDA"
STEPS = (
    Step("--device-time events against torch.profiler", check_captured_times, needs_cuda=BY_PROFILER),
    Step("--device-time kernels against torch.profiler", check_times_of_kernels, needs_cuda=BY_PROFILER),
    Step("kernels of replayed rows against torch.profiler", check_kernels_of_rows, 60.0, needs_cuda=BY_PROFILER),
    Step("an addition of one element by each method", check_short_call, needs_cuda=BY_PROFILER),
    Step("a product of milliseconds by each method", check_long_call, needs_cuda=BY_PROFILER),
    Step("--cache warm,cold", check_caches, needs_cuda="the size of the last cache is asked of CUDA"),
    Step("TF32 by fp32_precision", check_tf32),
    Step("clock_mhz and throttled", check_clocks, needs_cuda="clocks are read by NVML"),
    Step("top cases of trace:faster_rcnn by each method", check_shipped, 240.0),
    Step("--profile", check_timeline, needs_cuda=BY_PROFILER),
)
