"""Time in and between the operators of a function, corrected for the cost of the capture and for interruptions."""

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

Step: TypeAlias = tuple[int, str, int, str]  # pair of consecutive calls: scope and operator of each
Gaps: TypeAlias = NDArray[np.int64 | np.uint32]
LONGEST_NS = (1 << 32) - 1

FEWEST = 20  # minimum number of clean gaps from which a typical gap is computed for pairs of calls without clean gaps
SETTLED = 8  # number of calls of a signature after which the capture rarely inspects its values
LOW = 0.25  # quantile used as the typical time; a low one, because capture and operating system only make times longer


@dataclass(frozen=True, slots=True)
class CaptureCost:
    operator_ns: float = 0.0
    between_ns: float = 0.0


@dataclass(slots=True)
class FunctionTimes:
    """Typical times of a trace's calls and of the gaps between them, in ns."""

    cost: CaptureCost
    calls: dict[tuple[int, int], float]
    device_calls: dict[tuple[int, int], float]
    clean: dict[Step, int]
    typical: int

    def between_ns(self, before: MadeCall, after: MadeCall) -> float:
        if before.device_ns is not None or after.device_ns is not None:
            return 0.0
        return self.gap_ns(before, after)

    def operator_ns(self, call: MadeCall) -> float:
        if call.device_ns is None:
            return self.host_ns(call)
        return min(call.device_ns, self.device_calls[call.signature, call.scope])

    def host_ns(self, call: MadeCall) -> float:
        return max(0.0, min(call.host_ns, self.calls[call.signature, call.scope]) - self.cost.operator_ns)

    def gap_ns(self, before: MadeCall, after: MadeCall) -> float:
        typical_ns = self.clean.get(step_of(before, after), self.typical)
        return max(0.0, min(gap(before, after), typical_ns) - self.cost.between_ns)


def measure_times(calls: MadeCalls, inspected: Container[int], cost: CaptureCost) -> FunctionTimes:
    distinct = calls.distinct()
    # use unperturbed calls, or all if all were perturbed
    place = [distinct["signature"], distinct["scope"]]
    is_quiet = ~distinct["perturbed"] | distinct["perturbed"].groupby(place).transform("all")
    host_times = _low_by_place(distinct[is_quiet], "host_ns")
    device_times = _low_by_place(distinct[distinct["device_ns"].notna()], "device_ns")
    gaps = _Gaps(inspected)
    for thread in calls.threads:
        for before, after in pairs_in_runs(calls.of(thread)):
            gaps.note(before, after)
    clean_by_step = {step: round(_low(np.array(items))) for step, items in gaps.clean.items()}
    return FunctionTimes(cost, host_times, device_times, clean_by_step, round(_low(gaps.typical())))


def pairs_in_runs(calls: Iterable[MadeCall]) -> Iterator[tuple[MadeCall, MadeCall]]:
    """Yield each pair of consecutive calls of one thread that belong to the same call of a Python function."""
    before: MadeCall | None = None
    for _, call, begins in in_runs(calls):
        if before is not None and not begins:
            yield before, call
        before = call


