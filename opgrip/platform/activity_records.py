"""Records that an accelerator keeps of its work: kernels, copies and fills, and the launches that started them.

torch's profiler collects them. Its interfaces are private and differ between versions of torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from opgrip.platform.private_apis import PrivatePlaces

_places = PrivatePlaces()
private_places = _places.report

ID_BITS = (1 << 32) - 1
"""bits of a thread number that the records contain"""

_events = _places.take("torch._C._autograd._ProfilerResult.events", None, "times of kernels are refused")
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
    """

    def __init__(self) -> None:
        kind = next(iter(recorded_activities()), None)
        self._profile: Any = torch.autograd.profiler.profile(use_cpu=False, use_device=kind, use_kineto=True)

    def start(self) -> None:
        self._profile.__enter__()

    def stop(self) -> list[Any]:
        """Wait for the accelerator and return the events."""
        self._profile.__exit__(None, None, None)
        events: list[Any] = self._profile.kineto_results.events()
        return events


FIRST_KERNELS = 8
"""kernels that are launched when a profile begins, before any others, because their records may be lost; an H200 lost
one
"""
_sleep = _places.take("torch.cuda._sleep", None, "the first calls of a captured program may have no device time")


def launch_nothing(kind: str) -> bool:
    """Launch kernels that have no effect and need no memory in the current stream; return False if there is none."""
    if kind != "cuda" or _sleep is None:
        return False
    for _ in range(FIRST_KERNELS):
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


@dataclass(frozen=True, slots=True)
class LaunchedWork:
    """Work of an accelerator, and the launch that started it.

    Attributes
    ----------
    thread : number of the launching thread: the system's number, or the lower bits of Python's
    at_ns : time of the launch
    launch : number of the launch, which may start several kernels
    launched_ns : time at which the launch returned
    start_ns : time at which the work began
    """

    name: str
    thread: int
    at_ns: int
    duration_ns: int
    launch: int = 0
    launched_ns: int = 0
    start_ns: int = 0

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.duration_ns


def launched_by(events: Sequence[Any], distance_ns: int = 0) -> list[LaunchedWork]:
    """Return an accelerator's work with its launches, from a profile's events.

    Parameters
    ----------
    events : events of torch's profiler, in which a launch and its work share a correlation number
    distance_ns : offset of the profile's clock, which is the system's, from the clock of the returned times
    """
    launches: dict[int, Any] = {}
    work: list[Any] = []
    for event in events:
        if is_work(event):
            work.append(event)
        elif is_launch(event):
            # the profiler's own work within a launch may have its number
            first = launches.setdefault(event.correlation_id(), event)
            if event.start_ns() < first.start_ns():
                launches[event.correlation_id()] = event
    launched: list[LaunchedWork] = []
    # the kernels of a graph have one launch, and keep the order in which they ran
    for event in sorted(work, key=lambda event: int(event.start_ns())):
        number = event.correlation_id()
        launch = launches.get(number)
        if launch is not None:
            thread, at_ns = launch.device_resource_id() & ID_BITS, launch.start_ns() - distance_ns
            times = at_ns + launch.duration_ns(), event.start_ns() - distance_ns
            launched.append(LaunchedWork(event.name(), thread, at_ns, event.duration_ns(), number, *times))
    return launched


def records_work(device: str) -> bool:
    """Return True if a device keeps records of its work, and no other profiler is known to use them now."""
    return (
        torch.device(device).type in recorded_activities() and running_profile() is None and injected_profiler() is None
    )


@contextmanager
def recorded_work() -> Iterator[list[LaunchedWork]]:
    """Record the work that the accelerator here gets in the block; the list is filled at the end of the block."""
    work: list[LaunchedWork] = []
    profile = ActivityProfile()
    profile.start()
    launch_nothing(next(iter(recorded_activities()), ""))
    try:
        yield work
    finally:
        work += launched_by(profile.stop())
