"""Measure an accelerator, and single calls by each clock next to the device's own records of their kernels."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from itertools import count
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from gpu.kernels import WARMUP_S, device_records
from gpu.step import Facts, Place
from opgrip.capture import Capture
from opgrip.capture.timing.device_time import DeviceTimer
from opgrip.replay.operators.devices import synchronizer, use_device, with_index
from opgrip.replay.run.energy import warm_up
from opgrip.replay.timing.ranges import Range
from opgrip.replay.timing.stopwatch import LaunchTime, Stopwatch, empty_call_ns
from opgrip.traces import load

SMI_FIELDS = (
    *("name", "driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.draw", "power.limit"),
    *("temperature.gpu", "persistence_mode", "compute_mode", "ecc.mode.current", "mig.mode.current"),
)
PACKAGES = ("nvtx", "zstandard", "pynvml", "mmcv", "triton", "jax", "transformers", "timm")
TOOLS = ("nsys", "ncu", "nvcc", "gcc", "g++", "ninja")
CALLS, WARMUP_CALLS = 500, 200
SLEEP_CYCLES = 2_000_000
COPIED_BYTES, PRODUCT_ROWS = 1 << 30, 8192
TIMED, SMALL_TIMED, SKIPPED = 40, 8, 5  # runs of a call by a clock, and how many of the first are left out
REPEATS = 20  # runs of each call in a capture or a profile
NOT_IN_GRAPHS = ("nonzero",)


def measure_device(place: Place) -> None:
    """Note the time to the first use of the device, its settings, and what its basic operations cost.

    place : device of the step, and file in which the results are noted
    """
    began = perf_counter()
    torch.zeros(1, device=place.device)
    place.synchronize()
    place.note(
        context_s=perf_counter() - began,
        torch=torch.__version__,
        python=sys.version.split()[0],
        cores=os.cpu_count(),
        packages={name: find_spec(name) is not None for name in PACKAGES},
        tools={name: shutil.which(name) for name in TOOLS},
    )
    _note_marks(place)
    if place.kind == "cuda":
        _note_cuda(place)


def measure_clocks(place: Place) -> None:
    """Note the time of calls by each clock, and by captures, next to the profiler's time of their kernels.

    place : device of the step, and file in which the results are noted
    """
    device = with_index(place.device)
    use_device(device)
    warm_up(device, 0.0 if place.is_small else WARMUP_S)
    calls = calls_of_many_sizes(place)
    for name, run in calls.items():
        row: Facts = {"call": name}
        try:
            for _ in range(3):
                run()
            place.synchronize()
            row |= _times_by_clock(place, device, name, run)
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"[:200]
        place.note(**row)
    for way in ("events", "kernels") if place.kind == "cuda" else ("events",):
        path = place.kept / f"clocks-{way}.jsonl"
        with Capture(path, device_time=way) as capture:
            for _ in range(REPEATS):
                for run in calls.values():
                    run()
        rows = load(path, partial=False).calls
        us_by_operator = (rows["device_ns"] / 1e3).groupby(rows["op"], observed=True).median()
        place.note(capture=way, dropped=capture.dropped, by_op={op: round(us, 2) for op, us in us_by_operator.items()})


def calls_of_many_sizes(place: Place) -> dict[str, Callable[[], object]]:
    """Return calls on the device of `place`, whose kernels take from one microsecond to milliseconds, by name."""
    part, width = (64, 16) if place.is_small else (1, 256)
    draw = partial(torch.randn, device=place.device, dtype=torch.bfloat16)
    one, x, big = torch.ones(1, device=place.device), draw(1024 // part, 1024 // part), draw(8192 // part, 8192 // part)
    heads, images, kernel = (
        draw(4, 16, 2048 // part, 64),
        draw(max(1, 64 // part), width, 56, 56),
        draw(width, width, 3, 3),
    )
    table, index = draw(1000, 1024), torch.randint(0, 1000, (8192 // part,), device=place.device)
    single = torch.randn(2048 // part, 2048 // part, device=place.device)
    return {
        "add_1": lambda: one + 1,
        "add_1M": lambda: x + x,
        "mm_1024": lambda: torch.mm(x, x),
        "mm_8192": lambda: torch.mm(big, big),
        "mm_f32_2048": lambda: torch.mm(single, single),
        "gelu_64M": lambda: torch.nn.functional.gelu(big),
        "softmax": lambda: torch.softmax(big, -1),
        "layer_norm": lambda: torch.native_layer_norm(big, [big.shape[-1]], None, None, 1e-5),
        "sum": lambda: big.sum(0),
        "sdpa": lambda: torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True),
        "conv": lambda: torch.conv2d(images, kernel, padding=1),
        "embedding": lambda: torch.embedding(table, index),
        "sort": lambda: torch.sort(single.view(-1)),
        "topk": lambda: torch.topk(single, 16),
        "nonzero": lambda: (single > 2).nonzero(),
        "cat": lambda: torch.cat([x, x, x]),
    }


def _times_by_clock(place: Place, device: str, name: str, run: Callable[[], object]) -> Facts:
    """Return the times of the call `run`, by method of measurement.

    place : device of the step; it also decides how often the call is repeated
    device : name of that device, with its index
    name : name of the call, which decides if it can run in a CUDA graph
    """
    runs = SMALL_TIMED if place.is_small else TIMED
    row: Facts = {"kineto": _kernel_times(run) if place.kind == "cuda" else None}
    is_in_graph = place.kind == "cuda" and name not in NOT_IN_GRAPHS
    for method in ("events", "discrete", "graph") if is_in_graph else ("events", "discrete"):
        row[method] = _stopwatch_times(device, method, run, runs)
    return row


def _stopwatch_times(device: str, method: str, run: Callable[[], object], runs: int) -> Facts:
    wait = synchronizer(device)
    watch = Stopwatch(method, wait, empty_call_ns(wait), device)
    graph = watch.capture(run, [((), {})]) if method == "graph" else None
    span, launch, times_us, launches_us = Range("m", "c", 0), LaunchTime(), [], []
    for _ in range(runs):
        times_us.append(watch.time(run, [((), {})], span, launch, graph) / 1e3)
        launches_us.append(launch.last_ns / 1e3)
    rest = sorted(times_us[SKIPPED:])
    return {
        "us": median(rest),
        "p90": rest[int(0.9 * len(rest))],
        "launch_us": median(launches_us[SKIPPED:]),
        "last_launch_us": launches_us[-1],
        "outlasting": launch.outlasting,
    }


def _kernel_times(run: Callable[[], object]) -> Facts:
    """Return the median time of the kernels of a run, their number, and the time from the first to the last."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(REPEATS):
            run()
            torch.cuda.synchronize()
    kernels = device_records(profiler)
    each = len(kernels) // REPEATS
    if not each or len(kernels) % REPEATS:
        return {"us": sum(k.us for k in kernels) / REPEATS, "kernels": len(kernels) / REPEATS, "even": False}
    runs = [kernels[place * each : (place + 1) * each] for place in range(REPEATS)]
    return {
        "us": median(sum(kernel.us for kernel in kernels) for kernels in runs),
        "kernels": each,
        "span_us": median(kernels[-1].start_us + kernels[-1].us - kernels[0].start_us for kernels in runs),
    }


