"""Whether other work on the machine had a part in what was measured."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

MOST_BY_OTHERS = 0.1
"""Share of all processors' time that others may take while times are compared."""
STAT = Path("/proc/stat")


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


@contextmanager
def watched_for_others(tell: Callable[[str], None]) -> Iterator[None]:
    """Tell, after the block, where others took so much of the processors that its times mean little."""
    if not STAT.exists():
        yield
        return
    before = Usage.now()
    yield
    others = share_of_others(before, Usage.now())
    if others >= MOST_BY_OTHERS:
        tell(f"others took {others:.0%} of the processors meanwhile: these figures mean little, measure again")
