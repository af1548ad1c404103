"""Calls whose page faults took much longer than is usual on this machine.

A virtual machine may return memory that its system has freed to the host. The first use of each such page then waits
for the host, which can take a hundred times as long as a page fault does otherwise. The time that calls spend in the
kernel for each of their page faults shows it; calls are marked where this is at least twice the usual.

Most kernels count that part in ticks, which is much longer than many calls. So it is looked at for all calls of a block
together, then for those of each signature, where few ticks count less.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from opgrip.capture.timing.page_faults import FEWEST, CountedCall
from opgrip.platform.page_fault_cost import TICK_NS, is_slow

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
