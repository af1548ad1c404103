"""Records of an accelerator's work that torch's profiler collected between two times; this period is a window."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from time import perf_counter_ns, time_ns
from typing import Any

from opgrip.platform.activity_records import ID_BITS, ActivityProfile, LaunchedWork, is_launch, is_work, launched_by
from opgrip.traces.formats.profiler_events import LAUNCH as KERNEL_LAUNCH

FOREVER_NS = (1 << 63) - 1  # end time in ns of a graph capture or of a profile that has not ended
CLOCK_READINGS = 20
CUT_NS = 1_000_000_000  # time in ns; a window that ends with a longer time without a launch counts as incomplete


def nodes_in(events: Sequence[Any], distance_ns: int) -> list[LaunchedWork]:
    """Return the launches in a profile that started no work: each adds a node to the CUDA graph that is being captured.

    distance_ns : time by the events' clock minus time by `perf_counter_ns`
    """
    with_work = {event.correlation_id() for event in events if is_work(event)}
    return [
        LaunchedWork(event.name(), event.device_resource_id() & ID_BITS, event.start_ns() - distance_ns, 0)
        for event in events
        if is_launch(event) and event.correlation_id() not in with_work and KERNEL_LAUNCH.fullmatch(event.name())
    ]


@dataclass(slots=True)
class WrittenCalls:
    """Calls of one thread that were written, whose device times may still be unknown.

    thread : thread number in the trace
    idents : numbers by which the records may identify the thread
    first : index of the first call among all calls of the thread
    starts, ends : times by `perf_counter_ns`
    device_ns : device time of each call so far, -1 if unknown
    """

    thread: int
    idents: tuple[int, ...]
    first: int
    signatures: Sequence[int]
    starts: Sequence[int]
    ends: Sequence[int]
    device_ns: list[int]


def innermost_calls(
    blocks: Iterable[WrittenCalls], launched: Iterable[LaunchedWork]
) -> Iterator[tuple[WrittenCalls, int, LaunchedWork]]:
    """Yield the work that a thread launched, each with the block and index of the innermost call around the launch.

    The time of the work is added to the device time of all calls around the launch.
    """
    blocks = list(blocks)
    calls = sorted(
        (start, -end, number, place)
        for number, block in enumerate(blocks)
        for place, (start, end) in enumerate(zip(block.starts, block.ends, strict=True))
    )
    upcoming = 0
    around: list[tuple[int, WrittenCalls, int]] = []
    for item in sorted(launched, key=attrgetter("at_ns")):
        while upcoming < len(calls) and calls[upcoming][0] <= item.at_ns:
            start, negative_end, number, place = calls[upcoming]
            _leave_before(start, around)
            around.append((-negative_end, blocks[number], place))
            upcoming += 1
        _leave_before(item.at_ns, around)
        for _, block, place in around:
            block.device_ns[place] = max(0, block.device_ns[place]) + item.duration_ns
        if around:
            yield around[-1][1], around[-1][2], item


def _leave_before(time_ns: int, around: list[tuple[int, WrittenCalls, int]]) -> None:
    while around and around[-1][0] < time_ns:
        around.pop()


@dataclass(frozen=True, slots=True)
class Window:
    """Records of work launched between two times by `perf_counter_ns`.

    profile : owner of the memory of `events`, kept so that they stay valid
    distance_ns : time by the events' clock minus time by `perf_counter_ns`
    last_ns : time just before the capture waited for the accelerator at the end of the window
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
        """Return the time from which the records are complete.

        With CUDA 12.6 to 13.0, torch drops the records of the first kernels, because their times are invalid
        (https://github.com/pytorch/pytorch/issues/192021).
        """
        if not self.has_own_kernels:
            return self.started_ns
        return max(self.started_ns, min((item.at_ns for item in launched), default=self.ended_ns))

    def complete_until_ns(self) -> int:
        """Return the time until which the records are complete: torch's profiler may stop collecting them early."""
        if not self.events:
            return self.ended_ns
        latest = self.started_ns
        for event in filter(is_launch, reversed(self.events)):
            latest = max(latest, event.start_ns() - self.distance_ns)
            if latest > self.last_ns - CUT_NS:
                return self.ended_ns
        return latest


def clock_distance_ns() -> int:
    """Return the time by the system's clock, which profiles use, minus the time by `perf_counter_ns`."""
    readings = []
    for _ in range(CLOCK_READINGS):
        before, now, after = perf_counter_ns(), time_ns(), perf_counter_ns()
        readings.append((after - before, now - (before + after) // 2))
    return min(readings)[1]


def identities_here() -> tuple[int, int]:
    """Return the numbers by which an accelerator's records may identify this thread."""
    return threading.get_native_id(), threading.get_ident() & ID_BITS
