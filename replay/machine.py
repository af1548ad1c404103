"""What the machine has left."""

from __future__ import annotations

import torch

from opgrip.traces.machine import lines

SHARE = 0.9
"""Of the memory that is free, for cases."""


def available_memory(device: str) -> int | None:
    """Bytes that cases may have on a device; None where the system does not say."""
    free = free_memory(device)
    return None if free is None else int(SHARE * free)


def free_memory(device: str) -> int | None:
    """Bytes that are free on a device; None where the system does not say."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min((value for value in (_meminfo(), _cgroup()) if value is not None), default=None)


def _meminfo() -> int | None:
    for line in lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return None


def _cgroup() -> int | None:
    """What a container may still take."""
    most, used = (lines(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
    if not most or not used or not most[0].isdigit():
        return None
    return max(0, int(most[0]) - int(used[0]))
