"""How fast memory is copied here: what bounds the time of any kernel from below."""

from __future__ import annotations

import json
import statistics
from contextlib import suppress
from pathlib import Path
from time import perf_counter

import torch

from opgrip.traces.devices import check_device
from opgrip.traces.machine import cache_folder, last_cache_bytes, processor
from opgrip.traces.output import whole_file

LEAST, MOST = 64 << 20, 512 << 20
"""Bytes of the buffer that is copied: some machines report the sum of many caches as one."""
CACHES = 8
"""Last caches that the buffer is as large as, within these bounds."""
COPIES = 9


def bandwidth(device: str = "cpu") -> float:
    """Bytes that this machine reads and writes in a second of copying, as measured now or at an earlier time.

    A measurement is kept in the user's folder for caches, by processor, threads and version of torch.

    Raises
    ------
    UserError : where the machine lacks the device
    """
    check_device(device)
    key = ", ".join([device, *processor(device), f"{torch.get_num_threads()} threads", f"torch {torch.__version__}"])
    path = cache_folder() / "bandwidth.json"
    kept = _kept(path)
    if key not in kept:
        kept[key] = measure(device)
        # a folder that cannot be written costs a measurement the next time
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(path, force=True) as file:
                file.write(json.dumps(kept, indent=1).encode())
    return kept[key]


def measure(device: str) -> float:
    """Bytes read and written in a second, the median of several copies of a buffer that no cache holds."""
    size = min(max(CACHES * last_cache_bytes(device), LEAST), MOST)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    times = [_copy_seconds(source, target) for _ in range(COPIES)]
    return 2 * size / statistics.median(times)


def _copy_seconds(source: torch.Tensor, target: torch.Tensor) -> float:
    on_gpu = source.device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(source.device)
    start = perf_counter()
    target.copy_(source)
    if on_gpu:
        torch.cuda.synchronize(source.device)
    return perf_counter() - start


def _kept(path: Path) -> dict[str, float]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    pairs = found.items() if isinstance(found, dict) else ()
    return {key: value for key, value in pairs if isinstance(value, float) and value > 0}
