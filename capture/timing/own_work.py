"""What the capture itself did between calls: one that runs right after such work finds cold caches.

Only the slow ways of recording a call are noted, so the fast one costs nothing; which calls ran after them is worked
out when calls are written.
"""

from __future__ import annotations

from time import perf_counter_ns

import numpy as np
from numpy.typing import NDArray

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
