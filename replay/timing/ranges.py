"""NVTX ranges around runs, which let Nsight's profilers show runs on a timeline and assign kernels to calls."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

from opgrip.errors import UserError

try:
    import nvtx
except ImportError:
    nvtx = None

DOMAIN = "opgrip"
NSYS, NCU, TORCH = "nsys", "ncu", "torch"  # names of profilers
# phases: the row is compiled and run first; arguments are restored and caches emptied; the call runs before another
# case, as in the program; the latest run of the row does not count
PREPARE, READY, BEFORE, DROPPED = "prepare", "ready", "before", "dropped"
DELAY_KERNEL = "spin_kernel"  # part of the name of the kernel that keeps a device busy before a run


class Range:
    __slots__ = ("_attributes", "_begin", "_end", "_open")

    def __init__(self, message: str, category: str, case: int, profiled: str = "") -> None:
        self._begin: Callable[[Any], Any] = _nothing
        self._end: Callable[[Any], Any] = _nothing
        self._attributes: Any = None
        if profiled in (NCU, TORCH):
            message = row_name(case, message, category)
        if profiled == TORCH:
            self._attributes, self._begin, self._end = message, _begin_record, _end_record
        elif nvtx is not None and nvtx.enabled():
            domain = nvtx.get_domain(DOMAIN)
            self._attributes = domain.get_event_attributes(message=message, category=category, payload=case)
            self._begin, self._end = _functions(domain)
        self._open: Any = None

    def begin(self) -> None:
        self._open = self._begin(self._attributes)

    def end(self) -> None:
        self._end(self._open)


def row_name(case: int, op: str, category: str) -> str:
    return f"case {case} {op} {category}"


def check_ranges(profiler: str) -> None:
    if nvtx is None:
        raise UserError(f"{profiler} separates cases by NVTX ranges, and the package nvtx is missing", "install nvtx")
    if not nvtx.enabled():
        raise UserError(f"{profiler} separates cases by NVTX ranges, which NVTX_DISABLE turns off", "unset it")


@contextmanager
def entered(message: str, category: str, case: int) -> Iterator[None]:
    span = Range(message, category, case)
    span.begin()
    try:
        yield
    finally:
        span.end()


@contextmanager
def watched(profiled: str, device: str, timelines: str | None) -> Iterator[None]:
    import torch

    on_gpu = torch.device(device).type == "cuda"
    if profiled == TORCH:
        assert timelines is not None, "the profiler needs a folder"
        with torch.profiler.profile() as profiler:
            yield
        profiler.export_chrome_trace(f"{timelines}/{os.getpid()}-{next(_timelines)}.json")
        return
    if not (profiled and on_gpu):
        yield
        return
    runtime = torch.cuda.cudart()
    runtime.cudaProfilerStart()
    try:
        yield
    finally:
        torch.cuda.synchronize(device)
        runtime.cudaProfilerStop()


def _functions(domain: Any) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    if hasattr(domain, "start_range"):
        return domain.start_range, domain.end_range
    # in nvtx up to 0.2.11, the public functions create the attributes on each call
    from nvtx import _lib

    return lambda attributes: _lib.start_range(attributes, domain.handle), _lib.end_range


def _begin_record(message: str) -> Any:
    import torch

    record = torch.autograd.profiler.record_function(message)
    record.__enter__()
    return record


def _end_record(record: Any) -> None:
    record.__exit__(None, None, None)


def _nothing(_: Any) -> None:
    pass


_timelines = count()
