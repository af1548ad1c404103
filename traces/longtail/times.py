"""The time of operators and between two of them, without what the capture and the system did there.

Recording a call that was met before costs some microseconds, which `CaptureCost` tells. Recording one that was not (its
arguments are described, values fitted) takes many times as long, and falls into the time between two calls. So does
looking again at the values of some later calls. What happens again and again is therefore taken to last as long as it
typically does.
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
    calls : by signature and scope, the typical time of a call
    clean : by step, a typical gap in which the capture had nothing new to record
    typical : stands for those gaps of which none is known
    """

    cost: CaptureCost
    calls: dict[tuple[int, int], int]
    clean: dict[Step, int]
    typical: int

    def between_ns(self, run: Sequence[MadeCall]) -> float:
        """Time between the calls of a run."""
        return sum(max(0.0, self._gap(before, after) - self.cost.between_ns) for before, after in pairwise(run))

    def operators_ns(self, calls: Iterable[MadeCall]) -> float:
        """Time in calls."""
        return sum(max(0.0, self._call(call) - self.cost.operator_ns) for call in calls)

    def _call(self, call: MadeCall) -> int:
        return min(call.duration_ns, self.calls[call.signature, call.scope])

    def _gap(self, before: MadeCall, after: MadeCall) -> int:
        return min(gap(before, after), self.clean.get(step_of(before, after), self.typical))


def measure_times(runs: Iterable[Sequence[MadeCall]], looked_at: Container[int], cost: CaptureCost) -> Times:
    """What all runs of a trace tell, in their order.

    Parameters
    ----------
    looked_at : signatures of which the capture looked at the values of later calls
    """
    earlier_pairs: set[tuple[int, int, int, int]] = set()
    durations: dict[tuple[int, int], list[int]] = {}
    clean: dict[Step, list[int]] = {}
    every: list[int] = []
    calls_by_signature: Counter[int] = Counter()
    for run in runs:
        for call in run:
            durations.setdefault((call.signature, call.scope), []).append(call.duration_ns)
        for before, after in pairwise(run):
            every.append(gap(before, after))
            pair = (before.signature, before.scope, after.signature, after.scope)
            new = pair not in earlier_pairs or any(
                number in looked_at and calls_by_signature[number] <= SETTLED for number in pair[::2]
            )
            if not new:
                clean.setdefault(step_of(before, after), []).append(every[-1])
            earlier_pairs.add(pair)
            calls_by_signature[after.signature] += 1
    clean_gaps = [item for items in clean.values() for item in items]
    typical = _low(clean_gaps if len(clean_gaps) >= FEWEST else every)
    calls = {key: _low(items) for key, items in durations.items()}
    return Times(cost, calls, {step: _low(items) for step, items in clean.items()}, typical)


def gap(before: MadeCall, after: MadeCall) -> int:
    """Time from the end of a call to the start of the next, in ns."""
    return max(0, after.start_ns - before.start_ns - before.duration_ns)


def step_of(before: MadeCall, after: MadeCall) -> Step:
    """What a gap is between."""
    return (before.scope, before.operation.op, after.scope, after.operation.op)


def _low(times: Sequence[int]) -> int:
    return sorted(times)[int(LOW * len(times))] if times else 0
