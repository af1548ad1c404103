"""Detection of disturbances of timed runs: a slower processor, slow memory, other processes on the cores."""

from __future__ import annotations

import os
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from time import perf_counter_ns

import numpy as np
import torch

from opgrip.platform.contention import Contention, Waits
from opgrip.replay.cases.preceding_calls import BEFORE

# data whose checksum takes some microseconds to compute: constant work in the nearest cache
PROBE = bytes(range(256)) * 64
SLOWED = 4 / 3  # ratio of a probe's duration to the shortest one, from which on the core counts as slowed or contended
# number of bytes that are read to measure memory, more than a core's caches hold, and number of reads; this takes 1 ms
MEMORY_BYTES, MEMORY_READS = 8 << 20, 3
MEMORY_EVERY_NS = 500_000_000
# time in ns after contention during which each run is checked separately, which takes ten microseconds per run
WATCHFUL_NS = 200_000_000
CHECK_NS = 10_000_000  # between two checks in a pass; a check takes some ten microseconds and evicts a few cache lines
SHARE = 0.05  # share of a pass's time; a pass that is disturbed for longer counts as slowed or contended


class Pace:
    def __init__(self) -> None:
        self._best = min(_probe_ns() for _ in range(50))

    def is_slowed(self) -> bool:
        """Return True if the processor takes over a third longer for the same work than at its highest speed so far."""
        first = _probe_ns()
        probe_ns = first if first <= self._best * SLOWED else min(first, _probe_ns())
        self._best = min(self._best, probe_ns)
        return probe_ns > self._best * SLOWED


class MemoryPace:
    def __init__(self) -> None:
        self._data = np.ones(MEMORY_BYTES // 8, dtype=np.float64)
        self._read_ns, self._gb_per_s = 0, 0.0

    def gb_per_s(self) -> float:
        if perf_counter_ns() - self._read_ns > MEMORY_EVERY_NS:
            times = []
            for _ in range(MEMORY_READS):
                start = perf_counter_ns()
                self._data.sum()
                times.append(perf_counter_ns() - start)
            self._read_ns, self._gb_per_s = perf_counter_ns(), MEMORY_BYTES / float(np.median(times))
        return self._gb_per_s


def _probe_ns() -> int:
    start = perf_counter_ns()
    zlib.crc32(PROBE)
    return perf_counter_ns() - start


class Watch:
    """Detects whether the processor was slowed down, and whether other processes used the cores.

    threads, workers : see `Contention`
    is_alone : False if other processes take part in the measurement, so that a shared processor says nothing
    """

    def __init__(
        self,
        threads: int | None = None,
        workers: Callable[[], Iterable[int]] | None = None,
        is_alone: bool = True,
    ) -> None:
        self._pace, self._contention = Pace(), Contention(threads=threads, workers=workers)
        self._is_alone = is_alone
        self._watchful_until_ns = 0
        self._recent_waits: deque[Waits] = deque(maxlen=BEFORE + 1)

    @property
    def is_watchful(self) -> bool:
        """True for a while after contention, when runs should be checked one by one."""
        return perf_counter_ns() < self._watchful_until_ns

    @property
    def has_room(self) -> bool:
        return not self._is_alone or self._contention.has_room

    def close(self) -> None:
        self._contention.close()

    def before_run(self) -> bool:
        """Return True if `is_run_contended` should check the run that begins now."""
        is_watchful = self.is_watchful
        if is_watchful:
            self._recent_waits.append(self._contention.read())
        return is_watchful

    def is_run_contended(self, run_ns: float) -> bool:
        is_contended = self._contention.is_run_contended(self._recent_waits, run_ns)
        if is_contended:
            self._be_watchful()
        return is_contended

    def check(self, runs_ns: float | None = None, with_pace: bool = True) -> tuple[bool, bool]:
        """Return if the processor was slowed, and if other processes used the cores, since the last check.

        runs_ns : sum of the times of separate runs, which were checked one by one in watchful times; None if all of the
            time since the last check counts
        """
        is_slowed = with_pace and self._pace.is_slowed()
        is_contended = is_slowed and self._is_alone and self._contention.is_shared
        if runs_ns is None or not self.is_watchful:
            is_contended = self._contention.is_contended(run_ns=runs_ns) or is_contended
        if is_contended:
            self._be_watchful()
        return is_slowed, is_contended

    def _be_watchful(self) -> None:
        if not self.is_watchful:
            self._recent_waits.clear()
        self._watchful_until_ns = perf_counter_ns() + WATCHFUL_NS


class PassWatch(Watch):
    """Detects whether a pass over the calls of a step was disturbed, and during which calls.

    processes : number of processes that replay the step together
    """

    def __init__(self, processes: int = 1) -> None:
        super().__init__(is_alone=processes == 1)
        threads = torch.get_num_threads() * processes
        self._sees_others = processes == 1 or threads <= len(os.sched_getaffinity(0))
        self._reset()

    def _reset(self) -> None:
        self._began_ns = self._checked_ns = self._paced_ns = perf_counter_ns()
        self._slowed_ns = self._contended_ns = self._calls = self._first = 0
        self._contended: set[int] = set()

    def begin(self) -> None:
        # discard what happened before the pass
        self.check()
        self._reset()

    def after_call(self) -> None:
        self._calls += 1
        if perf_counter_ns() - self._paced_ns >= CHECK_NS:
            self._add(with_pace=True)
        elif self.is_watchful:
            self._add(with_pace=False)

    def end(self) -> None:
        self._add(with_pace=True)

    @property
    def is_slowed(self) -> bool:
        """True if the processor was slowed down, or used by others, for more than `SHARE` of the time."""
        return self._slowed_ns > SHARE * (self._checked_ns - self._began_ns)

    @property
    def is_contended(self) -> bool:
        return self._contended_ns > SHARE * (self._checked_ns - self._began_ns)

    @property
    def contended_calls(self) -> frozenset[int]:
        """Indices of the calls during which, or just before which, other processes used the cores."""
        return frozenset(self._contended)

    def _add(self, with_pace: bool) -> None:
        is_slowed, is_contended = self.check(with_pace=with_pace)
        now = perf_counter_ns()
        span_ns = now - self._checked_ns
        if is_slowed or is_contended:
            self._slowed_ns += now - self._paced_ns if is_slowed else span_ns
        if is_contended and self._sees_others:
            self._contended_ns += span_ns
            # the next call runs with caches that another process evicted
            self._contended.update(range(self._first, self._calls + 1))
        self._checked_ns, self._first = now, self._calls
        if with_pace:
            self._paced_ns = now
