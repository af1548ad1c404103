"""The clock that runs are timed by, and whether the processor and the memory keep their pace meanwhile."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from time import perf_counter_ns

import numpy as np

PROBE = bytes(range(256)) * 64
"""A checksum of this takes some microseconds, always the same work on data that stays in the nearest cache."""
SLOWED = 4 / 3
"""A probe that takes so much longer than the quickest means that the processor was slowed down or taken away."""


MEMORY_BYTES, MEMORY_READS = 8 << 20, 3
"""Bytes that the memory probe reads, more than the caches of a core hold, and how often it does: it takes 1 ms."""
MEMORY_EVERY_NS = 500_000_000
"""Least time between two memory probes."""


def empty_call_ns(wait: Callable[[], None] = lambda: None, count: int = 200) -> float:
    """What a timed section takes beside the call in it, in ns: reading the clock twice.

    Parameters
    ----------
    wait : for a device that has nothing to do
    """
    times = []
    for _ in range(count):
        start = perf_counter_ns()
        wait()
        times.append(perf_counter_ns() - start)
    return float(np.median(times))


class Pace:
    """Tells whether the processor runs as fast as it did at its best."""

    def __init__(self) -> None:
        self._best = min(_probe_ns() for _ in range(50))

    def is_slowed(self) -> bool:
        """Whether it is slower now by a quarter or more. The better of two probes counts: one may be interrupted."""
        first = _probe_ns()
        probe_ns = first if first <= self._best * SLOWED else min(first, _probe_ns())
        self._best = min(self._best, probe_ns)
        return probe_ns > self._best * SLOWED


class MemoryPace:
    """Measures now and then how fast this thread reads memory, which programs and virtual machines share."""

    def __init__(self) -> None:
        self._data = np.ones(MEMORY_BYTES // 8, dtype=np.float64)
        self._read_ns, self._gb_per_s = 0, 0.0

    def gb_per_s(self) -> float:
        """Return the rate of the last probe, in GB/s; make a new one if that was some time ago."""
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
