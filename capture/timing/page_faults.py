"""Page faults during a call, and calls whose page faults took much longer than usual."""

from __future__ import annotations

import functools
import resource
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from opgrip.platform import perf_counter_ns
from opgrip.platform.contention import TICK_NS, is_slow

LARGE = 1 << 16  # minimum size in bytes of a tensor whose page faults are counted; smaller ones are rarely in new pages
FEWEST = 8  # minimum number of page faults of a call that are recorded


def may_need_pages(func: Any, tensors: Sequence[torch.Tensor], outputs: int) -> bool:
    """Return True if a call on the CPU may allocate so much memory that its page faults should be counted."""
    if not _allocates(func):
        return False
    return outputs >= LARGE or not tensors or any(_bytes(tensor) >= LARGE for tensor in tensors)


@functools.lru_cache(maxsize=4096)
def _allocates(func: Any) -> bool:
    schema = getattr(func, "_schema", None)
    return schema is None or any(value.alias_info is None for value in schema.returns)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.itemsize if tensor.layout is torch.strided and not tensor.is_nested else 0


class CountedCall(NamedTuple):
    """Page faults and times of one call.

    system_ns, processor_ns : processor time of all threads: in the operating system, and in total
    """

    faults: int
    start_ns: int
    duration_ns: int
    system_ns: float
    processor_ns: float


