"""Explain where the time of a captured step goes, by captures of which one part is left out at a time."""

from __future__ import annotations

import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile

from gpu.observers import EmptyMode, note_cost, warmed_up
from gpu.step import Place
from opgrip.capture import Capture
from opgrip.capture.recording import wrapped_operators
from opgrip.capture.timing.kernel_times import KernelTimes
from opgrip.capture.writing import flusher
from opgrip.platform.activity_records import ActivityProfile
from opgrip.traces import load

NEVER_S = 1e6
WRITER = "opgrip-flusher"
# parts of a capture's end that are timed: class and method
PARTS = {
    "stop_profile": (ActivityProfile, "stop"),
    "kernel_records": (KernelTimes, "records"),
    "fit_values": (flusher.Flusher, "_fit_deferred"),
}


def explain_steps(place: Place, name: str) -> None:
    """Note the step times of a model under captures that each lack one part, and the waits for the device.

    place : device of the step, and file in which the results are noted
    name : name of the model
    """
    step = warmed_up(place, name)
    way = "kernels" if place.kind == "cuda" else "events"
    capture = partial(_capture, place, way)
    note = partial(note_cost, place, step)
    note("native", nullcontext)
    note(way, capture, lambda kept, steps: _note_calls(place, kept.path, steps))
    note(f"{way}, writing thread held back", partial(capture, held=True))
    note(f"{way}, no values", partial(capture, values=False))
    note(f"{way}, no values, writing thread held back", partial(capture, held=True, values=False))
    note("no device time, no values, writing thread held back", partial(capture, held=True, values=False, timed=False))
    note("empty mode", EmptyMode)
    if place.kind == "cuda":
        activities = [ProfilerActivity.CUDA]
        note("profiler cuda and empty mode", partial(_both, partial(profile, activities=activities), EmptyMode))
    note("native again", nullcontext)
    if place.kind == "cuda":
        _note_waits(place, step, "native", nullcontext)
        _note_waits(place, step, way, capture)


@contextmanager
def _both(*makers: Callable[[], Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for make in makers:
            stack.enter_context(make())
        yield


@contextmanager
def _capture(place: Place, way: str, held: bool = False, values: bool = True, timed: bool = True) -> Iterator[Capture]:
    """Capture the block, and note the writing thread's processor time and how long each part of the end takes.

    place : device of the step, and file in which the results are noted
    way : how the capture measures device times: `events` or `kernels`
    held : True to let the thread that writes the trace work only at the end
    values : False to read no values of tensors
    timed : False to measure no device times
    """
    spent: Counter[str] = Counter()
    with ExitStack() as stack:
        if held:
            stack.enter_context(patch.object(flusher, "INTERVAL_S", NEVER_S))
        if not timed:
            stack.enter_context(patch.object(wrapped_operators, "accelerator_of", lambda *ignored: None))
        for part, (owner, method) in PARTS.items():
            stack.enter_context(patch.object(owner, method, _timed(getattr(owner, method), part, spent)))
        path = place.folder / "steps.jsonl"
        path.unlink(missing_ok=True)
        with Capture(path, device_time=way if timed else "events") as capture:
            capture._recorder.fitter.spared = capture._recorder.observations.suspended = not values
            yield capture
            writer_ms = _writer_ms()
            before = Counter(spent)
        place.note(writer_ms=writer_ms, closing_s={part: spent[part] - before[part] for part in PARTS})


def _timed(original: Callable[..., Any], part: str, spent: Counter[str]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        result = original(*args, **kwargs)
        if part == "kernel_records":
            # a generator, which works while it is read
            result = list(result)
        spent[part] += time.perf_counter() - began  # type: ignore[assignment]
        return result

    return run


def _writer_ms() -> float:
    """Return the processor time so far of the thread that writes the trace."""
    [thread] = [thread for thread in threading.enumerate() if thread.name == WRITER]
    ns = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text(encoding="utf-8").split()[0]
    return int(ns) / 1e6


def _note_calls(place: Place, path: Path, steps: int) -> None:
    """Note the host's time in and between the calls of the last step.

    place : device of the step, and file in which the results are noted
    path : trace of `steps` steps
    """
    calls = load(path, partial=False).own_calls.sort_values("start_ns")
    last = calls.tail(len(calls) // steps)
    between = (last["start_ns"] - (last["start_ns"] + last["duration_ns"]).shift()).dropna() / 1e3
    durations = last["duration_ns"] / 1e3
    place.note(
        calls=len(last),
        in_calls_ms=float(durations.sum()) / 1e3,
        in_call_us=float(durations.median()),
        between_ms=float(between.sum()) / 1e3,
        between_us=float(between.median()),
        longest_in_us=[[op, float(us)] for op, us in zip(last["op"], durations, strict=True) if us > 500][:10],
        longest_between_us=[round(float(us)) for us in between.nlargest(10)],
    )


def _note_waits(place: Place, step: Callable[[], object], observer: str, make: Callable[[], Any]) -> None:
    """Count the waits for the device in steps under an observer: torch's warnings, and calls of `synchronize`.

    place : device of the step, and file in which the results are noted
    step : runs one step of a model
    observer : name of the observer in the facts
    make : returns the observer as a context manager
    """
    waits: list[int] = []
    calls: Counter[str] = Counter()

    def counted(original: Callable[..., Any], name: str) -> Callable[..., Any]:
        def wait(*args: Any, **kwargs: Any) -> Any:
            calls[f"{name} in {threading.current_thread().name}"] += 1
            return original(*args, **kwargs)

        return wait

    with ExitStack() as stack:
        stack.enter_context(make())
        for _ in range(4):
            step()
        for owner in (torch.cuda, torch.cuda.Event, torch.cuda.Stream):
            original = owner.synchronize
            stack.enter_context(patch.object(owner, "synchronize", counted(original, owner.__name__)))
        caught = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(3):
                before = len(caught)
                step()
                waits.append(len(caught) - before)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    place.note(observer=observer, waits_by_step=waits, median_waits=median(waits), wait_calls=dict(calls))
