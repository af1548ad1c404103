"""Measures a machine's ceilings: the best of several runs, since a ceiling is what nothing exceeds."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from threading import Thread
from time import perf_counter
from typing import Any

import numpy as np
import torch

from opgrip.replay.machine import free_memory
from opgrip.replay.roofline.ceilings import Ceilings, Level
from opgrip.replay.timing.methods import synchronizer
from opgrip.traces.machine import last_cache_bytes, lines, processor

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8)
SIZES = (256, 512, 1024, 2048, 4096, 8192)
"""Rows and columns of the matrices whose product is timed."""
LONGEST_S = 0.12
"""A product that takes longer is not tried any larger."""
REPEATS, REPEAT_S = 6, 0.2
"""Runs of which the quickest counts: so many, and for so long."""
SHARE_OF_CACHE = 0.5
"""Bytes of both buffers, of those of the level: a cache that is full to the brim holds other things too."""
MEMORY_BYTES = 256 << 20
"""Of both buffers on the CPU, or eight times the last cache where that is more."""
MOST_BYTES = 4 << 30
BYTES_A_RUN = 256 << 20
"""That copies within a cache move before the clock is read."""
LAUNCHES = 2000
CACHES = "/sys/devices/system/cpu/cpu0/cache"


def measure(device: str) -> Ceilings:
    """The ceilings of this machine, or of one of its GPUs.

    On the CPU one thread is measured, and one a processor. Takes about 20 seconds.
    """
    kind = torch.device(device).type
    threads = sorted({1, len(os.sched_getaffinity(0))}) if kind == "cpu" else [1]
    rates: dict[str, dict[int, float]] = {}
    for count in threads:
        with _threads(count):
            for dtype in DTYPES:
                rate = _matrix_rate(dtype, device)
                if rate is not None:
                    rates.setdefault(str(dtype).removeprefix("torch."), {})[count] = rate
    one = torch.zeros(1, device=device)
    return Ceilings(
        machine=tuple(processor(device)),
        device=kind,
        threads=threads[-1],
        levels=tuple(_cpu_levels(threads) if kind == "cpu" else _device_levels(device)),
        rates={dtype: _best_so_far(found) for dtype, found in rates.items()},
        launch_us=_launch_us(torch.ops.aten.neg.default, one, device),
        dispatch_us=_launch_us(torch.ops.aten.alias.default, one, device),
        torch=torch.__version__,
        time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def caches(folder: str = CACHES) -> list[tuple[str, int, int]]:
    """Name, bytes and number of sharing processors of the first processor's caches for data."""
    found = []
    for index in sorted(Path(folder).glob("index*")):
        told = {name: "".join(lines(str(index / name))) for name in ("level", "type", "size", "shared_cpu_list")}
        if told["type"] in ("Data", "Unified") and told["size"].endswith("K") and told["size"][:-1].isdigit():
            found.append((f"L{told['level']}", int(told["size"][:-1]) << 10, _count(told["shared_cpu_list"])))
    return sorted(found)


def _cpu_levels(threads: list[int]) -> list[Level]:
    levels = list(_measured_levels(threads))
    # a level gives no less than what is behind it, although under load it may seem to
    best = levels[-1].bandwidth
    for place, level in reversed(list(enumerate(levels))):
        best = {count: max(best[count], value) for count, value in level.bandwidth.items()}
        levels[place] = replace(level, bandwidth=best)
    return levels


