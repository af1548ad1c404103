"""Cost of a page fault on this machine, and detection of much slower page faults."""

from __future__ import annotations

import functools
import mmap
import resource
from pathlib import Path
from time import perf_counter_ns

import numpy as np

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
PROBED_BYTES, PROBES = 2 << 20, 3
TICK_NS = 4_000_000
"""unit in which most kernels count the system time of a process"""


def is_slow(faults: float, system_ns: float, usual_ns: float) -> bool:
    """Return True if the kernel took more ticks for page faults than their usual cost and chance explain."""
    usual = faults * usual_ns / TICK_NS
    chance: float = 3 * usual**0.5 + 3
    return system_ns / TICK_NS >= usual + chance


@functools.cache
def usual_fault_ns() -> float | None:
    """Measure the usual time of a page fault for memory that the system has ready, or None if unknown.

    Recently freed pages are the next ones that the system provides. If it provides huge pages on its own, page faults
    differ in size and have no usual cost.
    """
    if not hasattr(mmap, "MADV_DONTNEED") or _has_huge_pages():
        return None
    with mmap.mmap(-1, PROBED_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        costs = [_touch(memory) for _ in range(PROBES)]
    known = [cost for cost in costs[1:] if cost is not None]
    return min(known) if known else None


def _touch(memory: mmap.mmap) -> float | None:
    """Write all pages, free them, and return the time per page fault."""
    pages = np.frombuffer(memory, dtype=np.uint8)[:: resource.getpagesize()]
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, perf_counter_ns()
    pages[:] = 1
    duration = perf_counter_ns() - start
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    del pages
    memory.madvise(mmap.MADV_DONTNEED)
    return duration / faults if faults else None


def _has_huge_pages() -> bool:
    try:
        return "[always]" in HUGE_PAGES.read_text(encoding="ascii")
    except OSError:
        return False
