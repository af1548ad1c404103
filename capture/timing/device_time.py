"""How long calls keep an accelerator busy, in one of two ways.

`DeviceTimer` puts an event before and one after each call. Nothing waits for the device in the program's threads; the
events are read when the calls are written.

`KernelTimes` uses the accelerator's own records of kernels, copies and fills. torch's profiler keeps them while calls
are recorded, and nothing is done for a call. When a recorded step ends, each record goes to the calls whose interval on
the host, in the same thread, holds its launch.
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
"""Device time of a call that ran on the host alone."""


def make_event(device: torch.device) -> Any:
    """Return an event that measures times."""
    return torch.Event(device=device, enable_timing=True)


class DeviceTimer:
    """The events of one thread's calls. They are used again once they were read, each on its first device.

    What goes wrong with an event costs its call's time, and never reaches the program.
    """

    def __init__(self) -> None:
        self._free: dict[torch.device, list[Any]] = {}
        self._open: dict[int, tuple[torch.device, Any, Any]] = {}
        self._stream = 0
        self._streams: dict[int, int] = {}

    def timed(
        self, operator: Callable[..., Any], device: torch.device, started: Callable[[], int]
    ) -> Callable[..., Any]:
        """An operator between two events.

        Parameters
        ----------
        device : which it gives work to; one without an index stands for the thread's current one at each call
        started : the host's start of the call that runs, in ns, by which its time is asked for
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
        """The device times of the calls that started then, to be asked for once; empty where none has any.

        Parameters
        ----------
        may_ask : whether the device may be asked; else these calls have none
        """
        if not self._open:
            return []
        return [self._read(start, may_ask) for start in starts]

    def forget(self, starts: Sequence[int]) -> None:
        """Let the events of the calls that started then be used again, unread."""
        if not self._open:
            return
        for start in starts:
            self._streams.pop(start, None)
            if (events := self._open.pop(start, None)) is not None:
                self._free.setdefault(events[0], []).extend(events[1:])

    def streams(self, starts: Sequence[int]) -> list[int]:
        """The numbers of the streams of the calls that started then; empty where all are the default one."""
        return [self._streams.pop(start, 0) for start in starts] if self._streams else []

    def _mark(self, device: torch.device) -> tuple[torch.device, Any] | None:
        """A device and an event in the stream that the thread gives it work in; None where there can be none."""
        try:
            # a graph has no times of its own while it is made, and its events cannot be read
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
"""Of the number of a thread, as many as the records have."""


@dataclass(frozen=True, slots=True)
class LaunchedWork:
    """What a launch had an accelerator do.

    Attributes
    ----------
    thread : number of the thread that launched it: the system's or the lower bits of Python's
    at_ns : when that was, by `perf_counter_ns`
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
    thread : number in the trace
    idents : by which the records may name it
    first : place of the first call among those of the thread
    starts, ends : by `perf_counter_ns`
    device_ns : in their kernels so far
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
    """What was launched between two moments, by `perf_counter_ns`."""

    launched: list[LaunchedWork]
    started_ns: int
    ended_ns: int

    def holds(self, time_ns: int) -> bool:
        """Whether a moment is between them."""
        return self.started_ns <= time_ns <= self.ended_ns


class KernelTimes:
    """Keeps an accelerator's records while it is entered, and gives them to the calls that were written.

    Attributes
    ----------
    failure : why there are no records, None where there are
    """

    def __init__(self) -> None:
        self.failure: str | None = None
        self._patches = Patches()
        self._thread = self._started_ns = 0
        self.forget()

    def forget(self) -> None:
        """Begin with no calls and no records, as a forked process does, which may not use the accelerator."""
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
        """What starts a profile of the program: torch has one at a time, and would refuse it."""

        @functools.wraps(original)
        def prepare(*args: Any, **kwargs: Any) -> Any:
            if self._profile is not None and threading.get_ident() == self._thread:
                self.failure = "the program profiled itself, and they end there"
                self._stop()
            return original(*args, **kwargs)

        return prepare

    def _note_idle(self, block: WrittenCalls, windows: Sequence[Window]) -> None:
        """Give calls that work on an accelerator, and launched nothing in the windows, no time there."""
        for place, (signature, start) in enumerate(zip(block.signatures, block.starts, strict=True)):
            if signature in self._signatures and any(window.holds(start) for window in windows):
                block.device_ns[place] = max(0, block.device_ns[place])

    def _stop(self) -> None:
        profile, self._profile = self._profile, None
        if profile is None:
            return
        try:
            # the profile waits for the thread's current device, and what others still do is in no record
            for device in self._devices:
                synchronize(device)
            events = profile.stop()
            ended_ns = perf_counter_ns()
            self._windows.append(Window(launched_by(events, clock_distance_ns()), self._started_ns, ended_ns))
        except Exception as error:
            raise_if_from_program(error)
            self.failure = one_line(error)

    def expect(self, signature: int, device: torch.device) -> None:
        """Take note that calls of a signature give a device work."""
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
        """Take note of calls that are written now, after all others of their thread that were."""
        first = self._calls_by_thread[thread]
        self._calls_by_thread[thread] += len(starts)
        self._blocks.append(WrittenCalls(thread, idents, first, signatures, starts, ends, [-1] * len(starts)))

    def take_windows(self) -> list[Window]:
        """What has ended; its calls are all there to be written."""
        windows = self._windows[:]
        del self._windows[: len(windows)]
        return windows

    def records(self, windows: Sequence[Window]) -> Iterator[Record]:
        """What windows tell of the calls that were written."""
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
        # others may have calls of the next window too: what is told of them then stands for all
        self._blocks = [block for block in self._blocks if block.ends[-1] > windows[-1].ended_ns]
        for signature, names in sorted(kernels.items()):
            launches, times = zip(*names.values(), strict=True)
            yield Kernels(signature, list(names), list(launches), list(times))


def check_kernels(device: str | None = None) -> None:
    """Raise `UserError` where no accelerator here, or not this device, keeps records of its kernels."""
    kinds = recorded_activities()
    if device is None and kinds:
        return
    if device is None or torch.device(device).type not in kinds:
        what = "no device here keeps" if device is None else f"the device {device} keeps no"
        raise UserError(f"{what} records of its kernels", "leave out --device-time kernels")


def launched_by(events: Sequence[Any], distance_ns: int) -> list[LaunchedWork]:
    """What an accelerator did and who launched it, of a profile's events.

    Parameters
    ----------
    events : of torch's profiler, which has a launch and what it led to under the same correlation
    distance_ns : how far the profile's clock is ahead of `perf_counter_ns`
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
    """For what one thread launched inside calls: the innermost one's block and place. All of them get the time."""
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
    """How far the system's clock, which profiles have, is ahead of `perf_counter_ns`."""
    readings = []
    for _ in range(CLOCK_READINGS):
        before, now, after = perf_counter_ns(), time_ns(), perf_counter_ns()
        readings.append((after - before, now - (before + after) // 2))
    return min(readings)[1]


def identities_here() -> tuple[int, int]:
    """Return the numbers by which an accelerator's records may name this thread."""
    return threading.get_native_id(), threading.get_ident() & ID_BITS
