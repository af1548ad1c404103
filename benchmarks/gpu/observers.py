"""Measure what observers cost a program, and what opgrip's captures of it hold."""

from __future__ import annotations

import json
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from capture_overhead import EmptyMode
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile

from gpu.kernels import device_records
from gpu.models import make_step
from gpu.step import Place
from opgrip.capture import Capture
from opgrip.traces import load
from opgrip.traces.schema.arguments import tensors

WARMUP, STEPS, SMALL_STEPS = 4, 12, 2
MOST_S = 12.0  # time after which an observer gets no further step, if it has two
LATER = 2  # number of steps that are not later ones
BOTH = "profiler cpu+cuda"

Observer = Callable[[], AbstractContextManager[Any]]


def measure_program(place: Place, name: str) -> None:
    """Note the step times of a model under each observer, opgrip's captures first and slow observers last.

    place : device of the step, and file in which the results are noted
    name : name of the model
    """
    step = warmed_up(place, name)
    ways = ("kernels", "events") if place.kind == "cuda" else ("events",)
    note_cost(place, step, "native", nullcontext)
    for way in ways:
        _capture(place, step, name, way)
    # the least that a capture in Python can cost
    note_cost(place, step, "empty mode", EmptyMode)
    note_cost(place, step, "native again", nullcontext)
    if place.kind == "cuda":
        note_cost(place, step, "profiler cuda", partial(profile, activities=[ProfilerActivity.CUDA]))
        both = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        note_cost(place, step, BOTH, partial(profile, activities=both), partial(_note_kernels, place, name))
    else:
        note_cost(place, step, "profiler cpu", partial(profile, activities=[ProfilerActivity.CPU]))
    note_cost(place, step, "eto", partial(_execution_trace, place.folder / "eto.json"))


def capture_program(place: Place, name: str) -> None:
    """Capture the model `name` for the steps that replay it, unless its file, `trace_of(place, name)`, exists."""
    if trace_of(place, name).exists():
        return
    _capture(place, warmed_up(place, name), name, "kernels" if place.kind == "cuda" else "events")


def trace_of(place: Place, name: str) -> Path:
    """Return the path of the trace of the model `name` in `place.kept`; on CUDA, its device times are from kernels."""
    return place.kept / f"{name}.jsonl"


def warmed_up(place: Place, name: str) -> Callable[[], object]:
    step = make_step(name, place)
    for _ in range(1 if place.is_small else WARMUP):
        step()
    place.synchronize()
    return step


def note_cost(
    place: Place,
    step: Callable[[], object],
    observer: str,
    make: Observer,
    use: Callable[[Any, int], None] = lambda kept, steps: None,
) -> int:
    """Note the step times under an observer, and return the number of steps; 0 if it failed.

    place : device of the step, and file in which the results are noted
    step : runs one step of the model
    observer : name of the observer in the facts
    make : returns the observer as a context manager
    use : function called with the closed observer and the number of steps
    """
    place.module.reset_peak_memory_stats()
    times_ms: list[float] = []
    host_ms: list[float] = []
    end = perf_counter() + MOST_S
    try:
        with make() as kept:
            while len(times_ms) < (SMALL_STEPS if place.is_small else STEPS):
                place.synchronize()
                began = perf_counter()
                step()
                host_ms.append((perf_counter() - began) * 1e3)
                place.synchronize()
                times_ms.append((perf_counter() - began) * 1e3)
                if perf_counter() > end and len(times_ms) >= LATER:
                    break
            closing = perf_counter()
        closing_s = perf_counter() - closing
    except Exception as error:
        traceback.print_exc()
        place.note(observer=observer, error=str(error)[:300])
        return 0
    place.note(
        observer=observer,
        first_ms=times_ms[0],
        later_ms=median(times_ms[LATER:] or times_ms),
        least_ms=min(times_ms),
        later_host_ms=median(host_ms[LATER:] or host_ms),
        all_ms=times_ms,
        closing_s=closing_s,
        peak_GB=place.module.max_memory_allocated() / 1e9,
    )
    use(kept, len(times_ms))
    return len(times_ms)


def _capture(place: Place, step: Callable[[], object], name: str, way: str) -> None:
    """Note what a capture costs the steps of the model `name`, and facts about its trace.

    place : device of the step, and file in which the results are noted
    step : runs one step
    way : how the capture measures device times: `events` or `kernels`
    """
    is_replayed = way == "kernels" or place.kind != "cuda"
    path = trace_of(place, name) if is_replayed else place.folder / f"{name}-{way}.jsonl"
    path.unlink(missing_ok=True)
    steps = note_cost(place, step, f"opgrip {way}", partial(Capture, path, device_time=way))
    if steps:
        _note_trace(place, name, way, path, steps)


def _note_kernels(place: Place, name: str, profiler: profile, steps: int) -> None:
    """Note the device time of a step by the profiler's records of kernels, copies and fills, each once.

    place : device of the step, and file in which the results are noted
    name : name of the model
    profiler : closed profiler of torch that saw `steps` steps
    """
    records = device_records(profiler)
    counts, us_by_name = Counter(kernel.name for kernel in records), Counter[str]()
    for kernel in records:
        us_by_name[kernel.name] += kernel.us  # type: ignore[assignment]
    table = {kernel: [counts[kernel] / steps, us / steps] for kernel, us in us_by_name.items()}
    (place.kept / f"{name}-kineto.json").write_text(json.dumps(table), encoding="utf-8")
    place.note(kernels_ms=sum(us for _, us in table.values()) / 1e3, kernels=len(records) / steps)


def _note_trace(place: Place, name: str, way: str, path: Path, steps: int) -> None:
    trace = load(path, partial=False)
    us = trace.own_calls["device_ns"] / 1e3
    specs = [spec for signature in trace.signatures for spec in tensors([signature.args, signature.kwargs])]
    last = json.loads(path.read_text(encoding="utf-8").splitlines()[-1])
    place.note(
        trace=way,
        calls=len(us),
        signatures=len(trace.signatures),
        bytes=path.stat().st_size,
        untimed=int(us.isna().sum()),
        device_ms_per_step=float(us.sum()) / steps / 1e3,
        tensors=len(specs),
        tensors_with_values=sum(spec.values is not None and spec.values in trace.values for spec in specs),
        dropped=last.get("dropped"),
        without_values=last.get("without_values"),
    )
    by_operator = us.groupby(trace.own_calls["op"], observed=True).agg(["count", "sum", "median"])
    (place.kept / f"{name}-{way}-by-op.json").write_text(by_operator.to_json(orient="index"), encoding="utf-8")


@contextmanager
def _execution_trace(path: Path) -> Iterator[ExecutionTraceObserver]:
    observer = ExecutionTraceObserver().register_callback(str(path))
    observer.start()
    try:
        yield observer
    finally:
        observer.stop()
        observer.unregister_callback()
