"""Records of an accelerator's work that torch's profiler collected between two times."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter_ns, time_ns
from typing import Any

from opgrip.capture.torch_compat.accelerator_private import ActivityProfile, is_launch, is_work

ID_BITS = (1 << 32) - 1
"""bits of a thread number that the accelerator's records contain"""
CLOCK_READINGS = 20
CUT_NS = 1_000_000_000
"""time without a launch at the end of a window from which its records are incomplete"""


@dataclass(frozen=True, slots=True)
class LaunchedWork:
    """Work that one launch started on an accelerator.

    Attributes
    ----------
    thread : number of the launching thread: the system's number, or the lower bits of Python's
    at_ns : time of the launch by `perf_counter_ns`
    """

    name: str
    thread: int
    at_ns: int
    duration_ns: int


def launched_by(events: Sequence[Any], distance_ns: int) -> list[LaunchedWork]:
    """Return an accelerator's work and the threads that launched it, from a profile's events.

    Parameters
    ----------
    events : events of torch's profiler, in which a launch and its work share a correlation number
    distance_ns : offset of the profile's clock from `perf_counter_ns`
    """
    launches: dict[int, Any] = {}
    work: list[Any] = []
    for event in events:
        if is_work(event):
            work.append(event)
        elif is_launch(event):
            launches[event.correlation_id()] = event
    launched: list[LaunchedWork] = []
    for event in work:
        launch = launches.get(event.correlation_id())
        if launch is not None:
            thread = launch.device_resource_id() & ID_BITS
            launched.append(LaunchedWork(event.name(), thread, launch.start_ns() - distance_ns, event.duration_ns()))
    return launched


@dataclass(frozen=True, slots=True)
class Window:
    """Records of work launched between two times by `perf_counter_ns`.

    Attributes
    ----------
    profile : owner of the events' memory
    events : events of torch's profiler
    distance_ns : offset of the events' clock from `perf_counter_ns`
    last_ns : time at which the capture last waited for the accelerator, which is the last launch in complete records
    has_own_kernels : True if the capture launched kernels when the window began, before any call
    """

    profile: ActivityProfile
    events: list[Any]
    distance_ns: int
    started_ns: int
    last_ns: int
    ended_ns: int
    has_own_kernels: bool = False

    def launched(self) -> list[LaunchedWork]:
        return launched_by(self.events, self.distance_ns)

    def complete_from_ns(self, launched: Iterable[LaunchedWork]) -> int:
        """Return the time from which there are records: torch's profiler loses some at the start of a window.

        With CUDA 12.6 to 13.0 the first kernels have invalid times, for which torch drops their records
        (https://github.com/pytorch/pytorch/issues/192021).
        """
        if not self.has_own_kernels:
            return self.started_ns
        return max(self.started_ns, min((item.at_ns for item in launched), default=self.ended_ns))

    def complete_until_ns(self) -> int:
        """Return the time until which there are records: torch's profiler may stop collecting them early."""
        if not self.events:
            return self.ended_ns
        latest = self.started_ns
        for event in filter(is_launch, reversed(self.events)):
            latest = max(latest, event.start_ns() - self.distance_ns)
            if latest > self.last_ns - CUT_NS:
                return self.ended_ns
        return latest


def clock_distance_ns() -> int:
    """Return the offset of the system's clock, which profiles use, from `perf_counter_ns`."""
    readings = []
    for _ in range(CLOCK_READINGS):
        before, now, after = perf_counter_ns(), time_ns(), perf_counter_ns()
        readings.append((after - before, now - (before + after) // 2))
    return min(readings)[1]


def identities_here() -> tuple[int, int]:
    """Return the numbers by which an accelerator's records may identify this thread."""
    return threading.get_native_id(), threading.get_ident() & ID_BITS