class FaultCounter:
    def __init__(self) -> None:
        # by start: resource usage before and after, start and duration; the flusher converts them to `CountedCall`
        self._counted: dict[int, tuple[resource.struct_rusage, resource.struct_rusage, int, int]] = {}

    def counted(self, operator: Callable[..., Any], started: Callable[[], int]) -> Callable[..., Any]:
        """Return a wrapper that runs an operator, and counts the page faults of each call.

        started : returns the start of the running call in ns, which identifies the call
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
        counted = self._counted
        if not counted:
            return {}
        return {place: _counted_call(*counted.pop(start)) for place, start in enumerate(starts) if start in counted}


def _counted_call(
    before: resource.struct_rusage, after: resource.struct_rusage, start_ns: int, duration_ns: int
) -> CountedCall:
    system_ns = (after.ru_stime - before.ru_stime) * 1e9
    processor_ns = system_ns + (after.ru_utime - before.ru_utime) * 1e9
    return CountedCall(after.ru_minflt - before.ru_minflt, start_ns, duration_ns, system_ns, processor_ns)


def _usage() -> resource.struct_rusage:
    return resource.getrusage(resource.RUSAGE_SELF)


SLOW = 2.0  # minimum time of a page fault, relative to the usual time, that counts as slow
# maximum time of a page fault, relative to the usual time; the kernel spent any time beyond that on other work
SLOWEST = 200.0
PRIOR_TICKS = 2  # weight, in ticks, of the time per fault of all calls of a block in the estimate for one signature
LEAST_PART = 0.1  # minimum part of a call's time spent on slow page faults for the call to be marked


class SlowMemory:
    """Detects calls whose page faults took much longer than usual."""

    def __init__(self, usual_ns: float | None) -> None:
        self.usual_ns = usual_ns
        self.excess_ns = 0.0

    def slow_calls(self, counted: Mapping[int, CountedCall], signatures: Sequence[int]) -> list[tuple[int, int]]:
        """Return the index of each call whose page faults were slow, and the estimated additional time in ns."""
        places = [place for place, call in sorted(counted.items()) if call.faults >= FEWEST]
        if self.usual_ns is None or not places:
            return []
        calls = [counted[place] for place in places]
        most_ns = self.usual_ns * SLOWEST
        whole_ns = sum(min(call.system_ns, call.faults * most_ns) for call in calls)
        if not is_slow(sum(call.faults for call in calls), whole_ns, self.usual_ns):
            return []
        faults = np.array([call.faults for call in calls], dtype=np.float64)
        durations = np.array([call.duration_ns for call in calls], dtype=np.float64)
        system = np.array([call.system_ns for call in calls]).clip(max=faults * most_ns)
        processor = np.array([call.processor_ns for call in calls])
        _, group = np.unique([signatures[place] for place in places], return_inverse=True)
        prior_ns = PRIOR_TICKS * TICK_NS
        # per signature, with the ratio of the whole block as a prior
        cost = _means(group, system, faults, prior_ns / (system.sum() / faults.sum()))
        threads = _means(group, processor, durations, prior_ns).clip(1.0, torch.get_num_threads())
        quickest = faults * self.usual_ns / torch.get_num_threads()
        excess = (faults * (cost - self.usual_ns) / threads).clip(0.0, (durations - quickest).clip(min=0.0))
        are_slow = (cost >= SLOW * self.usual_ns) & (excess >= LEAST_PART * durations) & (excess >= 1.0)
        self.excess_ns += float(excess[are_slow].sum())
        return [(places[index], int(excess[index])) for index in np.flatnonzero(are_slow).tolist()]


def _means(
    group: NDArray[np.intp], values: NDArray[np.float64], weights: NDArray[np.float64], prior: float
) -> NDArray[np.float64]:
    overall = values.sum() / weights.sum()
    sums, totals = (np.bincount(group, weights=column) for column in (values, weights))
    ratios: NDArray[np.float64] = (sums + prior * overall) / (totals + prior)
    return ratios[group]


LEAST_NS = 2_000  # minimum duration in ns of own work that is stored
PERTURBING_NS = 20_000  # minimum own work in ns before or within a call for which the call counts as perturbed
PERTURBING_PART = 20  # work within a call also perturbs it if it takes more than 1 / PERTURBING_PART of its time
NONE_OPEN = 1 << 62  # a time in ns later than the start of any call

Times = NDArray[np.int64]
Runs = list[tuple[int, int]]  # runs of consecutive indices, each as first index and length


class OwnWork:
    def __init__(self) -> None:
        # start and end of each, as plain integers, which Python's garbage collector does not count
        self._intervals: list[int] = []
        self._within: Times = np.empty((0, 2), dtype=np.int64)

    def add(self, began_ns: int) -> int:
        now = perf_counter_ns()
        if now - began_ns >= LEAST_NS:
            self._intervals += (began_ns, now)
        return now - began_ns

    def take(self, starts: Times, ends: Times, open_since_ns: int = NONE_OPEN) -> Runs:
        """Return the calls that the capture's own work perturbed, as runs of calls: (first index, length) each.

        open_since_ns : start of the first call that has not ended; `NONE_OPEN` if all calls have ended
        """
        intervals = np.array(self._intervals, dtype=np.int64).reshape(-1, 2)
        # work that begins after these calls perturbs later ones
        used = intervals[intervals[:, 0] < ends.max()]
        del self._intervals[: used.size]
        if not len(used) and not len(self._within):
            return []
        began, ended = used.T
        order = np.argsort(starts, kind="stable")
        before = np.zeros(len(starts), dtype=np.int64)
        following = np.searchsorted(starts[order], ended)
        there = following < len(starts)
        np.add.at(before, order[following[there]], (ended - began)[there])
        # a function's time includes own work for the calls inside it
        self._within = np.concatenate([self._within, used])
        within = self._time_within(starts, ends)
        self._within = self._within[self._within[:, 0] >= open_since_ns]
        is_perturbed = (before >= PERTURBING_NS) | (within * PERTURBING_PART > ends - starts)
        return runs_of(np.flatnonzero(is_perturbed))

    def _time_within(self, starts: Times, ends: Times) -> Times:
        began, ended = self._within.T
        total = np.concatenate([[0], np.cumsum(ended - began)])
        within: Times = total[np.searchsorted(began, ends)] - total[np.searchsorted(began, starts)]
        return within


def runs_of(places: NDArray[np.intp]) -> Runs:
    """Return ascending indices as runs of consecutive indices, each as (first index, length)."""
    if not len(places):
        return []
    firsts = np.flatnonzero(np.diff(places, prepend=-2) > 1)
    return list(zip(places[firsts].tolist(), np.diff(firsts, append=len(places)).tolist(), strict=True))
