"""Assignment of an accelerator's work to the recorded calls that launched it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from opgrip.capture.torch_compat.accelerator_private import is_launch, is_work

ID_BITS = (1 << 32) - 1
"""bits of a thread number that the accelerator's records contain"""


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


@dataclass(slots=True)
class WrittenCalls:
    """Calls of one thread that were written.

    Attributes
    ----------
    thread : thread number in the trace
    idents : numbers by which the records may identify the thread
    first : index of the first call among all calls of the thread
    starts, ends : times by `perf_counter_ns`
    device_ns : device time of each call so far
    """

    thread: int
    idents: tuple[int, ...]
    first: int
    signatures: Sequence[int]
    starts: Sequence[int]
    ends: Sequence[int]
    device_ns: list[int]


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


def innermost_calls(
    blocks: Iterable[WrittenCalls], launched: Iterable[LaunchedWork]
) -> Iterator[tuple[WrittenCalls, int, LaunchedWork]]:
    """Yield block and index of the innermost call around each launch of one thread.

    Add the duration of the work to all calls around the launch.
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
