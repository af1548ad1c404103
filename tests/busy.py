"""Whether other work on the machine could have turned a comparison of times."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

MOST_BY_OTHERS = 0.1
"""Share of all processors' time that others may take while times are compared."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Processor time so far, in seconds: of all there is, what all that runs took, and what this process did."""

    whole_s: float
    busy_s: float
    own_s: float

    @classmethod
    def now(cls) -> Usage:
        """What the kernel has counted; what a hypervisor took is busy too."""
        first = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0]
        user, nice, system, idle, waiting, *rest = (int(word) / os.sysconf("SC_CLK_TCK") for word in first.split()[1:9])
        busy, own = user + nice + system + sum(rest), os.times()
        return cls(busy + idle + waiting, busy, sum(own[:4]))


def share_of_others(before: Usage, after: Usage) -> float:
    """The share of all processors' time that went neither to this process, nor to its ended children, nor to none."""
    others = (after.busy_s - before.busy_s) - (after.own_s - before.own_s)
    return max(0.0, others) / max(after.whole_s - before.whole_s, 1e-9)
