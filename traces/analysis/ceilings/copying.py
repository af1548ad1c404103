"""How fast memory and caches are copied here; the best of several runs, since a ceiling is what nothing exceeds."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Thread
from time import perf_counter
from typing import Any

import numpy as np
import torch

from opgrip.platform.machine import free_memory, last_cache_bytes, lines
from opgrip.traces.analysis.ceilings.ceilings import Level

REPEATS, REPEAT_S = 6, 0.2
"""Runs of which the quickest counts: so many, and for so long."""
SHARE_OF_CACHE = 0.5
"""Bytes of both buffers, of those of the level: a cache that is full to the brim holds other things too."""
MEMORY_BYTES = 256 << 20
"""Of both buffers on the CPU, or eight times the last cache where that is more."""
MOST_BYTES = 4 << 30
MOST_COPIES = 200
"""On a device before its clock is read."""
BYTES_OF_FLOAT = 4
BYTES_A_RUN = 256 << 20
"""That copies within a cache move before the clock is read."""
CACHES = "/sys/devices/system/cpu/cpu0/cache"


def levels(device: str, threads: Sequence[int]) -> list[Level]:
    """The caches of a device and its memory.

    Parameters
    ----------
    threads : numbers of them that copy, on the CPU; the host's do nothing for a GPU
    """
    if torch.device(device).type == "cpu":
        levels = [*_cpu_caches(threads), memory(device, threads)]
    else:
        cache = last_cache_bytes(device)
        levels = [_on_device(device, "L2", cache, int(cache * SHARE_OF_CACHE)), memory(device, threads)]
    # a level gives no less than what is behind it, although under load it may seem to
    best = levels[-1].bandwidth
    for place, level in reversed(list(enumerate(levels))):
        best = {count: max(best[count], value) for count, value in level.bandwidth.items()}
        levels[place] = replace(level, bandwidth=best)
    return levels


def memory(device: str, threads: Sequence[int]) -> Level:
    """The memory of a device; parameters as those of `levels`."""
    free = free_memory(device) or MOST_BYTES
    if torch.device(device).type != "cpu":
        return _on_device(device, "memory", None, min(MOST_BYTES, free // 4))
    whole = min(max(MEMORY_BYTES, 8 * last_cache_bytes(device)), MOST_BYTES, free // 4)
    copied = {count: _copy_rate(whole // count, count) for count in threads}
    return Level("memory", None, len(os.sched_getaffinity(0)), no_less(copied))


def _cpu_caches(threads: Sequence[int]) -> Iterator[Level]:
    levels = caches() or [("L3", last_cache_bytes("cpu"), len(os.sched_getaffinity(0)))]
    for name, size, sharing in levels:
        both = {count: int(size * SHARE_OF_CACHE / min(count, sharing)) for count in threads}
        yield Level(name, size, sharing, no_less({count: _copy_rate(both[count], count) for count in threads}))


def no_less(rates: dict[int, float]) -> dict[int, float]:
    """More threads give no less than one: on a machine that others use too they may seem to."""
    return {count: max(value for other, value in rates.items() if other <= count) for count in rates}


def _copy_rate(size: int, threads: int) -> float:
    """GB/s that so many threads read and write together, each copying between buffers of `size` bytes in all."""
    half = max(size // 2, 64) // 64 * 64
    count = max(1, BYTES_A_RUN // (2 * half))
    sets = [_repeating_arrays(half, count) for _ in range(threads)]

    def run() -> None:
        others = [Thread(target=np.copyto, args=pair) for pair in sets[1:]]
        for thread in others:
            thread.start()
        np.copyto(*sets[0])
        for thread in others:
            thread.join()

    return threads * count * 2 * half / best_s(run) / 1e9


def _repeating_arrays(size: int, count: int) -> tuple[Any, Any]:
    """Two arrays of `count` elements of `size` bytes that all lie in the same place.

    Copying one to the other is `count` copies in one call: none of ours stands between them, which would take longer
    than a copy within the nearest cache.
    """
    buffers = (np.zeros(size, np.uint8).view(f"V{size}") for _ in range(2))
    target, source = (np.lib.stride_tricks.as_strided(buffer, (count,), (0,)) for buffer in buffers)
    return target, source


def caches(folder: str = CACHES) -> list[tuple[str, int, int]]:
    """Name, bytes and number of sharing processors of the first processor's caches for data."""
    levels = []
    for index in sorted(Path(folder).glob("index*")):
        facts = {name: "".join(lines(str(index / name))) for name in ("level", "type", "size", "shared_cpu_list")}
        if facts["type"] in ("Data", "Unified") and facts["size"].endswith("K") and facts["size"][:-1].isdigit():
            levels.append((f"L{facts['level']}", int(facts["size"][:-1]) << 10, _count(facts["shared_cpu_list"])))
    return sorted(levels)


def _on_device(device: str, name: str, size: int | None, both: int) -> Level:
    """A level of so many bytes, by copies between two buffers of `both` bytes in all."""
    elements = max(both // 2 // BYTES_OF_FLOAT, 1)
    target, source = (torch.zeros(elements, device=device) for _ in range(2))
    once_s = _on_device_s(lambda: _copy(source, target), device, repeats=2)
    count = max(1, min(MOST_COPIES, 4 * MOST_BYTES // both, int(REPEAT_S / REPEATS / max(once_s, 1e-6))))

    def copy() -> None:
        for _ in range(count):
            _copy(source, target)

    moved = count * 2 * BYTES_OF_FLOAT * elements
    return Level(name, size, 1, {1: moved / _on_device_s(_launched_at_once(copy, device), device) / 1e9})


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    # a kernel, which a graph begins sooner than a copy
    torch.neg(source, out=target)


def _launched_at_once(run: Callable[[], None], device: str) -> Callable[[], None]:
    """The same as a graph where the device has these: launching a copy can take longer than a copy within a cache."""
    if torch.device(device).type != "cuda":
        return run
    with torch.cuda.device(device):
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
    return graph.replay


def _on_device_s(run: Callable[[], None], device: str, repeats: int = REPEATS) -> float:
    """Seconds of the quickest run by the device's clock."""
    module = getattr(torch, torch.device(device).type)

    def timed() -> float:
        before, after = (torch.Event(device=torch.device(device), enable_timing=True) for _ in range(2))
        stream = module.current_stream(device)
        before.record(stream)
        run()
        after.record(stream)
        after.synchronize()
        return float(before.elapsed_time(after)) / 1e3

    with module.device(device):
        return min(timed() for _ in range(repeats))


def best_s(run: Callable[[], object], enough_s: float = 1.0) -> float:
    """Seconds of the quickest of some runs after a first; of the first alone where that took long."""
    start = perf_counter()
    run()
    best = perf_counter() - start
    runs = 0
    while best <= enough_s and (runs < REPEATS or perf_counter() - start < REPEAT_S):
        began = perf_counter()
        run()
        best = min(best, perf_counter() - began)
        runs += 1
    return best


def _count(listed: str) -> int:
    """How many processors `0-3,8` are."""
    ends = (part.split("-") for part in listed.split(",") if part)
    return max(1, sum(int(end[-1]) - int(end[0]) + 1 for end in ends))
