"""Whether other work on the machine had a part in what was measured."""

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

MOST_BY_OTHERS = 0.1
"""Share of all processors' time that others may take while times are compared."""
TRIES = 3
DISTURBED = "disturbed"
"""Stands where a number would mean nothing."""
STAT = Path("/proc/stat")

Value = TypeVar("Value")
Arguments = ParamSpec("Arguments")


@dataclass(frozen=True, slots=True)
class Usage:
    """Processor time so far, in seconds: all there is, and of that what anything took, and what this process did."""

    whole_s: float
    busy_s: float
    own_s: float

    @classmethod
    def now(cls, more_s: float = 0.0) -> Usage:
        """What the kernel has counted; what a hypervisor took is busy too.

        Parameters
        ----------
        more_s : of processes that are this one's, and no ended children of it
        """
        first = STAT.read_text(encoding="ascii").splitlines()[0]
        user, nice, system, idle, waiting, *rest = (int(word) / os.sysconf("SC_CLK_TCK") for word in first.split()[1:9])
        busy = user + nice + system + sum(rest)
        return cls(busy + idle + waiting, busy, sum(os.times()[:4]) + more_s)


def share_of_others(before: Usage, after: Usage) -> float:
    """The share of all processors' time that others took: not this process, with its ended children."""
    others = (after.busy_s - before.busy_s) - (after.own_s - before.own_s)
    return max(0.0, others) / max(after.whole_s - before.whole_s, 1e-9)


@dataclass(frozen=True, slots=True)
class Part(Generic[Value]):
    """What a part of a benchmark gave.

    Attributes
    ----------
    others : the share of all processors' time that others took meanwhile
    """

    value: Value
    others: float = 0.0

    @property
    def is_disturbed(self) -> bool:
        """Whether others took so much that times mean little."""
        return self.others >= MOST_BY_OTHERS

    def figure(self, text: str) -> str:
        """A figure that comes from the part's times; where others disturbed these, a word in its place."""
        return DISTURBED if self.is_disturbed else text

    def __str__(self) -> str:
        return self.figure("quiet") + f": others took {self.others:.0%} of the processors"


def measure_part(
    part: Callable[[], Value], tries: int = TRIES, usage_now: Callable[[], Usage] = Usage.now
) -> Part[Value]:
    """Measure a part of a benchmark, again where others disturb it; gives the quietest of the tries.

    Parameters
    ----------
    tries : at most
    usage_now : tells what processors did so far
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
    """What a function of a module gives in a fresh process.

    What one program leaves in the allocator and in caches would change the next one's times.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args, **kwargs).result()


def are_too_few(rounds: Sequence[object], requested: int) -> bool:
    """Whether others disturbed so many of the rounds that the remaining ones tell nothing."""
    return 2 * len(rounds) < requested


@contextmanager
def busy_processors() -> Iterator[None]:
    """Two programs for each processor, that do nothing else."""
    burners = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * len(os.sched_getaffinity(0)))
    ]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
