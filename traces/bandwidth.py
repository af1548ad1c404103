"""How fast memory is copied here: what bounds the time of any kernel from below."""

from __future__ import annotations

import statistics
from time import perf_counter

import torch

from opgrip.traces.arguments import tensors
from opgrip.traces.devices import check_device
from opgrip.traces.errors import UserError
from opgrip.traces.machine import last_cache_bytes
from opgrip.traces.measured import measured
from opgrip.traces.trace import Trace

LEAST, MOST = 64 << 20, 512 << 20
"""Bytes of the buffer that is copied: some machines report the sum of many caches as one."""
CACHES = 8
"""Last caches that the buffer is as large as, within these bounds."""
COPIES = 9


def bandwidth(device: str = "cpu") -> float:
    """Bytes that this machine reads and writes in a second of copying, as measured now or at an earlier time.

    Raises
    ------
    UserError : where the machine lacks the device
    """
    check_device(device)
    return measured("bandwidth", device, lambda: (measure(device),))[0]


def bandwidth_of(trace: Trace) -> float:
    """The same, of the device that a trace's tensors were on: of an accelerator where it has any.

    Raises
    ------
    UserError : where the machine lacks the device
    """
    devices = {spec.device for item in trace.signatures for spec in tensors([item.args, item.kwargs, item.outputs])}
    device = min(devices - {"cpu", "meta"}, default="cpu")
    try:
        return bandwidth(device)
    except UserError as error:
        problem = f"the trace was made on {device}, whose memory cannot be measured here"
        raise UserError(problem, "say how fast it is with --bandwidth") from error


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