def _note_marks(place: Place) -> None:
    """Note the time that a capture spends on the two events around a call, and on reading them.

    place : device of the step, and file in which the results are noted
    """
    timer, number = DeviceTimer(), count()
    timed = timer.timed(lambda: None, torch.device(with_index(place.device)), lambda: next(number))
    us = _host_us(place, timed)
    starts = range(WARMUP_CALLS, WARMUP_CALLS + CALLS)
    began = perf_counter()
    timer.times_ns(starts)
    place.note(two_marks_us=us, read_marks_us=(perf_counter() - began) / CALLS * 1e6)


def _note_cuda(place: Place) -> None:
    command = ["nvidia-smi", f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    properties = torch.cuda.get_device_properties(place.device)
    place.note(smi=done.stdout.strip(), l2=properties.L2_cache_size, sm=properties.multi_processor_count)
    warm_up(with_index(place.device), WARMUP_S)
    one, event = torch.ones(1, device=place.device), torch.Event(with_index(place.device), enable_timing=True)
    stream = torch.cuda.current_stream()
    place.note(
        sleep_2M_cycles_us=_event_us(lambda: torch.cuda._sleep(SLEEP_CYCLES), 10),
        empty_events_us=_event_us(lambda: None, 50),
        launch_us=_host_us(place, lambda: one + 1),
        event_record_us=_host_us(place, lambda: event.record(stream)),
        current_stream_us=_host_us(place, torch.cuda.current_stream),
    )
    source, target = (torch.empty(COPIED_BYTES, dtype=torch.uint8, device=place.device) for _ in range(2))
    matrix = torch.randn(PRODUCT_ROWS, PRODUCT_ROWS, device=place.device, dtype=torch.bfloat16)
    place.note(
        copy_GBps=2 * COPIED_BYTES / _event_us(lambda: target.copy_(source), 10) / 1e3,
        bf16_TFLOPs=2 * PRODUCT_ROWS**3 / _event_us(lambda: torch.mm(matrix, matrix), 10) / 1e6,
    )


def _event_us(run: Callable[[], object], runs: int) -> float:
    times = []
    for _ in range(runs):
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        run()
        after.record()
        after.synchronize()
        times.append(before.elapsed_time(after) * 1e3)
    return median(times)


def _host_us(place: Place, run: Callable[..., Any]) -> float:
    for _ in range(WARMUP_CALLS):
        run()
    place.synchronize()
    began = perf_counter()
    for _ in range(CALLS):
        run()
    us = (perf_counter() - began) / CALLS * 1e6
    place.synchronize()
    return us
