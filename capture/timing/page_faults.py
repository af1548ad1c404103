"""Pages of memory that the system had to give while a call ran.

A result in memory that the process holds already costs what the operator writes; one in fresh memory costs a page fault
for every 4 kB besides, several times as much for operators that do little else. Which of the two a call met depends
on what the program freed before it, so the trace keeps it and a replay can give the call the same.
"""

from __future__ import annotations

import functools
import resource
from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch

LARGE = 1 << 16
"""Bytes of a tensor from which on its call is counted: smaller ones seldom get fresh memory."""
FEWEST = 8
"""Page faults of a call that are kept."""


def may_need_pages(func: Any, tensors: Sequence[torch.Tensor], outputs: int) -> bool:
    """Whether a call on the CPU may ask for so much memory that it is worth counting its page faults.

    Parameters
    ----------
    tensors : the call's tensors
    outputs : bytes of its results, as far as they are known
    """
    if not _gives_memory(func):
        return False
    return outputs >= LARGE or not tensors or any(_bytes(tensor) >= LARGE for tensor in tensors)


@functools.lru_cache(maxsize=4096)
def _gives_memory(func: Any) -> bool:
    """Whether an operator gives anything but its arguments or views of them."""
    schema = getattr(func, "_schema", None)
    return schema is None or any(value.alias_info is None for value in schema.returns)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.itemsize if tensor.layout is torch.strided and not tensor.is_nested else 0


class CountedCall(NamedTuple):
    """What was counted of a call.

    Attributes
    ----------
    faults : page faults of all threads: an operator's own threads touch its result first
    start_ns, duration_ns : without the counting, which lies within the call's recorded time
    system_ns, processor_ns : time of all threads in the kernel, and in all, which most kernels count in ticks
    """

    faults: int
    start_ns: int
    duration_ns: int
    system_ns: float
    processor_ns: float


class FaultCounter:
    """Counts the page faults of one thread's calls."""

    def __init__(self) -> None:
        # by start: resource usage before and after, start and duration; what is made of it is made by the flusher
        self._counted: dict[int, tuple[resource.struct_rusage, resource.struct_rusage, int, int]] = {}

    def counted(self, operator: Callable[..., Any], started: Callable[[], int]) -> Callable[..., Any]:
        """An operator whose page faults are counted.

        Parameters
        ----------
        started : the start of the call that runs, in ns, by which its count is asked for
        """

        def run(*args: Any, **kwargs: Any) -> Any:
            before = _usage()
            start = perf_counter_ns()
            result = operator(*args, **kwargs)
            duration = perf_counter_ns() - start
            self._counted[started()] = before, _usage(), start, duration
            return result

        return run

    def take(self, starts: Sequence[int]) -> dict[int, CountedCall]:
        """What was counted of calls, by their place, to be asked for once.

        Parameters
        ----------
        starts : of the calls, with the counting
        """
        if not self._counted:
            return {}
        taken = ((place, self._counted.pop(start, None)) for place, start in enumerate(starts))
        return {place: _counted_call(*counted) for place, counted in taken if counted is not None}


def _counted_call(
    before: resource.struct_rusage, after: resource.struct_rusage, start_ns: int, duration_ns: int
) -> CountedCall:
    system_ns = (after.ru_stime - before.ru_stime) * 1e9
    processor_ns = system_ns + (after.ru_utime - before.ru_utime) * 1e9
    return CountedCall(after.ru_minflt - before.ru_minflt, start_ns, duration_ns, system_ns, processor_ns)


def _usage() -> resource.struct_rusage:
    return resource.getrusage(resource.RUSAGE_SELF)
