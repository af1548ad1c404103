"""Records that an accelerator keeps of kernels, copies and fills, and of their launches."""

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

ID_BITS = (1 << 32) - 1  # bits of a thread number that the records contain

_events = _places.take("torch._C._autograd._ProfilerResult.events", None, "times of kernels cannot be recorded")
_is_profiling_here = _places.take(
    "torch._C._autograd._profiler_enabled", lambda: False, "another profiler is noticed only when opgrip's cannot start"
)
# environment variables of programs under profilers that use the records of kernels themselves
_INJECTIONS = {"NSYS_PROFILING_SESSION_ID": "nsys", "CUDA_INJECTION64_PATH": "a profiler of CUDA"}


def running_profile() -> str | None:
    """Return the text `the program profiles itself` if one of torch's profilers is running in any thread, else None."""
    # the first condition covers only this thread; a second profile would end a profile of another thread
    if _is_profiling_here() or getattr(torch.autograd.profiler, "_is_profiler_enabled", False):
        return "the program profiles itself"
    return None


def injected_profiler() -> str | None:
    """Return a text such as `nsys profiles the program` if an external profiler is attached, else None."""
    return next((f"{name} profiles the program" for key, name in _INJECTIONS.items() if key in os.environ), None)


class ActivityProfile:
    """A profile by torch's profiler with the activities of the accelerator and their launches."""

    def __init__(self) -> None:
        kind = next(iter(recorded_activities()), None)
        self._profile: Any = torch.autograd.profiler.profile(use_cpu=False, use_device=kind, use_kineto=True)

    def start(self) -> None:
        self._profile.__enter__()

    def stop(self) -> list[Any]:
        """Wait until the accelerator has finished, end the profile, and return its events."""
        self._profile.__exit__(None, None, None)
        events: list[Any] = self._profile.kineto_results.events()
        return events


# number of kernels that are launched when a profile begins, before any others, because their records may be lost; an
# H200 lost one
FIRST_KERNELS = 8
_sleep = _places.take("torch.cuda._sleep", None, "the first calls of a captured program may have no device time")


def launch_nothing(kind: str) -> bool:
    """Launch empty kernels, because a profile may lose its first ones; return False if this is impossible."""
    if kind != "cuda" or _sleep is None:
        return False
    for _ in range(FIRST_KERNELS):
        _sleep(1)
    return True


def recorded_activities() -> dict[str, Any]:
    """Return the activity kinds of torch's profiler, by device type, for the accelerators whose work it can record."""
    activities = [] if _events is None else torch.profiler.supported_activities()
    return {item.name.lower(): item for item in activities if item.name in ("CUDA", "XPU")}


_event = "torch._C._autograd._KinetoEvent"
_has_activity_type = (
    _places.take(f"{_event}.activity_type", None, "records of the host count as launches, other records as work")
    is not None
)
_HOST = _places.take(
    "torch._C._autograd.DeviceType.CPU", None, "no launch is recognized unless events have an activity type"
)
_LAUNCH = ("_runtime", "_driver")
_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


def is_launch(event: Any) -> bool:
    if _has_activity_type:
        return bool(event.activity_type().endswith(_LAUNCH))
    return bool(event.device_type() == _HOST and event.correlation_id() > 0)


def is_work(event: Any) -> bool:
    if _has_activity_type:
        return bool(event.activity_type().endswith(_WORK))
    return bool(event.device_type() != _HOST and not event.is_user_annotation())


@dataclass(frozen=True, slots=True)
class LaunchedWork:
    """A kernel, copy or fill on an accelerator, and the launch that started it; all times in ns.

    thread : the system's id of the launching thread, or the lower 32 bits of Python's id
    at_ns, launched_ns : times at which the launch began and returned
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
    """Return the kernels, copies and fills of a profile that have a known launch, sorted by their starts.

    distance_ns : time by the system's clock, which the events use, minus time by the clock of the returned times
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
    return (
        torch.device(device).type in recorded_activities() and running_profile() is None and injected_profiler() is None
    )


@contextmanager
def recorded_work() -> Iterator[list[LaunchedWork]]:
    """Record the work of the accelerator during the block, and fill the yielded list at its end."""
    work: list[LaunchedWork] = []
    profile = ActivityProfile()
    profile.start()
    launch_nothing(next(iter(recorded_activities()), ""))
    try:
        yield work
    finally:
        work += launched_by(profile.stop())
