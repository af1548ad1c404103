"""Concurrent runs of cases on several threads, and how much they slow each other down."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field
from operator import truediv
from threading import Barrier, BrokenBarrierError, Lock
from time import perf_counter_ns
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch

from opgrip.replay.operators.contexts import restored
from opgrip.replay.operators.devices import DeviceLostError, check_use, synchronizer
from opgrip.replay.timing.disturbances import Watch
from opgrip.replay.timing.rounds import MOST_DROPPED, Announce, FunctionGroup, no_garbage_collection
from opgrip.replay.timing.samples import Samples
from opgrip.replay.timing.stopwatch import block_size
from opgrip.replay.timing.timed_functions import MOST, TimedFunction
from opgrip.replay.timing.timing_options import Effort

T = TypeVar("T")

# function whose argument is a function that waits for its work on the device
Work: TypeAlias = Callable[[Callable[[], None]], T]


class ThreadGroup:
    def __init__(self, group: FunctionGroup, count: int, device: str) -> None:
        self._group = group
        self.device = device
        self.synchronize = synchronizer(device)
        self._threads = ThreadPoolExecutor(count)
        self._kind = torch.device(device).type
        streams = 0 if self._kind == "cpu" else count
        self._streams = [getattr(torch, self._kind).Stream(device) for _ in range(streams)]

    def __enter__(self) -> ThreadGroup:
        return self

    def __exit__(self, *error: object) -> None:
        self._threads.shutdown()

    def at_once(self, functions: Sequence[Work[T]]) -> list[T]:
        # a thread that waits here takes no other function, so each function gets a separate thread
        barrier = Barrier(len(functions))
        self.synchronize()
        running = [self._threads.submit(self._run, place, one, barrier) for place, one in enumerate(functions)]
        try:
            return [future.result() for future in running]
        except BaseException as error:
            barrier.abort()
            # if the device is lost, leaving a thread's stream may have raised instead of the first error
            check_use(self.device, error)
            raise

    def _run(self, place: int, function: Work[T], barrier: Barrier) -> T:
        stream: AbstractContextManager[Any] = nullcontext()
        finish = self.synchronize
        if self._streams:
            stream = getattr(torch, self._kind).stream(self._streams[place])
            finish = self._streams[place].synchronize
        try:
            # gradient and inference mode are per thread; per-process settings are set already
            with restored(self._group.settings), torch.set_grad_enabled(self._group.grad), stream:
                barrier.wait()
                return function(finish)
        except BrokenBarrierError:
            raise
        except BaseException:
            barrier.abort()
            raise


LOADED = "loaded"


@dataclass(frozen=True, slots=True)
class ConcurrentRun:
    """Times of one function while other functions ran at the same time.

    loaded : mean time of a run in ns in each repeat; a repeat lasts until all functions have run once
    overlap : time of all functions if run one after the other, divided by their time if run at once
    """

    timed_function: TimedFunction
    loaded: Samples
    overlap: float | None
    together: int


def measure_concurrently(
    groups: Sequence[FunctionGroup],
    count: int,
    effort: Effort,
    device: str,
    announce: Announce = lambda number, row: None,
) -> Iterator[ConcurrentRun]:
    """Measure the functions of each group in batches of `count` that run concurrently."""
    for group in groups:
        with restored(group.settings), torch.set_grad_enabled(group.grad), no_garbage_collection():
            for start in range(0, len(group.functions), count):
                batch = group.functions[start : start + count]
                with ThreadGroup(group, len(batch), device) as thread_group:
                    yield from _Batch(batch, thread_group, effort, announce).measured()


@dataclass(slots=True)
class _Times:
    timed_function: TimedFunction
    loaded: Samples = field(default_factory=lambda: Samples({LOADED: 1.0}))


class _Load:
    def __init__(self, count: int) -> None:
        self.begun_ns: int | None = None
        self.over_ns: int | None = None
        self._pending = count
        self._lock = Lock()

    def begin(self) -> int:
        with self._lock:
            if self.begun_ns is None:
                self.begun_ns = perf_counter_ns()
            return self.begun_ns

    def first_is_done(self) -> None:
        with self._lock:
            self._pending -= 1
            if self._pending == 0:
                self.over_ns = perf_counter_ns()


class _Batch:
    def __init__(
        self, functions: Sequence[TimedFunction], thread_group: ThreadGroup, effort: Effort, announce: Announce
    ) -> None:
        self._all = [_Times(timed_function) for timed_function in functions]
        self._thread_group = thread_group
        self._effort = effort
        self._announce = announce
        self._overlaps: list[float] = []
        self._block = 0
        self._turn = 0

    def measured(self) -> list[ConcurrentRun]:
        threads = len(self._all) * torch.get_num_threads()
        with closing(Watch(threads)) as watch:
            while self._again():
                self._repeat(watch)
        for times in self._all:
            times.loaded.settle(self._effort)
        return [self._result(times) for times in self._all]

    def _list_running(self) -> list[_Times]:
        return [times for times in self._all if times.timed_function.failure is None]

    def _again(self) -> bool:
        most = MOST if self._effort.iterations is None else self._effort.iterations
        return any(
            times.loaded.done(self._effort) is None and len(times.loaded) < most for times in self._list_running()
        )

    def _repeat(self, watch: Watch) -> None:
        began = perf_counter_ns()
        watch.check()
        alone = [self._guarded(times.timed_function, self._alone) for times in self._list_running()]
        running = self._list_running()
        if len(running) < len(alone) or not running:
            return
        # the thread that starts first determines who waits for whom, so each timed_function starts first in turn
        first = self._turn % len(running)
        self._turn += 1
        running = running[first:] + running[:first]
        for times in running:
            self._announce(times.timed_function.number, times.timed_function.row)
        spans = self._thread_group.at_once([self._once(times.timed_function) for times in running])
        load = _Load(len(running))
        under = self._thread_group.at_once([self._loaded(times.timed_function, load) for times in running])
        spent = (perf_counter_ns() - began) // len(running)
        alone_ns = [time for time in alone[first:] + alone[:first] if time is not None]
        if not self._block:
            self._block = min(block_size(max(alone_ns)), *(times.timed_function.most_in_block() for times in running))
            return
        # a failed timed_function invalidates the repeat, because the others ran without it for a part of it
        if len(self._list_running()) < len(running):
            return
        is_slowed, is_contended = watch.check()
        dropped = is_slowed and not is_contended and running[0].loaded.dropped < MOST_DROPPED
        for times, loaded_ns in zip(running, under, strict=True):
            times.loaded.spent_ns += spent
            times.loaded.dropped += dropped
            if is_contended and loaded_ns is not None:
                times.loaded.add_contended(LOADED, loaded_ns)
            elif not dropped and loaded_ns is not None:
                times.loaded.add(LOADED, loaded_ns)
        if not dropped and not is_contended:
            starts, ends = zip(*filter(None, spans), strict=True)
            self._overlaps.append(sum(alone_ns) * self._block / max(max(ends) - min(starts), 1))

    def _alone(self, timed_function: TimedFunction) -> float:
        self._announce(timed_function.number, timed_function.row)
        runs = timed_function.ready(self._block or 1)
        self._thread_group.synchronize()
        start = perf_counter_ns()
        for args, kwargs in runs:
            timed_function.function(*args, **kwargs)
        self._thread_group.synchronize()
        return (perf_counter_ns() - start) / len(runs)

    def _once(self, timed_function: TimedFunction) -> Work[tuple[int, int] | None]:
        runs = self._guarded(timed_function, lambda timed_function: timed_function.ready(self._block or 1)) or []

        def run(finish: Callable[[], None]) -> tuple[int, int]:
            start = perf_counter_ns()
            for args, kwargs in runs:
                timed_function.function(*args, **kwargs)
            finish()
            return start, perf_counter_ns()

        return lambda finish: self._guarded(timed_function, lambda _: run(self._finisher(timed_function, finish)))

    def _loaded(self, timed_function: TimedFunction, load: _Load) -> Work[float | None]:
        def run(finish: Callable[[], None]) -> float:
            spans: list[tuple[int, int]] = []
            start = load.begin()
            while load.over_ns is None:
                runs = timed_function.ready(self._block or 1)
                if spans and (timed_function.mutates or timed_function.enters_each_run):
                    # preparing the arguments does not count
                    finish()
                    start = perf_counter_ns()
                for args, kwargs in runs:
                    timed_function.function(*args, **kwargs)
                finish()
                spans.append((start, start := perf_counter_ns()))
                if len(spans) == 1:
                    load.first_is_done()
            return _mean_until(load.over_ns, spans) / (self._block or 1)

        def guarded(finish: Callable[[], None]) -> float | None:
            time_ns = self._guarded(timed_function, lambda _: run(self._finisher(timed_function, finish)))
            if time_ns is None:
                load.first_is_done()
            return time_ns

        return guarded

    def _finisher(self, timed_function: TimedFunction, finish: Callable[[], None]) -> Callable[[], None]:
        return finish if timed_function.in_torch else self._thread_group.synchronize

    def _guarded(self, timed_function: TimedFunction, function: Callable[[TimedFunction], T]) -> T | None:
        try:
            return function(timed_function)
        except Exception as error:
            try:
                check_use(self._thread_group.device, error)
            except DeviceLostError:
                # other functions have been announced in the meantime
                self._announce(timed_function.number, timed_function.row)
                raise
            timed_function.fail(error, self._thread_group.device)
            return None

    def _result(self, times: _Times) -> ConcurrentRun:
        overlap = float(np.median(self._overlaps)) if self._overlaps else None
        return ConcurrentRun(times.timed_function, times.loaded, overlap, len(self._all))


def _mean_until(end_ns: int, spans: Sequence[tuple[int, int]]) -> float:
    durations = [max(end - start, 1) for start, end in spans]
    before = [max(min(end, end_ns) - start, 0) for start, end in spans]
    return sum(before) / max(float(sum(map(truediv, before, durations))), 1e-9)
