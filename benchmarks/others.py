"""Detect whether other work on the machine influenced a measurement."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, ParamSpec, TypeVar

MOST_BY_OTHERS = 0.1  # largest share of all processors' time that other processes may take while times are compared
TRIES = 3
DISTURBED = "disturbed"  # shown in place of a meaningless number
STAT = Path("/proc/stat")

Value = TypeVar("Value")
Arguments = ParamSpec("Arguments")


@dataclass(frozen=True, slots=True)
class Usage:
    """Processor time in s since the machine started: `whole_s` in all, `busy_s` used by any process, and `own_s` used
    by this process.
    """

    whole_s: float
    busy_s: float
    own_s: float

    @classmethod
    def now(cls, more_s: float = 0.0) -> Usage:
        """Return the current values of the kernel's counters; time taken by a hypervisor counts as used.

        more_s : time in s to add to `own_s`, of processes that belong to this one but are not its ended children
        """
        first = STAT.read_text(encoding="ascii").splitlines()[0]
        user, nice, system, idle, waiting, *rest = (int(word) / os.sysconf("SC_CLK_TCK") for word in first.split()[1:9])
        busy = user + nice + system + sum(rest)
        return cls(busy + idle + waiting, busy, sum(os.times()[:4]) + more_s)


def share_of_others(before: Usage, after: Usage) -> float:
    """Return the share of all processors' time used by processes other than this one and its ended children."""
    others = (after.busy_s - before.busy_s) - (after.own_s - before.own_s)
    return max(0.0, others) / max(after.whole_s - before.whole_s, 1e-9)


@dataclass(frozen=True, slots=True)
class Part(Generic[Value]):
    """Result of a part of a benchmark.

    others : share of all processors' time used by other processes meanwhile
    """

    value: Value
    others: float = 0.0

    @property
    def is_disturbed(self) -> bool:
        """Return True if other processes used so much processor time that the part's times are not meaningful."""
        return self.others >= MOST_BY_OTHERS

    def figure(self, text: str) -> str:
        """Return `text`, a figure computed from this part's times, or `DISTURBED` if the part was disturbed."""
        return DISTURBED if self.is_disturbed else text

    def __str__(self) -> str:
        return self.figure("quiet") + f": others took {self.others:.0%} of the processors"


def measure_part(
    part: Callable[[], Value], tries: int = TRIES, usage_now: Callable[[], Usage] = Usage.now
) -> Part[Value]:
    """Measure a part of a benchmark, again if other programs disturb it; return the least disturbed try.

    part : function that runs the part and returns its result
    tries : maximum number of tries
    usage_now : function that reads the processors' counters
    """
    if not STAT.exists():
        return Part(part())
    parts: list[Part[Value]] = []
    while len(parts) < tries and all(item.is_disturbed for item in parts):
        before = usage_now()
        value = part()
        parts.append(Part(value, share_of_others(before, usage_now())))
    return min(parts, key=lambda item: item.others)


def in_a_process(function: Callable[Arguments, Value], *args: Arguments.args, **kwargs: Arguments.kwargs) -> Value:
    """Return the result of a module's function in a fresh process.

    Otherwise the state of the allocator and of caches after one program would influence the next.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args, **kwargs).result()


def are_too_few(rounds: Sequence[object], requested: int) -> bool:
    """Return True if `rounds`, the undisturbed ones, are less than half of the `requested` number of rounds."""
    return 2 * len(rounds) < requested


@contextmanager
def busy_processors() -> Iterator[None]:
    """Keep two busy processes per processor running."""
    burners = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * len(os.sched_getaffinity(0)))
    ]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
