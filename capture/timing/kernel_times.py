"""Device time of calls, derived from an accelerator's own records of kernels, copies and fills."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from threading import get_ident, get_native_id
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from opgrip.capture.program.accelerators import KINDS, GraphCaptures, is_capturing, is_started, synchronize, with_index
from opgrip.capture.program.patches import Patches
from opgrip.capture.torch_compat.torch_private import PREPARE_PROFILER
from opgrip.errors import UserError, one_line, raise_if_from_program
from opgrip.platform import perf_counter_ns, time_ns
from opgrip.platform.activity_records import (
    ID_BITS,
    ActivityProfile,
    LaunchedWork,
    injected_profiler,
    is_launch,
    is_work,
    launch_nothing,
    launched_by,
    recorded_activities,
    running_profile,
)
from opgrip.traces.formats.profiler_events import LAUNCH as KERNEL_LAUNCH
from opgrip.traces.schema.records import DeviceTimes, Graph, GraphTimes, Kernels, Record

MOST_CALLS_OF_WINDOW = 100_000  # number of calls after which a new window begins: torch's profiler stops at 128 MiB


class KernelTimes:
    """Collects an accelerator's records of its work, and assigns them to the calls that were written.

    is_cut : True if torch's profiler stopped collecting records too early
    """

    def __init__(self, is_required: bool = True) -> None:
        self.failure: str | None = None
        self.fallback: str | None = None
        self.is_cut = False
        self._is_required = is_required
        self._patches = Patches()
        self._thread = self._started_ns = 0
        self._is_entered = self._has_own_kernels = False
        self.forget()

    def forget(self) -> None:
        """Forget the profile, calls and records without using the accelerator."""
        self._profile: ActivityProfile | None = None
        self._signatures: set[int] = set()
        self._devices: set[torch.device] = set()
        self._windows: list[Window] = []
        self._blocks: list[WrittenCalls] = []
        self.graphs = GraphNodes()
        self._calls_by_thread: Counter[int] = Counter()
        self._calls_in_window = 0
        self._ended_ns = -1

    def __enter__(self) -> KernelTimes:
        self._thread, self._is_entered = get_ident(), True
        # first ask what is started, because asking for activities initializes an accelerator
        started = [kind for kind in KINDS if is_started(kind)]
        if self._is_required or (started and not recorded_activities().keys().isdisjoint(started)):
            self._start()
        return self

    def __exit__(self, *ignored: object) -> None:
        self._is_entered = False
        self._stop()

    def _start(self) -> None:
        if not self._is_required and (self.fallback or self.failure):
            return
        other = running_profile() or (None if self._is_required else injected_profiler())
        if other is not None:
            self._refuse(other)
            return
        profile = ActivityProfile()
        try:
            profile.start()
            kind = next(iter(recorded_activities()), None)
            # a kernel launched during a capture would become part of the program's graph
            self._has_own_kernels = (
                kind is not None and is_started(kind) and not is_capturing(kind) and launch_nothing(kind)
            )
            self._profile, self._thread = profile, get_ident()
            self._started_ns, self._ended_ns, self._calls_in_window = perf_counter_ns(), FOREVER_NS, 0
            for module, name in PREPARE_PROFILER:
                self._patches.replace(module, name, self._giving_way)
        except Exception as error:
            raise_if_from_program(error)
            self._refuse(one_line(error))

    def _refuse(self, reason: str) -> None:
        if self._is_required:
            self.failure = reason
        else:
            self.fallback = reason

    def renew(self, graphs: GraphCaptures) -> None:
        """Start a new profile after many calls, because a profile's records stay in memory until it stops."""
        is_long = self._profile is not None and self._calls_in_window > MOST_CALLS_OF_WINDOW
        if is_long and get_ident() == self._thread:
            # a graph that any thread captures would be lost if this waited for the device
            with graphs.question() as may_ask:
                if may_ask:
                    self._stop()
                    self._start()

    def _giving_way(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def prepare(*args: Any, **kwargs: Any) -> Any:
            if self._profile is not None:
                self.failure = "the program started its profiler, after which no kernel is recorded"
                if get_ident() == self._thread:
                    self._stop()
                else:
                    # only the thread that began a profile may end it, else the process crashes
                    self._patches.undo()
                    self._profile, self._ended_ns = None, perf_counter_ns()
            return original(*args, **kwargs)

        return prepare

    def _note_idle(self, block: WrittenCalls, spans: Sequence[tuple[int, int, int]]) -> None:
        for place, (signature, start) in enumerate(zip(block.signatures, block.starts, strict=True)):
            for started, first, last in spans:
                if started <= start < first:
                    block.device_ns[place] = -1
                elif signature in self._signatures and first <= start <= last:
                    block.device_ns[place] = max(0, block.device_ns[place])

    def _stop(self) -> None:
        profile, self._profile = self._profile, None
        if profile is None:
            return
        self._patches.undo()
        last_ns = perf_counter_ns()
        try:
            # the profile waits only for the thread's current device; work still running on other devices would be
            # missing
            for device in self._devices:
                synchronize(device)
            events = profile.stop()
            ended_ns = perf_counter_ns()
            if events or not self._devices:
                distance_ns, has_own = clock_distance_ns(), self._has_own_kernels
                window = Window(profile, events, distance_ns, self._started_ns, last_ns, ended_ns, has_own)
                self._windows.append(window)
            else:
                self.failure = "torch's profiler returned no records: another profiler may use them"
        except Exception as error:
            raise_if_from_program(error)
            self.failure = one_line(error)
        finally:
            self._ended_ns = perf_counter_ns()

    def expect(self, signature: int, device: torch.device, graphs: GraphCaptures) -> bool:
        if self._profile is None and not self._is_required:
            is_here = self._is_entered and get_ident() == self._thread
            # a profile may wait for the device when it begins, which would end a graph's capture
            if not is_here or is_capturing(device.type) or device.type not in recorded_activities():
                return False
            with graphs.question() as may_ask:
                if may_ask:
                    self._start()
            if self._profile is None:
                return False
        self._signatures.add(signature)
        self._devices.add(with_index(device))
        return True

    def note(
        self,
        thread: int,
        idents: tuple[int, ...],
        signatures: Sequence[int],
        starts: Sequence[int],
        ends: NDArray[np.int64],
    ) -> None:
        first = self._calls_by_thread[thread]
        self._calls_by_thread[thread] += len(starts)
        if starts and starts[0] <= self._ended_ns:
            self._calls_in_window += len(starts)
            untimed = [-1] * len(starts)
            self._blocks.append(WrittenCalls(thread, idents, first, signatures, starts, ends.tolist(), untimed))

    def take_windows(self) -> list[Window]:
        windows = self._windows[:]
        del self._windows[: len(windows)]
        return windows

    def records(self, windows: Sequence[Window]) -> Iterator[Record]:
        if not windows:
            return
        kernels: KernelCounts = {}
        by_ident: dict[int, list[WrittenCalls]] = {}
        for block in self._blocks:
            for ident in block.idents:
                by_ident.setdefault(ident, []).append(block)
        by_thread: dict[int, list[LaunchedWork]] = {}
        spans: list[tuple[int, int, int]] = []
        for window in windows:
            launched = window.launched()
            spans.append((window.started_ns, window.complete_from_ns(launched), window.complete_until_ns()))
            self.is_cut |= spans[-1][2] < window.ended_ns
            for item in launched:
                by_thread.setdefault(item.thread, []).append(item)
        self.graphs.find(windows)
        of_launches: dict[GraphLaunch, list[LaunchedWork]] = {}
        for ident, items in by_thread.items():
            for block, place, item in innermost_calls(by_ident.get(ident, ()), items):
                signature = block.signatures[place]
                if signature in self.graphs:
                    of_launches.setdefault((signature, block.thread, block.first + place), []).append(item)
                else:
                    add_kernel(kernels, signature, item)
        yield from self.graphs.divide(of_launches, kernels)
        for block in self._blocks:
            self._note_idle(block, spans)
            if max(block.device_ns) >= 0:
                yield DeviceTimes(block.thread, block.first, list(block.device_ns))
        # A block of another thread may also contain calls of the next window. It is kept, and its next record replaces
        # this one.
        self._blocks = [block for block in self._blocks if block.ends[-1] > windows[-1].ended_ns]
        for signature, names in sorted(kernels.items()):
            launches, times = zip(*names.values(), strict=True)
            yield Kernels(signature, list(names), list(launches), list(times))


def check_kernels(device: str | None = None) -> None:
    kinds = recorded_activities()
    if device is None and kinds:
        return
    if device is None or torch.device(device).type not in kinds:
        what = "no device here records" if device is None else f"the device {device} does not record"
        raise UserError(f"{what} its kernels", "leave out --device-time kernels")


# signature of a launch, its thread, and its position among the thread's calls
GraphLaunch: TypeAlias = tuple[int, int, int]
# by signature and name of a kernel: number of runs and their total time in ns
KernelCounts: TypeAlias = dict[int, dict[str, list[int]]]


def add_kernel(kernels: KernelCounts, signature: int, item: LaunchedWork) -> None:
    count = kernels.setdefault(signature, {}).setdefault(item.name, [0, 0])
    count[0] += 1
    count[1] += item.duration_ns


@dataclass(frozen=True, slots=True)
class _Nodes:
    signatures: Sequence[int]
    added: list[tuple[int, int]] = field(default_factory=list)


class GraphNodes:
    """For each CUDA graph that the program captured, its nodes (pieces of work), each with the call that added it."""

    def __init__(self) -> None:
        self._graphs: dict[int, _Nodes] = {}
        self._calls: list[tuple[int, WrittenCalls]] = []

    def __contains__(self, signature: int) -> bool:
        return signature in self._graphs

    def note(self, graph: Graph, parts: Iterable[WrittenCalls]) -> None:
        self._graphs[graph.signature] = _Nodes(graph.calls)
        self._calls += ((graph.signature, part) for part in parts)

    def find(self, windows: Sequence[Window]) -> None:
        nodes = [item for window in windows for item in nodes_in(window.events, window.distance_ns)]
        for signature, calls in self._calls:
            own = (item for item in nodes if item.thread in calls.idents)
            added = [(item.at_ns, calls.signatures[place]) for _, place, item in innermost_calls([calls], own)]
            self._graphs[signature].added.extend(added)
        self._calls = [(number, calls) for number, calls in self._calls if max(calls.ends) > windows[-1].ended_ns]

    def divide(
        self, of_launches: Mapping[GraphLaunch, Sequence[LaunchedWork]], kernels: KernelCounts
    ) -> Iterator[Record]:
        times: dict[int, list[int]] = {}
        for (number, *_), items in of_launches.items():
            graph = self._graphs[number]
            places = [place for _, place in sorted(graph.added)]
            if len(places) != len(items):
                for item in items:
                    add_kernel(kernels, number, item)
                continue
            own = times.setdefault(number, [0] * len(graph.signatures))
            for place, item in zip(places, items, strict=True):
                own[place] += item.duration_ns
                add_kernel(kernels, graph.signatures[place], item)
        for number, own in times.items():
            yield GraphTimes(number, own)


FOREVER_NS = (1 << 63) - 1  # end time in ns of a graph capture or of a profile that has not ended
CLOCK_READINGS = 20
CUT_NS = 1_000_000_000  # time in ns; a window that ends with a longer time without a launch counts as incomplete


def nodes_in(events: Sequence[Any], distance_ns: int) -> list[LaunchedWork]:
    with_work = {event.correlation_id() for event in events if is_work(event)}
    return [
        LaunchedWork(event.name(), event.device_resource_id() & ID_BITS, event.start_ns() - distance_ns, 0)
        for event in events
        if is_launch(event) and event.correlation_id() not in with_work and KERNEL_LAUNCH.fullmatch(event.name())
    ]


@dataclass(slots=True)
class WrittenCalls:
    """Calls of one thread that are in the trace, and their device times as far as they are known.

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
    """The records of the work that was launched in a period; times are by `perf_counter_ns`.

    distance_ns : time by the events' clock minus time by `perf_counter_ns`
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
        if not self.has_own_kernels:
            return self.started_ns
        return max(self.started_ns, min((item.at_ns for item in launched), default=self.ended_ns))

    def complete_until_ns(self) -> int:
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
    return get_native_id(), get_ident() & ID_BITS