class _Gaps:
    # the capture recorded nothing new in a clean gap, because the program had made the same two calls before
    def __init__(self, inspected: Container[int]) -> None:
        # gaps of seconds exceed any low quantile, so clipping them to four bytes does no harm
        self.clean: dict[Step, array[int]] = {}
        self._inspected = inspected
        self._earlier_pairs: set[tuple[int, int, int, int]] = set()
        self._calls_by_signature: Counter[int] = Counter()
        self._quiet: array[int] = array("q")
        self._all: array[int] = array("q")
        self._clean_count = 0

    def note(self, before: MadeCall, after: MadeCall) -> None:
        gap_ns = gap(before, after)
        pair = (before.signature, before.scope, after.signature, after.scope)
        new = pair not in self._earlier_pairs or any(
            number in self._inspected and self._calls_by_signature[number] <= SETTLED for number in pair[::2]
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
        if self._clean_count < FEWEST:
            return np.array(self._quiet or self._all)
        return np.concatenate([np.asarray(items) for items in self.clean.values()])


def _low_by_place(calls: pd.DataFrame, column: str) -> dict[tuple[int, int], float]:
    own = calls[["signature", "scope", column, COUNT]].sort_values(["signature", "scope", column])
    groups = own.groupby(["signature", "scope"])[COUNT]
    is_there = groups.cumsum() > (LOW * groups.transform("sum")).astype("int64")
    firsts = own[is_there].drop_duplicates(["signature", "scope"])
    keys = zip(firsts["signature"].tolist(), firsts["scope"].tolist(), strict=True)
    return dict(zip(keys, firsts[column].tolist(), strict=True))


def gap(before: MadeCall, after: MadeCall) -> int:
    return max(0, after.start_ns - before.start_ns - before.duration_ns)


def step_of(before: MadeCall, after: MadeCall) -> Step:
    return (before.scope, before.operation.op, after.scope, after.operation.op)


def _low(times: Gaps) -> float:
    if not len(times):
        return 0
    place = int(LOW * len(times))
    times.partition(place)
    return float(times[place])


IS_USED_ELSEWHERE, IS_READ = 1, 2  # flags of a storage: another function uses it; a call reads it
# multiplier in the integer that encodes the use of a storage: index of the function that created it * USES + flags
USES = 4


class Traffic:
    def __init__(self) -> None:
        self._numbers: dict[Function, int] = {}
        self._memory = MemoryNumbers()

    def note(self, calls: Iterable[MadeCall]) -> None:
        for call in calls:
            function = self._number_of(call)
            for storage, writes in zip(call.inputs, call.operation.writes, strict=False):
                entry = self._memory.get(storage)
                if entry != UNKNOWN:
                    uses = IS_USED_ELSEWHERE if entry // USES != function else 0
                    uses |= IS_READ if call.operation.moves and not writes else 0
                    if entry | uses != entry:
                        self._memory.set(storage, entry | uses)
            argument_storages = {NO_STORAGE, *call.inputs}
            for storage in call.outputs:
                is_new = storage not in argument_storages
                if is_new and self._memory.get(storage) == UNKNOWN:
                    self._memory.set(storage, USES * function)

    def _number_of(self, call: MadeCall) -> int:
        return self._numbers.setdefault(function_of(call), len(self._numbers))

    def cross(self, call: MadeCall, borders: Borders) -> None:
        borders.pass_by(call)
        operation = call.operation
        if not operation.moves:
            return
        function = self._number_of(call)
        for place, storage in enumerate(call.inputs):
            if storage == NO_STORAGE or self._memory.get(storage) // USES == function:
                continue
            if operation.writes[place]:
                borders.write(storage, operation.argument_bytes[place])
            else:
                borders.read(
                    storage, operation.shapes[place], operation.argument_bytes[place], operation.extents[place]
                )
        for storage, size in zip(call.outputs, operation.result_bytes, strict=False):
            entry = self._memory.get(storage)
            if entry // USES == function and (entry & IS_USED_ELSEWHERE or not entry & IS_READ):
                borders.write(storage, size)


@dataclass(slots=True)
class Borders:
    reads: dict[int, dict[tuple[object, ...], int]] = field(default_factory=dict)
    extents: dict[int, int] = field(default_factory=dict)
    writes: dict[int, int] = field(default_factory=dict)
    has_dataflow: bool = False
    first: int | None = None
    last: int = 0

    def pass_by(self, call: MadeCall) -> None:
        if any(storage != NO_STORAGE for storage in (*call.inputs, *call.outputs)):
            self.has_dataflow = True
        if call.operation.moves:
            if self.first is None:
                self.first = sum(call.operation.argument_bytes)
            self.last = sum(call.operation.result_bytes)

    def read(self, storage: int, shape: tuple[object, ...], size: int, extent: int) -> None:
        self.reads.setdefault(storage, {})[shape] = size
        self.extents[storage] = max(self.extents.get(storage, 0), extent)

    def write(self, storage: int, size: int) -> None:
        self.writes[storage] = max(self.writes.get(storage, 0), size)

    @property
    def bytes(self) -> int:
        if not self.has_dataflow:
            return (self.first or 0) + self.last
        inwards = sum(min(sum(sizes.values()), self.extents[storage]) for storage, sizes in self.reads.items())
        return inwards + sum(self.writes.values())
