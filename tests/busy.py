"""Whether other work on the machine could have turned a comparison of times."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from forks import used_s

MOST_BY_OTHERS = 0.1
"""Share of all processors' time that others may take while times are compared."""


class TimesDisagree(AssertionError):
    """Times are not as they should be to each other, unless other work turned them."""


@contextmanager
def compared_times() -> Iterator[None]:
    """What is asserted here compares times, and nothing else."""
    try:
        yield
    except AssertionError as error:
        raise TimesDisagree(str(error)) from error


@dataclass(frozen=True, slots=True)
class Usage:
    """Processor time so far, in seconds: all there is, and of that what anything took, and what a test itself did."""

    whole_s: float
    busy_s: float
    own_s: float

    @classmethod
    def now(cls) -> Usage:
        """What the kernel has counted; what a hypervisor took is busy too."""
        first = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0]
        user, nice, system, idle, waiting, *rest = (int(word) / os.sysconf("SC_CLK_TCK") for word in first.split()[1:9])
        busy, own = user + nice + system + sum(rest), os.times()
        # a fork is no child of this process, and is waited for by another
        return cls(busy + idle + waiting, busy, sum(own[:4]) + used_s())


def share_of_others(before: Usage, after: Usage) -> float:
    """The share of all processors' time that others took: not the test, with its ended children and forks."""
    others = (after.busy_s - before.busy_s) - (after.own_s - before.own_s)
    return max(0.0, others) / max(after.whole_s - before.whole_s, 1e-9)
