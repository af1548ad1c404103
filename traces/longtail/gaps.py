"""The time between two operators of a function, without what the capture itself did in it.

Recording a call that was met before costs about as much as an empty dispatch mode. Recording one that was not (its
arguments are described, values fitted) takes many times as long, and falls into the time between two calls.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias

from opgrip.traces.longtail.calls import MadeCall

Step: TypeAlias = tuple[int, str, int, str]
"""From one call to the next: scope and operator of both."""

FEWEST = 20
"""Gaps without a call that was new, from which on their median stands for those that were not seen without one."""
LOW = 0.25
"""Quantile of all gaps that does, where there are fewer: what the capture did only makes them longer."""


@dataclass(slots=True)
class Gaps:
    """What is known of the time between calls.

    Attributes
    ----------
    clean : by step, the gaps in ns in which no call was recorded for the first time
    typical : stands for those of which none is known, in ns
    """

    clean: dict[Step, float] = field(default_factory=dict)
    typical: float = 0.0

    def between_ns(self, run: Sequence[MadeCall]) -> float:
        """Time between the calls of a run."""
        return sum(self._gap(before, after) for before, after in pairwise(run))

    def _gap(self, before: MadeCall, after: MadeCall) -> float:
        return min(gap(before, after), self.clean.get(step_of(before, after), self.typical))


def measure_gaps(runs: Iterable[Sequence[MadeCall]]) -> Gaps:
    """What all runs of a trace tell, in their order."""
    met: set[tuple[int, int, int, int]] = set()
    clean: dict[Step, list[int]] = {}
    every: list[int] = []
    for run in runs:
        for before, after in pairwise(run):
            every.append(gap(before, after))
            key = (before.signature, before.scope, after.signature, after.scope)
            if key in met:
                clean.setdefault(step_of(before, after), []).append(every[-1])
            met.add(key)
    found = sorted(item for items in clean.values() for item in items)
    if len(found) >= FEWEST:
        typical = statistics.median(found)
    else:
        every.sort()
        typical = every[int(LOW * len(every))] if every else 0
    return Gaps({step: statistics.median(items) for step, items in clean.items()}, typical)


def gap(before: MadeCall, after: MadeCall) -> int:
    """Time from the end of a call to the start of the next, in ns."""
    return max(0, after.start_ns - before.start_ns - before.duration_ns)


def step_of(before: MadeCall, after: MadeCall) -> Step:
    """What a gap is between."""
    return (before.scope, before.operation.op, after.scope, after.operation.op)
