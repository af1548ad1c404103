"""NVTX ranges around what is run, for Nsight's timelines and for programs that join kernels to calls.

A range's message is the operator or the phase, its category the mode, its payload the number of the case: profilers
keep each distinct message for ever, so that numbers must not stand in it. Ranges are of the start/end kind, which also
holds what threads of autograd launch.
"""

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
NSYS, NCU, TORCH = "nsys", "ncu", "torch"
"""Profilers that a run can be watched by."""
PREPARE, READY, BEFORE, DROPPED = "prepare", "ready", "before", "dropped"
"""Phases around a timed run: a row is compiled and run first; arguments are put back and caches emptied; it runs before
another, as in the program; the latest run of the row that is not taken back yet does not count, since the processor was
slowed down."""


class Range:
    """A range that can be entered again and again.

    Parameters
    ----------
    message : operator or phase
    category : mode, and what else tells the rows of a case apart
    case : its number
    profiled : the profiler that it is for, of which some need all of it in the name
    """

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
        """Enter it."""
        self._open = self._begin(self._attributes)

    def end(self) -> None:
        """Leave it."""
        self._end(self._open)


def row_name(case: int, op: str, category: str) -> str:
    """A row's name for profilers that show a range's message alone, as the reports of ncu do."""
    return f"case {case} {op} {category}"


def check_ranges(profiler: str) -> None:
    """Raise `UserError` where no ranges can be made, without which a profiler's kernels belong to no case."""
    if nvtx is None:
        raise UserError(f"{profiler} tells cases apart by NVTX ranges, and the package nvtx is missing", "install nvtx")
    if not nvtx.enabled():
        raise UserError(f"{profiler} tells cases apart by NVTX ranges, which NVTX_DISABLE turns off", "unset it")


@contextmanager
def entered(message: str, category: str, case: int) -> Iterator[None]:
    """A range around a block; see `Range`."""
    span = Range(message, category, case)
    span.begin()
    try:
        yield
    finally:
        span.end()


@contextmanager
def watched(profiled: str, device: str, timelines: str | None) -> Iterator[None]:
    """Has a profiler record a block.

    Parameters
    ----------
    profiled : which one; empty for none
    timelines : folder for what torch's own sees
    """
    import torch

    on_gpu = torch.device(device).type == "cuda"
    if profiled == TORCH:
        assert timelines is not None, "they were asked for"
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
    """What starts a range with given attributes, and what ends one."""
    if hasattr(domain, "start_range"):
        return domain.start_range, domain.end_range
    # until 0.2.11 the public functions make the attributes anew each time
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
