"""The time of operators and between two of them, without what the capture and the system did there.

Recording a call that was met before costs some microseconds, which `CaptureCost` tells. Recording one that was not (its
arguments are described, values fitted) takes many times as long, and falls into the time between two calls. So does
looking again at the values of some later calls. What happens again and again is therefore taken to last as long as it
typically does; calls that are marked as perturbed by such work, and what is before them, tell nothing of that where
there are others.

A call that worked on an accelerator counts with the time that it kept that busy, and the time on the host beside it not
at all: the host runs ahead there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from opgrip.traces.longtail.calls import MadeCall

Step: TypeAlias = tuple[int, str, int, str]
"""From one call to the next: scope and operator of both."""

FEWEST = 20
"""Gaps without a call that was new, from which on their typical one stands for those never seen without one."""
SETTLED = 8
"""Calls of a signature after which the capture looks at its values but rarely."""
LOW = 0.25
"""Quantile of times that is typical: what the capture and the system did in some of them only makes those longer."""


@dataclass(frozen=True, slots=True)
class CaptureCost:
    """What recording one call adds to its own time and to the time before the next call, in ns."""

    operator_ns: float = 0.0
    between_ns: float = 0.0


@dataclass(slots=True)
class Times:
    """What is known of the time that a trace's calls took, in ns.

    Attributes
    ----------
    cost : of the capture, taken off
    calls : by signature and scope, the typical time of a call on the host
    device_calls : the same on an accelerator
    clean : by step, a typical gap in which the capture had nothing new to record
    typical : stands for those gaps of which none is known
    """

    cost: CaptureCost
    calls: dict[tuple[int, int], float]
    device_calls: dict[tuple[int, int], float]
    clean: dict[Step, int]
    typical: int

    def between_ns(self, run: Sequence[MadeCall]) -> float:
        """Time between the calls of a run, of those that worked on the host."""
        pairs = pairwise(run)
        return self._gaps((one, other) for one, other in pairs if one.device_ns is None and other.device_ns is None)

    def operators_ns(self, calls: Iterable[MadeCall]) -> float:
        """Time in calls, on the device where they have one there."""
        return sum(self._on_host(call) if call.device_ns is None else self._on_device(call) for call in calls)

    def host_ns(self, run: Sequence[MadeCall]) -> float:
        """The host's time in all calls of a run and between them, launches included."""
        return sum(map(self._on_host, run)) + self._gaps(pairwise(run))

    def _on_host(self, call: MadeCall) -> float:
        return max(0.0, min(call.host_ns, self.calls[call.signature, call.scope]) - self.cost.operator_ns)

    def _on_device(self, call: MadeCall) -> float:
        return min(call.device_ns or 0.0, self.device_calls[call.signature, call.scope])

    def _gaps(self, pairs: Iterable[tuple[MadeCall, MadeCall]]) -> float:
        return sum(max(0.0, self._gap(before, after) - self.cost.between_ns) for before, after in pairs)

    def _gap(self, before: MadeCall, after: MadeCall) -> int:
        return min(gap(before, after), self.clean.get(step_of(before, after), self.typical))


def measure_times(runs: Sequence[Sequence[MadeCall]], looked_at: Container[int], cost: CaptureCost) -> Times:
    """What all runs of a trace tell, in their order.

    Parameters
    ----------
    looked_at : signatures of which the capture looked at the values of later calls
    """
    calls_by_place: dict[tuple[int, int], list[MadeCall]] = {}
    for call in (call for run in runs for call in run):
        calls_by_place.setdefault((call.signature, call.scope), []).append(call)
    host_times = {place: _low([call.host_ns for call in _quiet(calls)]) for place, calls in calls_by_place.items()}
    device_times = {
        place: _low([call.device_ns for call in calls if call.device_ns is not None])
        for place, calls in calls_by_place.items()
    }
    clean = _clean_gaps(runs, looked_at)
    clean_gaps = [item for items in clean.values() for item in items]
    if len(clean_gaps) < FEWEST:
        pairs = [pair for run in runs for pair in pairwise(run)]
        clean_gaps = [gap(*pair) for pair in pairs if not pair[1].perturbed] or [gap(*pair) for pair in pairs]
    clean_by_step = {step: round(_low(items)) for step, items in clean.items()}
    return Times(cost, host_times, device_times, clean_by_step, round(_low(clean_gaps)))


def _clean_gaps(runs: Sequence[Sequence[MadeCall]], looked_at: Container[int]) -> dict[Step, list[int]]:
    """By step, the gaps in which the capture had nothing to do but to record a call that was met before."""
    earlier_pairs: set[tuple[int, int, int, int]] = set()
    clean: dict[Step, list[int]] = {}
    calls_by_signature: Counter[int] = Counter()
    for before, after in (pair for run in runs for pair in pairwise(run)):
        pair = (before.signature, before.scope, after.signature, after.scope)
        new = pair not in earlier_pairs or any(
            number in looked_at and calls_by_signature[number] <= SETTLED for number in pair[::2]
        )
        if not new and not after.perturbed:
            clean.setdefault(step_of(before, after), []).append(gap(before, after))
        earlier_pairs.add(pair)
        calls_by_signature[after.signature] += 1
    return clean


def gap(before: MadeCall, after: MadeCall) -> int:
    """Time from the end of a call to the start of the next, in ns."""
    return max(0, after.start_ns - before.start_ns - before.duration_ns)


def step_of(before: MadeCall, after: MadeCall) -> Step:
    """What a gap is between."""
    return (before.scope, before.operation.op, after.scope, after.operation.op)


def _quiet(calls: Sequence[MadeCall]) -> Sequence[MadeCall]:
    """Those of some calls that were not perturbed; all, where all were."""
    return [call for call in calls if not call.perturbed] or calls


def _low(times: Sequence[float]) -> float:
    return sorted(times)[int(LOW * len(times))] if times else 0
