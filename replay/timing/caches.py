"""What the processor's and the device's caches hold when a run begins."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from opgrip.replay.machine import lines

PROGRAM, WARM, COLD = "program", "warm", "cold"
CACHES = (PROGRAM, WARM, COLD)
MOST = 512 << 20
"""Bytes that are written at most to flush a cache: some machines report the sum of many."""


def flusher(device: str) -> Callable[[], None]:
    """What replaces the contents of a device's last cache: a buffer as large as two of it is written."""
    size = min(2 * last_cache_bytes(device), MOST)
    buffer = torch.empty(size, dtype=torch.uint8, device=device)

    def flush() -> None:
        buffer.fill_(0)

    return flush


def last_cache_bytes(device: str) -> int:
    """Size of the last cache that a core or a device shares; 32 MB where the system does not say."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    # per instance, where sysconf gives the sum of all
    for index in (3, 2):
        text = "".join(lines(f"/sys/devices/system/cpu/cpu0/cache/index{index}/size"))
        if text.endswith("K") and text[:-1].isdigit():
            return int(text[:-1]) << 10
    names = [name for name in ("SC_LEVEL3_CACHE_SIZE", "SC_LEVEL2_CACHE_SIZE") if name in os.sysconf_names]
    return next((size for size in map(os.sysconf, names) if size > 0), 32 << 20)
