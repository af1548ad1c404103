"""Page faults that happened during a call, and calls whose page faults took much longer than usual.

A result in memory that the process holds already costs what the operator writes; one in fresh memory costs a page fault
for every 4 kB besides, several times as much for operators that do little else. Which of the two a call met depends
on what the program freed before it, so the trace keeps it and a replay can give the call the same.

A virtual machine may return memory that its system has freed to the host. The first use of each such page then waits
for the host, which can take a hundred times as long as a page fault does otherwise. The time that calls spend in the
kernel for each of their page faults shows it; calls are marked where this is at least twice the usual.

Most kernels count that part in ticks, much longer than many calls. So it is looked at for all calls of a block
together, then for those of each signature, where few ticks count less.
"""

from __future__ import annotations

import functools
import resource
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from opgrip.platform.page_fault_cost import TICK_NS, is_slow

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


SLOW = 2.0
"""Times the usual cost of a page fault from which on memory is slow."""
SLOWEST = 200.0
"""Times the usual cost that a fault takes at most: what the kernel took beyond that was for something else."""
PRIOR_TICKS = 2
"""Ticks at the cost of the whole block that a signature's calls begin with."""
LEAST_PART = 0.1
"""Of a call's time that slow faults took, from which on it is marked."""


class SlowMemory:
    """Finds the calls of a capture whose page faults were slow.

    Parameters
    ----------
    usual_ns : time of a page fault when memory is at hand; None where that is not known, and no call is slow

    Attributes
    ----------
    excess_ns : how much longer slow calls took so far
    """

    def __init__(self, usual_ns: float | None) -> None:
        self.usual_ns = usual_ns
        self.excess_ns = 0.0

    def slow_calls(self, counted: Mapping[int, CountedCall], signatures: Sequence[int]) -> list[tuple[int, int]]:
        """Return the places of slow calls in a block, and an estimate of how much longer each took, in ns.

        Parameters
        ----------
        counted : what was counted of calls, by their place
        signatures : number of the signature of each call
        """
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
        # of each signature, with what the whole block tells of it
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
    """Return for each call the sum of values over the sum of weights in its group, drawn to that of all calls.

    Parameters
    ----------
    prior : weight that the ratio over all calls has in each group
    """
    overall = values.sum() / weights.sum()
    sums, totals = (np.bincount(group, weights=column) for column in (values, weights))
    ratios: NDArray[np.float64] = (sums + prior * overall) / (totals + prior)
    return ratios[group]


LEAST_NS = 2_000
"""Own work that is noted."""
PERTURBING_NS = 20_000
"""Own work before a call, or within it, from which on its time is said to be perturbed."""
PERTURBING_PART = 20
"""Own work within a call perturbs it where it is more than one part in so many."""
NONE_OPEN = 1 << 62
"""Later than any call starts."""

Times = NDArray[np.int64]
Runs = list[tuple[int, int]]
"""Places that stand side by side: the first, and how many."""


class OwnWork:
    """Own work in one thread, by when it began and ended."""

    def __init__(self) -> None:
        self._intervals: list[tuple[int, int]] = []
        self._within: list[tuple[int, int]] = []

    def add(self, began_ns: int) -> int:
        """Take note of work that ends now; how long it took in ns."""
        now = perf_counter_ns()
        if now - began_ns >= LEAST_NS:
            self._intervals.append((began_ns, now))
        return now - began_ns

    def take(self, starts: Times, ends: Times, open_since_ns: int = NONE_OPEN) -> Runs:
        """Which of a thread's calls own work perturbed, those of earlier blocks left out.

        Parameters
        ----------
        starts, ends : in ns, of calls in the order in which they ended
        open_since_ns : the start of the first call that has not ended by then
        """
        # what began after these calls perturbs those that are to come
        last = int(ends.max())
        used = [item for item in self._intervals if item[0] < last]
        del self._intervals[: len(used)]
        if not used and not self._within:
            return []
        order = np.argsort(starts, kind="stable")
        began, ended = np.array(used, dtype=np.int64).reshape(-1, 2).T
        before = np.zeros(len(starts), dtype=np.int64)
        following = np.searchsorted(starts[order], ended)
        there = following < len(starts)
        np.add.at(before, order[following[there]], (ended - began)[there])
        # that of calls within a function is in the function's time
        self._within += used
        within = self._time_within(starts, ends)
        self._within = [item for item in self._within if item[0] >= open_since_ns]
        is_perturbed = (before >= PERTURBING_NS) | (within * PERTURBING_PART > ends - starts)
        return runs_of(np.flatnonzero(is_perturbed))

    def _time_within(self, starts: Times, ends: Times) -> Times:
        """Own work in ns between the start and end of each call."""
        began, ended = np.array(self._within, dtype=np.int64).T
        total = np.concatenate([[0], np.cumsum(ended - began)])
        within: Times = total[np.searchsorted(began, ends)] - total[np.searchsorted(began, starts)]
        return within


def runs_of(places: NDArray[np.intp]) -> Runs:
    """Ascending places in runs."""
    if not len(places):
        return []
    breaks = np.flatnonzero(np.diff(places) > 1) + 1
    groups = np.split(places, breaks)
    return [(int(group[0]), len(group)) for group in groups]
