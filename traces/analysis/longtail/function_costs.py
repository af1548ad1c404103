"""Time of operators and between operators, without what the capture and the system did there.

Recording a known call costs some microseconds, which `CaptureCost` holds. Recording a new one (describing arguments,
fitting values) takes many times as long, in the time between two calls; so does looking again at the values of some
later calls. Repeated steps are therefore assumed to take their typical time, and calls that are marked as perturbed,
and gaps before them, do not count if there are others.

A call on an accelerator counts with its device time only, since the host runs ahead.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from opgrip.traces.analysis.dataflow import UNKNOWN, MemoryNumbers
from opgrip.traces.analysis.longtail.thread_calls import Function, MadeCall, MadeCalls, function_of
from opgrip.traces.analysis.timeline import in_runs
from opgrip.traces.schema.records import NO_STORAGE
from opgrip.traces.table.call_table import COUNT

Step: TypeAlias = tuple[int, str, int, str]
"""From one call to the next: scope and operator of both."""
Gaps: TypeAlias = NDArray[np.int64 | np.uint32]
LONGEST_NS = (1 << 32) - 1

FEWEST = 20
"""Minimal number of clean gaps whose typical time is used for steps without any."""
SETTLED = 8
"""Calls of a signature after which the capture rarely looks at its values."""
LOW = 0.25
"""Quantile that counts as typical: capture and system only make times longer."""


@dataclass(frozen=True, slots=True)
class CaptureCost:
    """What recording adds to a call and to the gap before the next one, in ns."""

    operator_ns: float = 0.0
    between_ns: float = 0.0


@dataclass(slots=True)
class FunctionTimes:
    """Times of a trace's calls, in ns.

    Attributes
    ----------
    cost : of the capture, subtracted
    calls : by signature and scope, the typical time of a call on the host
    device_calls : the same on an accelerator
    clean : by step, a typical gap in which the capture recorded nothing new
    typical : for gaps without a clean one
    """

    cost: CaptureCost
    calls: dict[tuple[int, int], float]
    device_calls: dict[tuple[int, int], float]
    clean: dict[Step, int]
    typical: int

    def between_ns(self, before: MadeCall, after: MadeCall) -> float:
        """Return the host time between consecutive calls of a run."""
        if before.device_ns is not None or after.device_ns is not None:
            return 0.0
        return self.gap_ns(before, after)

    def operator_ns(self, call: MadeCall) -> float:
        """Return the time of a call, on the device if it has one there."""
        return self.host_ns(call) if call.device_ns is None else self._on_device(call)

    def host_ns(self, call: MadeCall) -> float:
        """Return the host time of a call, launch included."""
        return max(0.0, min(call.host_ns, self.calls[call.signature, call.scope]) - self.cost.operator_ns)

    def gap_ns(self, before: MadeCall, after: MadeCall) -> float:
        """Return the host time from a call to the next one of its run."""
        typical_ns = self.clean.get(step_of(before, after), self.typical)
        return max(0.0, min(gap(before, after), typical_ns) - self.cost.between_ns)

    def _on_device(self, call: MadeCall) -> float:
        return min(call.device_ns or 0.0, self.device_calls[call.signature, call.scope])


def measure_times(calls: MadeCalls, looked_at: Container[int], cost: CaptureCost) -> FunctionTimes:
    """Return the times of a trace.

    Parameters
    ----------
    looked_at : signatures with later calls whose values the capture looked at
    """
    distinct = calls.distinct()
    # unperturbed calls, or all if all were perturbed
    place = [distinct["signature"], distinct["scope"]]
    is_quiet = ~distinct["perturbed"] | distinct["perturbed"].groupby(place).transform("all")
    host_times = _low_by_place(distinct[is_quiet], "host_ns")
    device_times = _low_by_place(distinct[distinct["device_ns"].notna()], "device_ns")
    gaps = _Gaps(looked_at)
    for thread in calls.threads:
        for before, after in pairs_in_runs(calls.of(thread)):
            gaps.note(before, after)
    clean_by_step = {step: round(_low(np.array(items))) for step, items in gaps.clean.items()}
    return FunctionTimes(cost, host_times, device_times, clean_by_step, round(_low(gaps.typical())))


def pairs_in_runs(calls: Iterable[MadeCall]) -> Iterator[tuple[MadeCall, MadeCall]]:
    """Yield consecutive calls of a thread in one run."""
    before: MadeCall | None = None
    for _, call, begins in in_runs(calls):
        if before is not None and not begins:
            yield before, call
        before = call


class _Gaps:
    """Gaps within runs by what happened in them.

    Attributes
    ----------
    clean : by step, gaps in which the capture only recorded a known call
    """

    def __init__(self, looked_at: Container[int]) -> None:
        # gaps of seconds exceed any low quantile, so clipping them to four bytes does no harm
        self.clean: dict[Step, array[int]] = {}
        self._looked_at = looked_at
        self._earlier_pairs: set[tuple[int, int, int, int]] = set()
        self._calls_by_signature: Counter[int] = Counter()
        self._quiet: array[int] = array("q")
        self._all: array[int] = array("q")
        self._clean_count = 0

    def note(self, before: MadeCall, after: MadeCall) -> None:
        """Add two consecutive calls of a run."""
        gap_ns = gap(before, after)
        pair = (before.signature, before.scope, after.signature, after.scope)
        new = pair not in self._earlier_pairs or any(
            number in self._looked_at and self._calls_by_signature[number] <= SETTLED for number in pair[::2]
        )
        if not new and not after.perturbed:
            self.clean.setdefault(step_of(before, after), array("I")).append(min(gap_ns, LONGEST_NS))
            self._clean_count += 1
        self._earlier_pairs.add(pair)
        self._calls_by_signature[after.signature] += 1
        if self._clean_count < FEWEST:
            self._all.append(gap_ns)
            if not after.perturbed:
                self._quiet.append(gap_ns)

    def typical(self) -> Gaps:
        """Return the gap for steps without a clean one."""
        if self._clean_count < FEWEST:
            return np.array(self._quiet or self._all)
        return np.concatenate([np.asarray(items) for items in self.clean.values()])


def _low_by_place(calls: pd.DataFrame, column: str) -> dict[tuple[int, int], float]:
    """Return by signature and scope the low quantile of a time of distinct calls."""
    own = calls[["signature", "scope", column, COUNT]].sort_values(["signature", "scope", column])
    groups = own.groupby(["signature", "scope"])[COUNT]
    is_there = groups.cumsum() > (LOW * groups.transform("sum")).astype("int64")
    firsts = own[is_there].drop_duplicates(["signature", "scope"])
    keys = zip(firsts["signature"].tolist(), firsts["scope"].tolist(), strict=True)
    return dict(zip(keys, firsts[column].tolist(), strict=True))


def gap(before: MadeCall, after: MadeCall) -> int:
    """Return the time from the end of a call to the start of the next, in ns."""
    return max(0, after.start_ns - before.start_ns - before.duration_ns)


def step_of(before: MadeCall, after: MadeCall) -> Step:
    return (before.scope, before.operation.op, after.scope, after.operation.op)


def _low(times: Gaps) -> float:
    """Return the low quantile, reordering the times."""
    if not len(times):
        return 0
    place = int(LOW * len(times))
    times.partition(place)
    return float(times[place])


IS_USED_ELSEWHERE, IS_READ = 1, 2
"""Flags of memory: another function takes it; something reads it."""
USES = 4
"""Memory has one number: that of the function that made it, times this, plus its flags."""


class Traffic:
    """Where the memory of a whole trace comes from and goes to."""

    def __init__(self) -> None:
        self._numbers: dict[Function, int] = {}
        self._memory = MemoryNumbers()

    def note(self, calls: Iterable[MadeCall]) -> None:
        """Add a trace's calls in start order."""
        for call in calls:
            function = self._number_of(call)
            for storage, writes in zip(call.takes, call.operation.writes, strict=False):
                known = self._memory.get(storage)
                if known != UNKNOWN:
                    uses = IS_USED_ELSEWHERE if known // USES != function else 0
                    uses |= IS_READ if call.operation.moves and not writes else 0
                    if known | uses != known:
                        self._memory.set(storage, known | uses)
            taken = {NO_STORAGE, *call.takes}
            for storage in call.gives:
                is_new = storage not in taken
                if is_new and self._memory.get(storage) == UNKNOWN:
                    self._memory.set(storage, USES * function)

    def _number_of(self, call: MadeCall) -> int:
        return self._numbers.setdefault(function_of(call), len(self._numbers))

    def cross(self, call: MadeCall, borders: Borders) -> None:
        """Add the bytes that a call of a run moves into and out of it.

        What the function itself made, in any phase, can stay in a kernel. What others made is read once; what others
        take later, or nothing recorded reads, is written once; and so is what existed before.
        """
        borders.pass_by(call)
        operation = call.operation
        if not operation.moves:
            return
        function = self._number_of(call)
        for place, storage in enumerate(call.takes):
            if storage == NO_STORAGE or self._memory.get(storage) // USES == function:
                continue
            if operation.writes[place]:
                borders.write(storage, operation.argument_bytes[place])
            else:
                borders.read(
                    storage, operation.shapes[place], operation.argument_bytes[place], operation.extents[place]
                )
        for storage, size in zip(call.gives, operation.result_bytes, strict=False):
            known = self._memory.get(storage)
            if known // USES == function and (known & IS_USED_ELSEWHERE or not known & IS_READ):
                borders.write(storage, size)


