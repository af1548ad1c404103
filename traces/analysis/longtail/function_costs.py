"""Time of operators and between operators, without the overhead of the capture and the operating system.

Recording a known call costs some microseconds, which `CaptureCost` holds. Recording a new one (describing arguments,
fitting values) takes many times as long and lengthens the gap between two calls; inspecting the values of some later
calls again does too. Therefore repeated steps are assumed to take their typical time, and perturbed calls, and gaps
before them, are used only if there are no others.

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
"""scopes and operators of two consecutive calls"""
Gaps: TypeAlias = NDArray[np.int64 | np.uint32]
LONGEST_NS = (1 << 32) - 1

FEWEST = 20
"""minimum number of clean gaps whose typical time is used for steps without clean gaps"""
SETTLED = 8
"""number of calls of a signature after which the capture rarely inspects its values"""
LOW = 0.25
"""quantile used as the typical time: capture and operating system only make times longer"""


@dataclass(frozen=True, slots=True)
class CaptureCost:
    """Time in ns that recording adds to a call and to the gap before the next one."""

    operator_ns: float = 0.0
    between_ns: float = 0.0


@dataclass(slots=True)
class FunctionTimes:
    """Times of a trace's calls, in ns.

    Attributes
    ----------
    cost : cost of the capture, which is subtracted
    calls : typical time of a call on the host, by signature and scope
    device_calls : typical time of a call on an accelerator, by signature and scope
    clean : typical gap in which the capture recorded nothing new, by step
    typical : gap for steps without a clean one
    """

    cost: CaptureCost
    calls: dict[tuple[int, int], float]
    device_calls: dict[tuple[int, int], float]
    clean: dict[Step, int]
    typical: int

    def between_ns(self, before: MadeCall, after: MadeCall) -> float:
        """Return the host time between consecutive calls of a run; 0 if either runs on a device."""
        if before.device_ns is not None or after.device_ns is not None:
            return 0.0
        return self.gap_ns(before, after)

    def operator_ns(self, call: MadeCall) -> float:
        """Return the time of a call, on the device if it ran on one."""
        return self.host_ns(call) if call.device_ns is None else self._on_device(call)

    def host_ns(self, call: MadeCall) -> float:
        """Return the host time of a call, including the launch."""
        return max(0.0, min(call.host_ns, self.calls[call.signature, call.scope]) - self.cost.operator_ns)

    def gap_ns(self, before: MadeCall, after: MadeCall) -> float:
        """Return the host time from the end of a call to the start of the next one of its run."""
        typical_ns = self.clean.get(step_of(before, after), self.typical)
        return max(0.0, min(gap(before, after), typical_ns) - self.cost.between_ns)

    def _on_device(self, call: MadeCall) -> float:
        return min(call.device_ns or 0.0, self.device_calls[call.signature, call.scope])


def measure_times(calls: MadeCalls, looked_at: Container[int], cost: CaptureCost) -> FunctionTimes:
    """Return the typical times of a trace's calls and gaps.

    Parameters
    ----------
    looked_at : signatures with later calls whose values the capture inspected
    """
    distinct = calls.distinct()
    # use unperturbed calls, or all if all were perturbed
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
    """Yield pairs of consecutive calls of a thread that belong to one run."""
    before: MadeCall | None = None
    for _, call, begins in in_runs(calls):
        if before is not None and not begins:
            yield before, call
        before = call


class _Gaps:
    """Gaps within runs, grouped by what the capture did in them.

    Attributes
    ----------
    clean : gaps in which the capture only recorded a known call, by step
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
        """Return the gaps from which the time of steps without clean gaps is computed."""
        if self._clean_count < FEWEST:
            return np.array(self._quiet or self._all)
        return np.concatenate([np.asarray(items) for items in self.clean.values()])


def _low_by_place(calls: pd.DataFrame, column: str) -> dict[tuple[int, int], float]:
    """Return the low quantile of a time of distinct calls, by signature and scope."""
    own = calls[["signature", "scope", column, COUNT]].sort_values(["signature", "scope", column])
    groups = own.groupby(["signature", "scope"])[COUNT]
    is_there = groups.cumsum() > (LOW * groups.transform("sum")).astype("int64")
    firsts = own[is_there].drop_duplicates(["signature", "scope"])
    keys = zip(firsts["signature"].tolist(), firsts["scope"].tolist(), strict=True)
    return dict(zip(keys, firsts[column].tolist(), strict=True))


def gap(before: MadeCall, after: MadeCall) -> int:
    """Return the time in ns from the end of a call to the start of the next."""
    return max(0, after.start_ns - before.start_ns - before.duration_ns)


def step_of(before: MadeCall, after: MadeCall) -> Step:
    return (before.scope, before.operation.op, after.scope, after.operation.op)


def _low(times: Gaps) -> float:
    """Return the low quantile of times, which are reordered."""
    if not len(times):
        return 0
    place = int(LOW * len(times))
    times.partition(place)
    return float(times[place])


IS_USED_ELSEWHERE, IS_READ = 1, 2
"""flags of memory: another function takes it; something reads it"""
USES = 4
"""factor that encodes the use of memory as one integer: the number of the function that made it, times this, plus flags
"""


class Traffic:
    """Memory of a whole trace: which function makes it, and whether other functions use it."""

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
        """Add the bytes that a call moves into and out of its run.

        Memory that the function made itself, in any phase, can stay inside a kernel. Memory that others made is read
        once. Memory that others take later, that no recorded call reads, or that existed before is written once.
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
    """Bytes that enter and leave a run, by memory: bytes read of each tensor, extent, and bytes written.

    Attributes
    ----------
    has_dataflow : True if a call of the run records its memory
    first, last : bytes that the first call that moves data takes, and that the last one returns
    """

    reads: dict[int, dict[tuple[object, ...], int]] = field(default_factory=dict)
    extents: dict[int, int] = field(default_factory=dict)
    writes: dict[int, int] = field(default_factory=dict)
    has_dataflow: bool = False
    first: int | None = None
    last: int = 0

    def pass_by(self, call: MadeCall) -> None:
        """Update the totals with the run's next call."""
        if any(storage != NO_STORAGE for storage in (*call.takes, *call.gives)):
            self.has_dataflow = True
        if call.operation.moves:
            if self.first is None:
                self.first = sum(call.operation.argument_bytes)
            self.last = sum(call.operation.result_bytes)

    def read(self, storage: int, shape: tuple[object, ...], size: int, extent: int) -> None:
        """Add bytes read; other tensors in the same memory may include the same bytes."""
        self.reads.setdefault(storage, {})[shape] = size
        self.extents[storage] = max(self.extents.get(storage, 0), extent)

    def write(self, storage: int, size: int) -> None:
        self.writes[storage] = max(self.writes.get(storage, 0), size)

    @property
    def bytes(self) -> int:
        """Bytes in total, or the bytes at both ends of the run if it lacks dataflow; views of the same memory may
        overlap.
        """
        if not self.has_dataflow:
            return (self.first or 0) + self.last
        inwards = sum(min(sum(sizes.values()), self.extents[storage]) for storage, sizes in self.reads.items())
        return inwards + sum(self.writes.values())
