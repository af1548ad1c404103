"""Read kernels from torch's own profiler, the reference for times."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from gpu.step import NotHereError
from opgrip.replay.operators.devices import with_index
from opgrip.replay.run.energy import warm_up

WARMUP = 3
WARMUP_S = 0.6  # time of work that raises the clocks of an idle GPU
KERNEL = "kernel"  # category of kernels in a timeline of torch's profiler


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel, copy or fill that ran on the device, with its start and its duration (`us`), both in us."""

    name: str
    start_us: float
    us: float


def kernels_of(run: Callable[[], object], runs: int = 1) -> list[Kernel]:
    """Return the kernels of some runs in order, after a warm-up.

    Raises NotHereError if the profiler sees none.
    """
    if not torch.cuda.is_available():
        raise NotHereError("torch.profiler sees only kernels of CUDA")
    warm_up(with_index("cuda"), WARMUP_S)
    for _ in range(WARMUP):
        run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(runs):
            run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "timeline.json"
        profiler.export_chrome_trace(str(path))
        kernels = kernels_in(json.loads(path.read_text(encoding="utf-8")))
    if not kernels:
        raise NotHereError("torch.profiler sees no kernels on this machine")
    return kernels


def kernels_in(timeline: Mapping[str, Any]) -> list[Kernel]:
    """Return the kernels of a timeline in order."""
    events = (event for event in timeline["traceEvents"] if event.get("cat") == KERNEL)
    kernels = [Kernel(str(event["name"]), float(event["ts"]), float(event["dur"])) for event in events]
    return sorted(kernels, key=lambda kernel: kernel.start_us)


def kernel_us(run: Callable[[], object], runs: int = 20) -> float:
    """Return the median device time of all kernels of a run; raises as `kernels_of` does."""
    return median(_sums(kernels_of(run, runs), runs))


def device_records(profiler: profile) -> list[Kernel]:
    """Return kernels, copies and fills that a closed profiler of torch has seen, in order, each once."""
    events = (
        Kernel(event.name(), event.start_ns() / 1e3, event.duration_ns() / 1e3)
        for event in profiler.profiler.kineto_results.events()
        if event.device_type().name == "CUDA" and not event.is_user_annotation()
    )
    return sorted(events, key=lambda kernel: kernel.start_us)


def work_of(run: Callable[[], object], runs: int = 20) -> list[Kernel]:
    """Return the kernels, copies and fills of a call of `run`, each with its median time over half of `runs` calls."""
    warm_up(with_index("cuda"), WARMUP_S)
    for _ in range(WARMUP):
        run()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(runs):
            run()
            torch.cuda.synchronize()
    records = device_records(profiler)
    # the records of the first kernels may be lost
    each = round(len(records) / runs)
    later = [records[len(records) - each * (run + 1) :][:each] for run in range(runs // 2)]
    return [
        Kernel(same[0].name, same[0].start_us, median(kernel.us for kernel in same))
        for same in zip(*later, strict=True)
    ]


def kernel_names(kernels: Sequence[Kernel]) -> dict[str, int]:
    """Return the number of runs of each kernel."""
    return dict(Counter(kernel.name for kernel in kernels))


def _sums(kernels: Sequence[Kernel], runs: int) -> list[float]:
    """Return the time of each run; all runs launch the same kernels."""
    each = len(kernels) // runs
    if each * runs != len(kernels):
        return [sum(kernel.us for kernel in kernels) / runs]
    return [sum(kernel.us for kernel in kernels[run * each : (run + 1) * each]) for run in range(runs)]