@dataclass(slots=True)
class Borders:
    """Bytes that enter and leave a run: by memory, bytes read of each tensor, their extent, bytes written.

    Attributes
    ----------
    has_dataflow : True if a call of the run records its memory
    first, last : bytes that the first call with data takes, and that the last one gives
    """

    reads: dict[int, dict[tuple[object, ...], int]] = field(default_factory=dict)
    extents: dict[int, int] = field(default_factory=dict)
    writes: dict[int, int] = field(default_factory=dict)
    has_dataflow: bool = False
    first: int | None = None
    last: int = 0

    def pass_by(self, call: MadeCall) -> None:
        """Add the run's next call."""
        if any(storage != NO_STORAGE for storage in (*call.takes, *call.gives)):
            self.has_dataflow = True
        if call.operation.moves:
            if self.first is None:
                self.first = sum(call.operation.argument_bytes)
            self.last = sum(call.operation.result_bytes)

    def read(self, storage: int, shape: tuple[object, ...], size: int, extent: int) -> None:
        """Add bytes read; those of other tensors in the same memory may be the same ones."""
        self.reads.setdefault(storage, {})[shape] = size
        self.extents[storage] = max(self.extents.get(storage, 0), extent)

    def write(self, storage: int, size: int) -> None:
        """Add bytes written."""
        self.writes[storage] = max(self.writes.get(storage, 0), size)

    @property
    def bytes(self) -> int:
        """All bytes; views of the same memory may overlap. Without dataflow, only those at both ends."""
        if not self.has_dataflow:
            return (self.first or 0) + self.last
        inwards = sum(min(sum(sizes.values()), self.extents[storage]) for storage, sizes in self.reads.items())
        return inwards + sum(self.writes.values())