def _measured_levels(threads: list[int]) -> Iterator[Level]:
    told = caches() or [("L3", last_cache_bytes("cpu"), len(os.sched_getaffinity(0)))]
    for name, size, sharing in told:
        both = {count: int(size * SHARE_OF_CACHE / min(count, sharing)) for count in threads}
        yield Level(name, size, sharing, _best_so_far({count: _copied(both[count], count) for count in threads}))
    whole = min(max(MEMORY_BYTES, 8 * told[-1][1]), MOST_BYTES, (free_memory("cpu") or MOST_BYTES) // 4)
    memory = {count: _copied(whole // count, count) for count in threads}
    yield Level("memory", None, len(os.sched_getaffinity(0)), _best_so_far(memory))


def _best_so_far(measured: dict[int, float]) -> dict[int, float]:
    """More threads give no less than one: on a machine that others use too they may seem to."""
    return {count: max(value for other, value in measured.items() if other <= count) for count in measured}


def _copied(size: int, threads: int) -> float:
    """GB/s that so many threads read and write together, each copying between buffers of `size` bytes in all."""
    half = max(size // 2, 64) // 64 * 64
    count = max(1, BYTES_A_RUN // (2 * half))
    sets = [_repeated(half, count) for _ in range(threads)]

    def run() -> None:
        others = [Thread(target=np.copyto, args=pair) for pair in sets[1:]]
        for thread in others:
            thread.start()
        np.copyto(*sets[0])
        for thread in others:
            thread.join()

    return threads * count * 2 * half / _best_s(run) / 1e9


def _repeated(size: int, count: int) -> tuple[Any, Any]:
    """Two arrays of `count` elements of `size` bytes that all lie in the same place.

    Copying one to the other is `count` copies in one call: none of ours stands between them, which would take longer
    than a copy within the nearest cache.
    """
    buffers = (np.zeros(size, np.uint8).view(f"V{size}") for _ in range(2))
    target, source = (np.lib.stride_tricks.as_strided(buffer, (count,), (0,)) for buffer in buffers)
    return target, source


def _device_levels(device: str) -> Iterator[Level]:
    cache = last_cache_bytes(device)
    whole = min(MOST_BYTES, (free_memory(device) or MOST_BYTES) // 4)
    for name, size, both in (("L2", cache, int(cache * SHARE_OF_CACHE)), ("memory", None, whole)):
        target, source = (torch.zeros(both // 2, dtype=torch.uint8, device=device) for _ in range(2))
        count = max(1, min(200, 4 * MOST_BYTES // both))
        yield Level(name, size, 1, {1: count * 2 * (both // 2) / _on_device_s(target, source, count) / 1e9})


def _on_device_s(target: torch.Tensor, source: torch.Tensor, count: int) -> float:
    """Seconds by the device's clock of so many copies, whose launches overlap with those before."""

    def run() -> float:
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        for _ in range(count):
            target.copy_(source)
        after.record()
        after.synchronize()
        return float(before.elapsed_time(after)) / 1e3

    return min(run() for _ in range(REPEATS))


def _matrix_rate(dtype: torch.dtype, device: str) -> float | None:
    """Gflop/s of the quickest product; None where there is none in this dtype."""
    best = None
    wait = synchronizer(device)
    function = torch._int_mm if dtype is torch.int8 else torch.mm
    for size in SIZES:
        try:
            # small numbers, of which no dtype makes infinities or subnormals
            left, right = (torch.ones(size, size, device=device).to(dtype) for _ in range(2))

            def run(left: torch.Tensor = left, right: torch.Tensor = right) -> None:
                function(left, right)
                wait()

            taken = _best_s(run, LONGEST_S)
        except (RuntimeError, MemoryError):
            break
        best = max(best or 0.0, 2 * size**3 / taken / 1e9)
        if taken * 8 > LONGEST_S:
            break
    return best


def _launch_us(function: Callable[..., Any], one: torch.Tensor, device: str) -> float:
    """Time of a run of many, none of which is waited for."""
    wait = synchronizer(device)

    def run() -> None:
        for _ in range(LAUNCHES):
            function(one)
        wait()

    return _best_s(run) / LAUNCHES * 1e6


def _best_s(run: Callable[[], object], enough_s: float = 1.0) -> float:
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


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _count(listed: str) -> int:
    """How many processors `0-3,8` are."""
    ends = (part.split("-") for part in listed.split(",") if part)
    return max(1, sum(int(end[-1]) - int(end[0]) + 1 for end in ends))
