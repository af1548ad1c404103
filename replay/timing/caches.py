"""What the processor's and the device's caches hold when a run begins."""

from __future__ import annotations

from collections.abc import Callable

PROGRAM, WARM, COLD = "program", "warm", "cold"
CACHES = (PROGRAM, WARM, COLD)
MOST = 512 << 20
"""Bytes that are written at most to flush a cache: some machines report the sum of many."""


def flusher(device: str) -> Callable[[], None]:
    """What replaces the contents of a device's last cache: a buffer as large as two of it is written."""
    import torch

    from opgrip.platform.machine import last_cache_bytes

    size = min(2 * last_cache_bytes(device), MOST)
    buffer = torch.empty(size, dtype=torch.uint8, device=device)

    def flush() -> None:
        buffer.fill_(0)

    return flush
