"""Private interfaces of torch about accelerators: their streams, and records of their work."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from opgrip.capture.torch_compat.torch_private import out_of_tree_device
from opgrip.platform.private_apis import PrivatePlaces

_places = PrivatePlaces()
private_places = _places.report


def _queries(**names: str) -> dict[str, Callable[..., Any]]:
    found = {use: _places.take(f"torch._C.{name}", None, "torch's public functions") for use, name in names.items()}
    return {use: function for use, function in found.items() if function is not None}


_STREAM_QUERIES = {
    "cuda": _queries(
        is_capturing="_cuda_isCurrentStreamCapturing",
        current_device="_cuda_getDevice",
        stream_handle="_cuda_getCurrentRawStream",
    ),
    "xpu": _queries(current_device="_xpu_getDevice", stream_handle="_xpu_getCurrentRawStream"),
}
_CURRENT_DEVICE = _queries(current_device="_accelerator_getDeviceIndex")


def stream_queries(kind: str) -> dict[str, Callable[..., Any]]:
    """Return functions in C that answer queries of `DeviceQueries` about a kind of accelerator, by attribute."""
    if kind in _STREAM_QUERIES:
        return _STREAM_QUERIES[kind]
    return _CURRENT_DEVICE if kind == out_of_tree_device() else {}


_events = _places.take("torch._C._autograd._ProfilerResult.events", None, "times of kernels are refused")


def _profiler_entries(**names: str) -> tuple[tuple[Any, str], ...]:
    fallback = "a program whose kernels are timed cannot profile itself"
    return tuple(
        (sys.modules[f"torch.autograd.{module}"], name)
        for name, module in names.items()
        if _places.take(f"torch.autograd.{module}.{name}", None, fallback) is not None
    )


PREPARE_PROFILER = _profiler_entries(_prepare_profiler="profiler", _enable_profiler="profiler")
"""owner and name of the functions one of which every profile calls first, also `emit_nvtx`"""


_is_profiling_here = _places.take(
    "torch._C._autograd._profiler_enabled", lambda: False, "a profile of the program is noticed when ours cannot begin"
)
_INJECTIONS = {"NSYS_PROFILING_SESSION_ID": "nsys", "CUDA_INJECTION64_PATH": "a profiler of CUDA"}
"""environment variables of programs under profilers that use the records of kernels themselves"""


def running_profile() -> str | None:
    """Return what is known of a profile that torch makes now in any thread, or None."""
    # the first tells only of this thread, and beginning a second profile ends that of another thread
    if _is_profiling_here() or getattr(torch.autograd.profiler, "_is_profiler_enabled", False):
        return "the program profiles itself"
    return None


def injected_profiler() -> str | None:
    """Return which program uses the records of kernels from outside, or None if nothing is known to use them."""
    return next((f"{name} profiles the program" for key, name in _INJECTIONS.items() if key in os.environ), None)


class ActivityProfile:
    """A torch profile with the records that the accelerator here keeps of its work, without records of operators.

    `torch.profiler.profile` would warn the program about events of earlier cycles.

    Parameters
    ----------
    on_cpu : record operators on the CPU instead, for tests
    """

    def __init__(self, on_cpu: bool = False) -> None:
        kind = None if on_cpu else next(iter(recorded_activities()), None)
        self._profile: Any = torch.autograd.profiler.profile(use_cpu=on_cpu, use_device=kind, use_kineto=True)

    def start(self) -> None:
        self._profile.__enter__()

    def stop(self) -> list[Any]:
        """Wait for the accelerator and return the events."""
        self._profile.__exit__(None, None, None)
        events: list[Any] = self._profile.kineto_results.events()
        return events


_sleep = _places.take("torch.cuda._sleep", None, "the first calls of a captured program may have no device time")


def launch_nothing(kind: str, times: int) -> bool:
    """Launch a kernel that has no effect and needs no memory in the current stream; return False if there is none."""
    if kind != "cuda" or _sleep is None:
        return False
    for _ in range(times):
        _sleep(1)
    return True


def recorded_activities() -> dict[str, Any]:
    """Return the profiler activities of the accelerators here that keep records, by device type.

    Devices from outside torch are left out, because the profiler lists them whether or not they keep records.
    """
    activities = [] if _events is None else torch.profiler.supported_activities()
    return {item.name.lower(): item for item in activities if item.name in ("CUDA", "XPU")}


_event = "torch._C._autograd._KinetoEvent"
_has_activity_type = (
    _places.take(f"{_event}.activity_type", None, "records are separated by device: launches are records of the host")
    is not None
)
_HOST = _places.take(
    "torch._C._autograd.DeviceType.CPU", None, "no launch is recognized unless events have an activity type"
)
_LAUNCH = ("_runtime", "_driver")
_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


def is_launch(event: Any) -> bool:
    """Return True if a profile's event is a launch of work on an accelerator by the host."""
    if _has_activity_type:
        return bool(event.activity_type().endswith(_LAUNCH))
    return bool(event.device_type() == _HOST and event.correlation_id() > 0)


def is_work(event: Any) -> bool:
    """Return True if a profile's event is work of an accelerator: a kernel, a copy or a fill."""
    if _has_activity_type:
        return bool(event.activity_type().endswith(_WORK))
    return bool(event.device_type() != _HOST and not event.is_user_annotation())
