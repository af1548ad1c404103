"""NVTX ranges around what is run, for Nsight's timelines and for programs that join kernels to calls.

A range's message is the operator or the phase, its category the mode, its payload the number of the case: profilers
keep each distinct message for ever, so that numbers must not stand in it. Ranges are of the start/end kind, which also
holds what threads of autograd launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import nvtx
import torch

DOMAIN = "opgrip"
PREPARE, READY = "prepare", "ready"
"""Phases before a timed run: a row is compiled and run first; arguments are put back and caches emptied."""


class Range:
    """A range that can be entered again and again.

    Parameters
    ----------
    message : operator or phase
    category : mode, and what else tells the rows of a case apart
    case : its number
    """

    __slots__ = ("_attributes", "_begin", "_end", "_open")

    def __init__(self, message: str, category: str, case: int) -> None:
        self._begin: Callable[[Any], Any] = _nothing
        self._end: Callable[[Any], Any] = _nothing
        self._attributes: Any = None
        if nvtx.enabled():
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


@contextmanager
def entered(message: str, category: str, case: int) -> Iterator[None]:
    """A range around a block; see `Range`."""
    made = Range(message, category, case)
    made.begin()
    try:
        yield
    finally:
        made.end()


@contextmanager
def watched(device: str) -> Iterator[None]:
    """Has the profiler of a GPU record a block, where it waits for that."""
    if torch.device(device).type != "cuda":
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


def _nothing(_: Any) -> None:
    pass
