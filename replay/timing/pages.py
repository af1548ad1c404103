"""Control of whether a call's results are in newly mapped or in resident memory pages, as in the program."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from opgrip.platform.contention import TICK_NS, usual_fault_ns
from opgrip.replay.operators.memory import LARGE

PAGE = resource.getpagesize()
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
PR_SET_THP_DISABLE, PR_GET_THP_DISABLE = 41, 42
MADV_DONTNEED = 4
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
SLACK = 4 * LARGE
MOST_ARRANGEMENTS, MOST_ARRANGED = 5, 256 << 20  # limits in rounds and bytes; beyond them, blocks are not arranged
LARGEST_KEPT = 32 << 20  # size in bytes above which glibc maps and unmaps each block separately
# page faults are slow if they take this factor longer than usual, and this number of kernel ticks longer
SLOW, SLOW_TICKS = 2.0, 3
ARENAS_OF_PROCESSOR = 8  # glibc's default limit on the number of arenas per core


def _glibc() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(None)
        _ = library.malloc_trim, library.mallopt
    except (OSError, AttributeError):
        return None
    return library


_LIBRARY = _glibc()
CONTROLLED = _LIBRARY is not None  # True if new or resident pages can be chosen in this process


def keep_freed_memory() -> None:
    """Let glibc keep freed blocks of up to 32 MB in this process from now on."""
    if _LIBRARY is not None:
        _LIBRARY.mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)
        _LIBRARY.mallopt(M_TRIM_THRESHOLD, 1 << 30)
        _LIBRARY.mallopt(M_ARENA_MAX, 1)
        with suppress(OSError):
            if "[madvise]" in HUGE_PAGES.read_text():
                _prctl(PR_SET_THP_DISABLE, 1)


@contextmanager
def keeping_freed_memory() -> Iterator[None]:
    huge_pages_disabled = _prctl(PR_GET_THP_DISABLE, 0)
    keep_freed_memory()
    try:
        yield
    finally:
        if _LIBRARY is not None:
            # the threshold for mapping blocks stays
            _LIBRARY.mallopt(M_TRIM_THRESHOLD, 2 * LARGEST_KEPT)
            _LIBRARY.mallopt(M_ARENA_MAX, ARENAS_OF_PROCESSOR * (os.cpu_count() or 1))
            if huge_pages_disabled == 0:
                _prctl(PR_SET_THP_DISABLE, 0)
            give_back()


def _prctl(option: int, value: int) -> int:
    if _LIBRARY is None:
        return -1
    return int(_LIBRARY.prctl(option, *map(ctypes.c_ulong, (value, 0, 0, 0))))


def give_back() -> None:
    if _LIBRARY is not None:
        _LIBRARY.malloc_trim(0)


def touch(size: int) -> None:
    """Allocate, write and free `size` bytes, so that the next result of this size is in resident pages."""
    torch.empty(size + LARGE, dtype=torch.uint8).fill_(0)


def arrange(sizes: Sequence[int], fresh_bytes: int) -> None:
    """Allocate and free blocks so that the next ones have, if possible, `fresh_bytes` in newly mapped pages."""
    share = min(fresh_bytes / max(sum(sizes), 1), 1.0)
    requests = [(size, round(size * share)) for size in sizes]
    besides = fresh_bytes - sum(sizes)
    if besides >= LARGE:
        requests.append((besides, besides))
    # glibc returns the smallest block that is large enough, and small allocations may take a part of it first
    requests = [
        (size + slack, fresh) for size, fresh in requests for slack in (0, SLACK) if size + slack < LARGEST_KEPT
    ]
    if sum(size for size, _ in requests) > MOST_ARRANGED:
        return
    arranged: set[tuple[int, int]] = set()
    for _ in range(MOST_ARRANGEMENTS):
        try:
            # with deterministic algorithms, torch would fill a tensor
            blocks = [torch.UntypedStorage(size) for size, _ in requests]
        except RuntimeError:
            # not enough memory for all blocks, but maybe for the call
            return
        places = {
            (block.data_ptr(), size): (block, fresh) for block, (size, fresh) in zip(blocks, requests, strict=True)
        }
        # freed blocks may merge with their neighbours, so that the next blocks are elsewhere
        if places.keys() <= arranged:
            return
        for place in places.keys() - arranged:
            _arrange(*places[place])
        arranged |= places.keys()
        del blocks, places


def _arrange(block: torch.UntypedStorage, fresh_bytes: int) -> None:
    # only whole pages in the block, because the rest of its first and last page belongs to other data
    first = -block.data_ptr() % PAGE
    length = max(min(fresh_bytes, block.nbytes() - first), 0) // PAGE * PAGE
    if length and _LIBRARY is not None:
        start = ctypes.c_void_p(block.data_ptr() + first)
        _LIBRARY.madvise(start, ctypes.c_size_t(length), MADV_DONTNEED)
    torch.empty(0, dtype=torch.uint8).set_(block)[first + length :: PAGE].fill_(0)


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


class FaultCount:
    def __init__(self) -> None:
        self._before = resource.getrusage(resource.RUSAGE_SELF)

    @property
    def faults(self) -> int:
        return faults() - self._before.ru_minflt

    def were_slow(self, duration_ns: float) -> bool:
        fault_ns = usual_fault_ns()
        usual_ns = None if fault_ns is None else fault_ns * self.faults
        if usual_ns is None or duration_ns < SLOW * usual_ns / torch.get_num_threads():
            return False
        system_ns = (resource.getrusage(resource.RUSAGE_SELF).ru_stime - self._before.ru_stime) * 1e9
        return bool(system_ns >= max(SLOW * usual_ns, usual_ns + SLOW_TICKS * TICK_NS))
