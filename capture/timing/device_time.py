"""Device time of calls, measured in one of two ways.

`DeviceTimer` records an event before and after each call. Nothing in the program's threads waits for the device,
because the events are read when the calls are written.

`KernelTimes` uses the accelerator's own records of kernels, copies and fills. torch's profiler collects them while
calls are recorded, with no work per call. At the end of a recorded step, each record is assigned to the calls of the
same thread whose interval on the host contains its launch.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from time import perf_counter_ns, time_ns
from typing import Any

import torch

from opgrip.capture.program.accelerators import current_stream, is_capturing, on_device, synchronize, with_index
from opgrip.capture.program.patches import Patches
from opgrip.capture.torch_compat.torch_private import (
    PREPARE_PROFILER,
    ActivityProfile,
    is_launch,
    is_work,
    recorded_activities,
)
from opgrip.errors import UserError, one_line, raise_if_from_program
from opgrip.traces.schema.records import DeviceTimes, Kernels, Record

NOT_TIMED = -1
"""device time of a call that ran only on the host"""


def make_event(device: torch.device) -> Any:
    """Return an event that measures time on a device."""
    return torch.Event(device=device, enable_timing=True)


class DeviceTimer:
    """Events around the calls of one thread, reused after they were read, each on its first device.

    An error of an event loses the device time of its call and never reaches the program.
    """

    def __init__(self) -> None:
        self._free: dict[torch.device, list[Any]] = {}
        self._open: dict[int, tuple[torch.device, Any, Any]] = {}
        self._stream = 0
        self._streams: dict[int, int] = {}

    def timed(
        self, operator: Callable[..., Any], device: torch.device, started: Callable[[], int]
    ) -> Callable[..., Any]:
        """Return a wrapper of an operator that records an event before and after it.

        Parameters
        ----------
        device : device that the operator uses; without an index, the thread's current device at each call
        started : returns the host's start of the running call in ns, the key of its device time
        """

        def run(*args: Any, **kwargs: Any) -> Any:
            start = started()
            mark = self._mark(device)
            result = operator(*args, **kwargs)
            if mark is not None:
                used, before = mark
                later = self._mark(used)
                if later is not None:
                    self._open[start] = (used, before, later[1])
                    if self._stream:
                        self._streams[start] = self._stream
            return result

        return run

    def times_ns(self, starts: Sequence[int], may_ask: bool = True) -> list[int]:
        """Return the device times of the calls with these starts, once; empty if no call was timed.

        Parameters
        ----------
        may_ask : True if the device may be queried; otherwise the calls have no device time
        """
        if not self._open:
            return []
        return [self._read(start, may_ask) for start in starts]

    def forget(self, starts: Sequence[int]) -> None:
        """Make the events of the calls with these starts available again without reading them."""
        if not self._open:
            return
        for start in starts:
            self._streams.pop(start, None)
            if (events := self._open.pop(start, None)) is not None:
                self._free.setdefault(events[0], []).extend(events[1:])

    def streams(self, starts: Sequence[int]) -> list[int]:
        """Return the stream numbers of the calls with these starts; empty if all calls used the default stream."""
        return [self._streams.pop(start, 0) for start in starts] if self._streams else []

    def _mark(self, device: torch.device) -> tuple[torch.device, Any] | None:
        """Record an event in the thread's current stream of a device; return both, or None if that is impossible."""
        try:
            # events in a graph cannot be read, and recording the graph has no device times
            if is_capturing(device.type):
                return None
            device = with_index(device)
            free = self._free.get(device)
            event = free.pop() if free else make_event(device)
            stream = current_stream(device)
            with on_device(device):
                event.record(stream)
            self._stream = getattr(stream, "stream_id", 0)
        except Exception as error:
            raise_if_from_program(error)
            return None
        return device, event

    def _read(self, start: int, may_ask: bool) -> int:
        events = self._open.pop(start, None)
        if events is None or not may_ask:
            return NOT_TIMED
        device, before, after = events
        try:
            with on_device(device):
                after.synchronize()
                time: int = round(before.elapsed_time(after) * 1e6)
        except Exception as error:
            raise_if_from_program(error)
            return NOT_TIMED
        self._free.setdefault(device, []).extend((before, after))
        return time


CLOCK_READINGS = 20
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


@dataclass(frozen=True, slots=True)
class Window:
    """Work launched between two times by `perf_counter_ns`."""

    launched: list[LaunchedWork]
    started_ns: int
    ended_ns: int

    def holds(self, time_ns: int) -> bool:
        """Return True if a time is within the window."""
        return self.started_ns <= time_ns <= self.ended_ns


