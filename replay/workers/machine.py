"""What the machine has to give."""

from __future__ import annotations

from pathlib import Path

import torch

SHARE = 0.9
"""Of the memory that is free, for cases."""


def available_memory(device: str) -> int | None:
    """Bytes that cases may have on a device; None where the system does not say."""
    if torch.device(device).type == "cuda":
        return int(SHARE * torch.cuda.mem_get_info(device)[0])
    free = [value for value in (_meminfo(), _cgroup()) if value is not None]
    return int(SHARE * min(free)) if free else None


def _meminfo() -> int | None:
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return None


def _cgroup() -> int | None:
    """What a container may still take."""
    most, used = (_lines(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
    if not most or not used or not most[0].isdigit():
        return None
    return max(0, int(most[0]) - int(used[0]))


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
