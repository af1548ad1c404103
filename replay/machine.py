"""What the machine has to give."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

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


def cache_folder() -> Path:
    """Where what compilers made is kept: `$OPGRIP_CACHE`, or `opgrip` in the user's folder for caches."""
    told = os.environ.get("OPGRIP_CACHE")
    if told:
        return Path(told).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "opgrip"


def processor(device: str) -> list[str]:
    """What compiled code depends on: the processor's name and instructions, or the GPU's name."""
    if torch.device(device).type == "cuda":
        return [torch.cuda.get_device_name(device)]
    names = (line.split(":", 1)[1].strip() for line in lines("/proc/cpuinfo") if line.startswith("model name"))
    return [platform.machine(), next(names, ""), torch.backends.cpu.get_cpu_capability()]


def lines(path: str) -> list[str]:
    """Of a file that the system has; none where it has not."""
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


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