class KernelTimes:
    """Collector of an accelerator's records, which it assigns to the written calls.

    Attributes
    ----------
    failure : reason for the lack of records, or None
    """

    def __init__(self) -> None:
        self.failure: str | None = None
        self._patches = Patches()
        self._thread = self._started_ns = 0
        self.forget()

    def forget(self) -> None:
        """Remove all calls and records, also in a forked process, which may not use the accelerator."""
        self._profile: ActivityProfile | None = None
        self._signatures: set[int] = set()
        self._devices: set[torch.device] = set()
        self._windows: list[Window] = []
        self._blocks: list[WrittenCalls] = []
        self._calls_by_thread: Counter[int] = Counter()

    def __enter__(self) -> KernelTimes:
        profile = ActivityProfile()
        try:
            profile.start()
            self._profile, self._thread = profile, threading.get_ident()
            self._started_ns = perf_counter_ns()
            for module, name in PREPARE_PROFILER:
                self._patches.replace(module, name, self._giving_way)
        except Exception as error:
            raise_if_from_program(error)
            self.failure = one_line(error)
        return self

    def __exit__(self, *ignored: object) -> None:
        self._patches.undo()
        self._stop()

    def _giving_way(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a wrapper of a function that prepares a profile, which first stops the capture's own profile.

        torch allows one profile at a time and would refuse the program's profile.
        """

        @functools.wraps(original)
        def prepare(*args: Any, **kwargs: Any) -> Any:
            if self._profile is not None and threading.get_ident() == self._thread:
                self.failure = "the program profiled itself, and they end there"
                self._stop()
            return original(*args, **kwargs)

        return prepare

    def _note_idle(self, block: WrittenCalls, windows: Sequence[Window]) -> None:
        """Set a device time of 0 for calls in the windows that use an accelerator but launched nothing."""
        for place, (signature, start) in enumerate(zip(block.signatures, block.starts, strict=True)):
            if signature in self._signatures and any(window.holds(start) for window in windows):
                block.device_ns[place] = max(0, block.device_ns[place])

    def _stop(self) -> None:
        profile, self._profile = self._profile, None
        if profile is None:
            return
        try:
            # the profile waits only for the thread's current device; work still running on other devices would be
            # missing
            for device in self._devices:
                synchronize(device)
            events = profile.stop()
            ended_ns = perf_counter_ns()
            self._windows.append(Window(launched_by(events, clock_distance_ns()), self._started_ns, ended_ns))
        except Exception as error:
            raise_if_from_program(error)
            self.failure = one_line(error)

    def expect(self, signature: int, device: torch.device) -> None:
        """Note that calls of a signature use a device."""
        self._signatures.add(signature)
        self._devices.add(with_index(device))

    def note(
        self,
        thread: int,
        idents: tuple[int, ...],
        signatures: Sequence[int],
        starts: Sequence[int],
        ends: Sequence[int],
    ) -> None:
        """Note calls that are written now, in order per thread."""
        first = self._calls_by_thread[thread]
        self._calls_by_thread[thread] += len(starts)
        self._blocks.append(WrittenCalls(thread, idents, first, signatures, starts, ends, [-1] * len(starts)))

    def take_windows(self) -> list[Window]:
        """Remove and return the windows that have ended; all of their calls can be taken already."""
        windows = self._windows[:]
        del self._windows[: len(windows)]
        return windows

    def records(self, windows: Sequence[Window]) -> Iterator[Record]:
        """Yield the device times and kernels of the written calls in these windows."""
        if not windows:
            return
        kernels: dict[int, dict[str, list[int]]] = {}
        by_ident: dict[int, list[WrittenCalls]] = {}
        for block in self._blocks:
            for ident in block.idents:
                by_ident.setdefault(ident, []).append(block)
        by_thread: dict[int, list[LaunchedWork]] = {}
        for item in (item for window in windows for item in window.launched):
            by_thread.setdefault(item.thread, []).append(item)
        for ident, items in by_thread.items():
            for block, place, item in innermost_calls(by_ident.get(ident, ()), items):
                names = kernels.setdefault(block.signatures[place], {})
                count = names.setdefault(item.name, [0, 0])
                count[0] += 1
                count[1] += item.duration_ns
        for block in self._blocks:
            self._note_idle(block, windows)
            if max(block.device_ns) >= 0:
                yield DeviceTimes(block.thread, block.first, list(block.device_ns))
        # A block of another thread may also contain calls of the next window. It is kept, and its next record replaces
        # this one.
        self._blocks = [block for block in self._blocks if block.ends[-1] > windows[-1].ended_ns]
        for signature, names in sorted(kernels.items()):
            launches, times = zip(*names.values(), strict=True)
            yield Kernels(signature, list(names), list(launches), list(times))


def check_kernels(device: str | None = None) -> None:
    """Raise `UserError` if no device here, or not the given one, keeps records of its kernels."""
    kinds = recorded_activities()
    if device is None and kinds:
        return
    if device is None or torch.device(device).type not in kinds:
        what = "no device here keeps" if device is None else f"the device {device} keeps no"
        raise UserError(f"{what} records of its kernels", "leave out --device-time kernels")


def launched_by(events: Sequence[Any], distance_ns: int) -> list[LaunchedWork]:
    """Return an accelerator's work and the threads that launched it, from a profile's events.

    Parameters
    ----------
    events : events of torch's profiler, in which a launch and its work share a correlation number
    distance_ns : offset of the profile's clock from `perf_counter_ns`
    """
    launches = {event.correlation_id(): event for event in events if is_launch(event)}
    launched: list[LaunchedWork] = []
    for event in filter(is_work, events):
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
