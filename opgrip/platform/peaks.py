"""Peak bandwidths, arithmetic rates and launch times of a machine."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Thread
from time import perf_counter
from typing import Any

import msgspec
import numpy as np
import torch

from opgrip.cli.output_files import write_json
from opgrip.platform.machine import (
    cache_folder,
    check_device,
    free_memory,
    last_cache_bytes,
    lines,
    measure_once,
    processor,
)

FORM = 2  # version of the file's form; files of other versions are ignored
TF32 = "tf32"  # name of the rate of float32 products for which a GPU may round inputs to TF32
# smallest plausible rate of a dtype, as a share of the device's fastest rate: on some GPUs float64 has a thousandth of
# float8
LEAST_SHARE = 1e-4
FLOAT8 = "float8"  # prefix of the names of all float8 types


@dataclass(frozen=True, slots=True)
class Level:
    """A cache or the main memory.

    size : bytes; None for the main memory
    bandwidth : GB/s of a copy, reads plus writes, by number of threads
    """

    name: str
    size: int | None
    sharing: int
    bandwidth: dict[int, float]

    def holds(self, size: int, threads: int) -> bool:
        return self.size is None or size <= self.size * max(1, threads // self.sharing)


@dataclass(frozen=True, slots=True)
class Peaks:
    """Peak bandwidths and arithmetic rates of a device, and launch times of operators on it.

    rates : Gflop/s of a matrix product by dtype and number of threads
    launch_us : time of an operator on a tensor of one element
    dispatch_us : time of an operator that makes a view
    """

    machine: tuple[str, ...]
    device: str
    threads: int
    levels: tuple[Level, ...]
    rates: dict[str, dict[int, float]]
    launch_us: float
    dispatch_us: float
    torch: str
    time: str

    def level(self, size: int, threads: int, cold: bool) -> Level:
        """Return the smallest cache that holds `size` bytes; main memory if none does, or the caches are cold."""
        return next(level for level in self.levels if level.size is None or (not cold and level.holds(size, threads)))

    def bandwidth(self, level: Level, threads: int) -> float:
        return _between(level.bandwidth, threads)

    def rate(self, dtype: str | None, threads: int) -> float | None:
        """Return the arithmetic rate in Gflop/s for a dtype or `TF32`."""
        rates = self.rates.get(dtype or "")
        if rates is None and (dtype or "").startswith(FLOAT8):
            rates = next((rates for name, rates in self.rates.items() if name.startswith(FLOAT8)), None)
        elif rates is None:
            rates = self.rates.get("float32")
        return None if not rates else _between(rates, threads)


def peaks_path(device: str) -> Path:
    depends = [*processor(device), str(len(os.sched_getaffinity(0))), torch.__version__, str(FORM)]
    key = hashlib.blake2b("\n".join(depends).encode(), digest_size=8).hexdigest()
    return cache_folder() / "machine" / f"{torch.device(device).type}-{key}.json"


def read_cached_peaks(device: str) -> Peaks | None:
    try:
        return from_json(json.loads(peaks_path(device).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def keep(peaks: Peaks, device: str) -> Path:
    path = peaks_path(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    write(peaks, path, force=True)
    return path


def write(peaks: Peaks, path: Path, force: bool) -> None:
    write_json(to_json(peaks), path, force)


def to_json(peaks: Peaks) -> dict[str, Any]:
    return {"form": FORM, **asdict(peaks)}


def from_json(fields: dict[str, Any]) -> Peaks:
    if fields["form"] != FORM:
        raise ValueError(f"the file has format version {fields['form']}, but this opgrip reads version {FORM}")
    peaks = msgspec.convert(fields, Peaks, strict=False, str_keys=True)
    if not peaks.levels or peaks.levels[-1].size is not None:
        raise ValueError("the file has no peak bandwidth of main memory")
    for measured in (*(level.bandwidth for level in peaks.levels), *peaks.rates.values()):
        if not measured or not min(measured.values()) > 0:
            raise ValueError("a bandwidth or rate is missing or not above 0")
    if implausible := find_implausible_rate(peaks):
        raise ValueError(implausible)
    return peaks


def find_implausible_rate(peaks: Peaks) -> str | None:
    rates = {dtype: max(rate_by_threads.values()) for dtype, rate_by_threads in peaks.rates.items()}
    if peaks.device == "cpu" or not rates:
        return None
    slowest, fastest = min(rates, key=rates.__getitem__), max(rates, key=rates.__getitem__)
    if rates[slowest] >= LEAST_SHARE * rates[fastest]:
        return None
    return f"{rates[slowest]:,.2f} Gflop/s for {slowest} and {rates[fastest]:,.2f} for {fastest}"


def _between(measured: dict[int, float], threads: int) -> float:
    points = sorted(measured.items())
    below = [point for point in points if point[0] <= threads] or points[:1]
    above = [point for point in points if point[0] >= threads] or points[-1:]
    (low, first), (high, last) = below[-1], above[0]
    return first if low == high else first + (last - first) * (threads - low) / (high - low)


REPEATS, REPEAT_S = 6, 0.2  # minimum number of runs, and their minimum total time in seconds; the fastest run counts
SHARE_OF_CACHE = 0.5  # share of a cache that the two copy buffers take, because the cache also holds other data
MEMORY_BYTES = 256 << 20  # size in bytes of both copy buffers on the CPU, or eight times the last cache if that is more
MOST_BYTES = 4 << 30
MOST_COPIES = 200  # maximum number of copies on a device between two readings of its clock
BYTES_OF_FLOAT = 4
BYTES_A_RUN = 256 << 20  # number of bytes that copies within a cache move between two readings of the clock
CACHES = "/sys/devices/system/cpu/cpu0/cache"


def levels(device: str, threads: Sequence[int]) -> list[Level]:
    """Measure the bandwidth of caches and main memory; on the CPU for each number of copying threads in `threads`."""
    if torch.device(device).type == "cpu":
        levels = [*_cpu_caches(threads), memory(device, threads)]
    else:
        cache = last_cache_bytes(device)
        levels = [_on_device(device, "L2", cache, int(cache * SHARE_OF_CACHE)), memory(device, threads)]
    # a level is at least as fast as the next one, although it may seem slower under load
    best = levels[-1].bandwidth
    for place, level in reversed(list(enumerate(levels))):
        best = {count: max(best[count], value) for count, value in level.bandwidth.items()}
        levels[place] = replace(level, bandwidth=best)
    return levels


def memory(device: str, threads: Sequence[int]) -> Level:
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
    """Return, for each number of threads, the highest rate measured with at most this number of threads."""
    return {count: max(value for other, value in rates.items() if other <= count) for count in rates}


def _copy_rate(size: int, threads: int) -> float:
    # in GB/s; each thread copies half of `size` bytes to the rest
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
    # all elements of an array are the same memory, so that one call makes `count` copies: Python code between single
    # copies would take longer than a copy within the nearest cache
    buffers = (np.zeros(size, np.uint8).view(f"V{size}") for _ in range(2))
    target, source = (np.lib.stride_tricks.as_strided(buffer, (count,), (0,)) for buffer in buffers)
    return target, source


def caches(folder: str = CACHES) -> list[tuple[str, int, int]]:
    levels = []
    for index in sorted(Path(folder).glob("index*")):
        facts = {name: "".join(lines(str(index / name))) for name in ("level", "type", "size", "shared_cpu_list")}
        if facts["type"] in ("Data", "Unified") and facts["size"].endswith("K") and facts["size"][:-1].isdigit():
            levels.append((f"L{facts['level']}", int(facts["size"][:-1]) << 10, _count(facts["shared_cpu_list"])))
    return sorted(levels)


def _on_device(device: str, name: str, size: int | None, both: int) -> Level:
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
    # a kernel, because a CUDA graph starts it sooner than a copy
    torch.neg(source, out=target)


def _launched_at_once(run: Callable[[], None], device: str) -> Callable[[], None]:
    # without a graph, a launch can take longer than a copy within a cache
    if torch.device(device).type != "cuda":
        return run
    with torch.cuda.device(device):
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
    return graph.replay


def _on_device_s(run: Callable[[], None], device: str, repeats: int = REPEATS) -> float:
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
    """Return the time of the fastest run in seconds, after a run that is not timed."""
    run()
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
    ends = (part.split("-") for part in listed.split(",") if part)
    return max(1, sum(int(end[-1]) - int(end[0]) + 1 for end in ends))


def bandwidth(device: str = "cpu") -> float:
    """Return the bytes per second that torch's threads read and write in this machine's memory."""
    check_device(device)
    threads = torch.get_num_threads() if device == "cpu" else 1
    peaks = read_cached_peaks(device)
    if peaks is not None:
        return peaks.bandwidth(peaks.levels[-1], threads) * 1e9
    return measure_once("bandwidth", device, lambda: (memory(device, [threads]).bandwidth[threads] * 1e9,))[0]


@dataclass(frozen=True, slots=True)
class Datasheet:
    """Highest memory bandwidth of a GPU in GB/s, and its rates of matrix products in Tflop/s, by dtype."""

    gb_per_s: float
    tflops: Mapping[str, float]

    def rate(self, dtype: str | None) -> float | None:
        name = FLOAT8 if (dtype or "").startswith(FLOAT8) else dtype or ""
        tflops = self.tflops.get(name)
        return None if tflops is None else tflops * 1e3


_A100 = {"float64": 19.5, "float32": 19.5, TF32: 156, "bfloat16": 312, "float16": 312, "int8": 624}
_H100 = {"float64": 67, "float32": 67, TF32: 494.5, "bfloat16": 989.5, "float16": 989.5, "int8": 1979, FLOAT8: 1979}
_NVL = {"float64": 60, "float32": 60, TF32: 417.5, "bfloat16": 835.5, "float16": 835.5, "int8": 1670.5, FLOAT8: 1670.5}
_PCIE = {"float64": 51, "float32": 51, TF32: 378, "bfloat16": 756, "float16": 756, "int8": 1513, FLOAT8: 1513}
_A10 = {"float32": 31.2, TF32: 62.5, "bfloat16": 125, "float16": 125, "int8": 250}
_A40 = {"float32": 37.4, TF32: 74.8, "bfloat16": 149.7, "float16": 149.7, "int8": 299.3}
_L4 = {"float32": 30.3, TF32: 60, "bfloat16": 121, "float16": 121, "int8": 242.5, FLOAT8: 242.5}
_L40S = {"float32": 91.6, TF32: 183, "bfloat16": 362, "float16": 362, "int8": 733, FLOAT8: 733}
# datasheets by the part of a GPU's name after the manufacturer's
_SHEETS: Mapping[str, Datasheet] = {
    r"A100-SXM\d-40GB|A100-PCIE-40GB": Datasheet(1555, _A100),
    r"A100-SXM\d-80GB": Datasheet(2039, _A100),
    r"A100 80GB PCIe": Datasheet(1935, _A100),
    r"H100 80GB HBM3": Datasheet(3350, _H100),
    r"H100 PCIe": Datasheet(2000, _PCIE),
    r"H100 NVL": Datasheet(3900, _NVL),
    r"H200": Datasheet(4800, _H100),
    r"H200 NVL": Datasheet(4800, _NVL),
    r"A10": Datasheet(600, _A10),
    r"A40": Datasheet(696, _A40),
    r"L4": Datasheet(300, _L4),
    r"L40S": Datasheet(864, _L40S),
    r"T4": Datasheet(320, {"float32": 8.1, "float16": 65, "int8": 130}),
    r"V100-SXM2-\d+GB": Datasheet(900, {"float64": 7.8, "float32": 15.7, "float16": 125}),
}


def datasheet_of(name: str) -> Datasheet | None:
    product = re.sub(r"^(NVIDIA|Tesla) ", "", name)
    return next((sheet for pattern, sheet in _SHEETS.items() if re.fullmatch(pattern, product)), None)
