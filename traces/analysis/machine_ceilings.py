"""What a machine gives at most: bandwidth by level of memory, arithmetic by dtype, launches; kept in a file."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Thread
from time import perf_counter
from typing import Any

import numpy as np
import torch

from opgrip.cli.output_files import whole_file
from opgrip.errors import UserError
from opgrip.platform.devices import check_device
from opgrip.platform.machine import cache_folder, free_memory, last_cache_bytes, lines, processor
from opgrip.platform.measurement_cache import measure_once
from opgrip.traces.schema.arguments import tensors
from opgrip.traces.table.trace import Trace

FORM = 2
"""Of the file; one of another form is as good as none."""
TF32 = "tf32"
"""Names the rate of products of float32 that a GPU may round to 10 bits before."""
FLOAT8 = "float8"
"""What the names of all its forms begin with."""


@dataclass(frozen=True, slots=True)
class Level:
    """A cache, or the memory behind all of them.

    Attributes
    ----------
    name : `L1`, `L2`, `L3`, `memory`
    size : bytes of one such cache; None for the memory
    sharing : processors that share it
    bandwidth : GB/s of a copy, read and written bytes together, by number of threads
    """

    name: str
    size: int | None
    sharing: int
    bandwidth: dict[int, float]

    def holds(self, size: int, threads: int) -> bool:
        """Whether so many bytes fit that so many threads share out among them."""
        return self.size is None or size <= self.size * max(1, threads // self.sharing)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """A machine's ceilings.

    Attributes
    ----------
    machine : name of the processor or GPU, and what else they depend on
    device : `cpu`, `cuda`
    threads : the largest number that was measured
    levels : from the nearest to the memory
    rates : by dtype and number of threads, the rate of a product of matrices in Gflop/s
    launch_us : time of an operator on one element: what launching and allocating take
    dispatch_us : time of an operator that makes a view
    torch, time : version, and when it was measured
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
        """The nearest level that holds so many bytes; with cold caches the memory."""
        return next(level for level in self.levels if level.size is None or (not cold and level.holds(size, threads)))

    def bandwidth(self, level: Level, threads: int) -> float:
        """GB/s of a level."""
        return _between(level.bandwidth, threads)

    def rate(self, dtype: str | None, threads: int) -> float | None:
        """Gflop/s in a dtype, or in `TF32`; those of float32 where it was not measured; None where neither was.

        The forms of float8 are as quick as each other, and nothing else is as quick as they are.
        """
        rates = self.rates.get(dtype or "")
        if rates is None and (dtype or "").startswith(FLOAT8):
            rates = next((rates for name, rates in self.rates.items() if name.startswith(FLOAT8)), None)
        elif rates is None:
            rates = self.rates.get("float32")
        return None if not rates else _between(rates, threads)


def ceilings_path(device: str) -> Path:
    """Where the ceilings of this machine are kept."""
    depends = [*processor(device), str(_processors()), torch.__version__, str(FORM)]
    key = hashlib.blake2b("\n".join(depends).encode(), digest_size=8).hexdigest()
    return cache_folder() / "machine" / f"{torch.device(device).type}-{key}.json"


def read_cached_ceilings(device: str) -> Ceilings | None:
    """The ceilings that were measured before; None where there are none, or their file is damaged."""
    try:
        return from_json(json.loads(ceilings_path(device).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def keep(ceilings: Ceilings, device: str) -> Path:
    """Write the ceilings where they are found again, and say where that is."""
    path = ceilings_path(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    write(ceilings, path, force=True)
    return path


def write(ceilings: Ceilings, path: Path, force: bool) -> None:
    """Write the ceilings to a file."""
    with whole_file(path, force) as file:
        file.write(json.dumps(to_json(ceilings), indent=1).encode() + b"\n")


def to_json(ceilings: Ceilings) -> dict[str, Any]:
    """The ceilings as JSON has them."""
    return {"form": FORM, **asdict(ceilings)}


def from_json(fields: dict[str, Any]) -> Ceilings:
    """The ceilings of a file.

    Raises
    ------
    ValueError, KeyError, TypeError, AttributeError : where they are not there
    """
    if fields["form"] != FORM:
        raise ValueError(f"form {fields['form']}")
    levels = tuple(
        Level(item["name"], item["size"], item["sharing"], _by_threads(item["bandwidth"])) for item in fields["levels"]
    )
    if not levels or levels[-1].size is not None:
        raise ValueError("the last level is not the memory")
    return Ceilings(
        machine=tuple(fields["machine"]),
        device=fields["device"],
        threads=int(fields["threads"]),
        levels=levels,
        rates={dtype: _by_threads(rates) for dtype, rates in fields["rates"].items()},
        launch_us=float(fields["launch_us"]),
        dispatch_us=float(fields["dispatch_us"]),
        torch=fields["torch"],
        time=fields["time"],
    )


def _by_threads(values: dict[str, float]) -> dict[int, float]:
    value_by_threads = {int(threads): float(value) for threads, value in values.items()}
    if not value_by_threads or min(value_by_threads.values()) <= 0:
        raise ValueError("a ceiling is missing")
    return value_by_threads


def _between(measured: dict[int, float], threads: int) -> float:
    """The value for a number of threads, on a line between those that were measured."""
    points = sorted(measured.items())
    below = [point for point in points if point[0] <= threads] or points[:1]
    above = [point for point in points if point[0] >= threads] or points[-1:]
    (low, first), (high, last) = below[-1], above[0]
    return first if low == high else first + (last - first) * (threads - low) / (high - low)


def _processors() -> int:
    return len(os.sched_getaffinity(0))


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


def bandwidth(device: str = "cpu") -> float:
    """Bytes that this machine reads and writes in a second of copying, by as many threads as torch uses.

    As `opgrip machine` measured it, or else as measured now or at an earlier time.

    Raises
    ------
    UserError : where the machine lacks the device
    """
    check_device(device)
    threads = torch.get_num_threads() if device == "cpu" else 1
    ceilings = read_cached_ceilings(device)
    if ceilings is not None:
        return ceilings.bandwidth(ceilings.levels[-1], threads) * 1e9
    return measure_once("bandwidth", device, lambda: (memory(device, [threads]).bandwidth[threads] * 1e9,))[0]


def bandwidth_of(trace: Trace) -> float:
    """The same, of the device that a trace's tensors were on: of an accelerator where it has any.

    Raises
    ------
    UserError : where the machine lacks the device
    """
    devices = {spec.device for item in trace.signatures for spec in tensors([item.args, item.kwargs, item.outputs])}
    device = min(devices - {"cpu", "meta"}, default="cpu")
    try:
        return bandwidth(device)
    except UserError as error:
        problem = f"the trace was made on {device}, whose memory cannot be measured here"
        raise UserError(problem, "say how fast it is with --bandwidth") from error
