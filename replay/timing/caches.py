"""The state of a device's caches before a timed run: as before the call in the program, or cold."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import dropwhile
from time import perf_counter_ns

import torch

from opgrip.platform.machine import last_cache_bytes, measure_once
from opgrip.replay.inputs.inputs import Inputs

MOST = 256 << 20  # maximum size of a cache in bytes, because some machines report the sum of many caches
PARTS, READS, ROUNDS = 8, 5, 4  # numbers of sizes at which reading is timed, up to that of the cache, and of reads
ROW = 64 << 10  # bytes of a row of the buffer that is read
NEAR_BYTES, NEAR_SHARE = 256 << 10, 0.2  # bytes, and share of a distance, by which a distance may be off
KEPT_BYTES = 1 << 20  # bytes of other memory whose use leaves memory in the caches of one core


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """A use of memory before a timed run.

    size : number of bytes that it uses
    distance : number of bytes of other memory that are used between it and the run
    age : number of bytes that were used since the memory's last use
    """

    size: int
    use: Callable[[], object]
    distance: int = 0
    age: int = 0

    @classmethod
    def of(cls, memory: Sequence[torch.Tensor], distance: int, age: int) -> MemoryUse:
        return cls(sum(part.numel() for part in memory), partial(_use, memory), distance, age)

    def is_near(self, most: int, used: int) -> bool:
        """Return True if it needs no use before the run, if `used` more bytes are used."""
        distance = min(self.distance, most)
        return abs(min(self.age + used, most) - distance) <= max(NEAR_BYTES, NEAR_SHARE * distance)


class Caches:
    """Counts the memory that is used, on which the state of the caches depends.

    most : number of bytes whose use evicts all other data
    used : number of bytes that were used so far
    """

    def __init__(self, device: str) -> None:
        self.most = 2 * _usable_cache(device)
        self.used = 0
        self._buffer = torch.zeros(2 * self.most // ROW, ROW // 4, dtype=torch.float32, device=device)
        self._next = 0

    def note(self, size: int, inputs: Inputs | None) -> None:
        """Count the use of `size` bytes, among them the memory of `inputs`."""
        self.used += size
        if inputs is not None:
            inputs.used_at = [self.used] * len(inputs.used_at)

    def empty(self) -> None:
        self._read(self.most)

    def restore(self, uses: Sequence[MemoryUse], before: MemoryUse | None) -> None:
        """Use memory in the order in which the program used it before a call, and as much other memory in between.

        before : the preceding calls as one use of memory; None if they have just run
        """
        before_size = 0 if before is None else before.size
        uses = sorted(uses, key=lambda use: -min(use.distance, self.most))
        # a use also ages the memory that the program used after it
        moved = list(dropwhile(lambda use: use.is_near(self.most, before_size), uses))
        # memory that runs have used again and again stays in a cache for longer, so it is evicted first
        evicted = self.most - min([use.age for use in moved if use.distance >= KEPT_BYTES], default=self.most)
        self._read(evicted)
        near = [use for use in (uses if evicted >= ROW else moved) if use.distance < self.most]
        needs = [use.distance + use.size for use in near] + [0]
        for use, need in zip(near, needs[1:], strict=True):
            if before is not None and use.distance < before_size / 2:
                before.use()
                before = None
            use.use()
            self.used += use.size
            if before is not None or not before_size:
                self._read(use.distance - max(need, before_size))
        if before is not None:
            before.use()

    def _read(self, size: int) -> None:
        # each time the next part of the buffer, which is in no cache
        evicts_all = 2 * size > self.most
        count = (self.most if evicts_all else size) // ROW
        if count <= 0:
            return
        if self._next + count > len(self._buffer):
            self._next = 0
        part = self._buffer[self._next : self._next + count]
        # several rows at a time, as matrix products read them, evict more than one after the other, which is faster
        part.sum() if evicts_all else part.sum(0)
        self._next += count
        self.used += count * ROW


def _use(memory: Sequence[torch.Tensor]) -> None:
    for part in memory:
        # reads and writes, without changing a value
        part.bitwise_or_(0)


def _usable_cache(device: str) -> int:
    # the part of the last cache that a process gets, because others may share the cache
    size = min(last_cache_bytes(device), MOST)
    if torch.device(device).type != "cpu":
        return size
    return int(measure_once("usable bytes of the last cache", device, lambda: (_measure_usable(size),))[0])


def _measure_usable(size: int) -> int:
    parts = (*range(1, PARTS + 1), 4 * PARTS)
    # in several rounds, because other programs use the cache at times
    rounds = [{part: _read_rate(size * part // PARTS) for part in parts} for _ in range(ROUNDS)]
    rates = {part: max(rates[part] for rates in rounds) for part in parts}
    # halfway between the rates of the cache and of the memory, as ratios
    least = math.sqrt(max(rates.values()) * rates[4 * PARTS])
    return size * max(part for part in range(1, PARTS + 1) if part <= 2 or rates[part] >= least) // PARTS


def _read_rate(size: int) -> float:
    data, best_ns = torch.zeros(size // 4), math.inf
    for _ in range(READS):
        began = perf_counter_ns()
        data.sum()
        best_ns = min(best_ns, perf_counter_ns() - began)
    return size / best_ns
