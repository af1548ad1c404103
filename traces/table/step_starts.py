"""Start times of a program's steps, selection of calls by step and names, and calls that never ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from opgrip.cli.option_types import matches
from opgrip.errors import UserError
from opgrip.traces.codec.call_blocks import CallBlock, Integers, block_of
from opgrip.traces.io.reader import TraceReader
from opgrip.traces.schema.records import PHASES, Calls, End, Entered, Header, Record, Scope, Signature, Thread
from opgrip.traces.table.call_source import NumberSet, selected
from opgrip.traces.table.profiler_labels import is_mark

NEVER = np.iinfo(np.int64).max


class _Thread:
    def __init__(self, records: list[Entered]) -> None:
        self.records = records
        self._entered_ns: Integers = np.unique(np.array([record.start_ns for record in records], dtype=np.int64))
        self._starts = np.full(len(self._entered_ns), NEVER)
        self._signatures = np.full(len(self._entered_ns), -1)
        self._last_ns = -1
        self._has_calls = False

    def note(self, block: CallBlock) -> None:
        order = np.argsort(block.start_ns, kind="stable")
        starts = block.start_ns[order]
        last = int(starts[-1])
        self._last_ns = max(self._last_ns, last) if self._has_calls else last
        self._has_calls = True
        # the first call of this block that follows each entered call
        places = np.searchsorted(starts, self._entered_ns)
        rows = np.flatnonzero(places < len(starts))
        firsts = starts[places[rows]]
        earlier = firsts < self._starts[rows]
        rows, places = rows[earlier], places[rows][earlier]
        self._starts[rows] = starts[places]
        self._signatures[rows] = block.signature[order][places]

    def unfinished(self) -> list[Entered]:
        rows = np.searchsorted(self._entered_ns, [record.start_ns for record in self.records])
        firsts = self._signatures[rows].tolist()
        by_start = {
            record.start_ns: record
            for record, first in zip(self.records, firsts, strict=True)
            if first != record.signature
        }
        # an enclosing call began before the calls inside it
        newest = max(by_start, default=-1)
        return [record for start, record in sorted(by_start.items()) if start > self._last_ns or start == newest]


def unfinished_calls(entered: Mapping[int, list[Entered]], source: Iterable[CallBlock]) -> list[Entered]:
    if not entered:
        return []
    threads = {number: _Thread(records) for number, records in entered.items()}
    for block in source:
        thread = threads.get(block.thread)
        if thread is not None and len(block):
            thread.note(block)
    return [record for thread in threads.values() for record in thread.unfinished()]


MOST_STEPS = 1 << 20  # maximum number of steps that a header may declare

Place: TypeAlias = tuple[int, int]  # a place in the program: scope and signature
# calls of one process in any order: process number (None unless the trace was merged), scopes, signatures and starts
Columns: TypeAlias = tuple[int | None, Integers, Integers, Integers]


@dataclass(frozen=True, slots=True)
class StepStarts:
    """Start times of the steps of each process in ns; processes whose steps cannot be distinguished are missing."""

    begins: Mapping[int | None, Integers]

    def steps_of(self, process: int | None, start_ns: Integers) -> Integers:
        """Return the step of each call of a process; -1 if unknown. Calls before the first step count as part of it."""
        begins = self.begins.get(process)
        if begins is None:
            return np.full(len(start_ns), -1, dtype=np.int64)
        steps: Integers = np.maximum(np.searchsorted(begins, start_ns, side="right") - 1, 0)
        return steps


def step_starts(read: Callable[[], Iterable[Columns]], counts: Mapping[int | None, int]) -> StepStarts:
    """Return start times of steps, taken from the first scope and signature with as many calls as there are steps."""
    places = {process: _Places() for process in counts}
    for process, scope, signature, start_ns in read():
        if process in places and len(start_ns):
            places[process].add(scope, signature, start_ns)
    chosen = {process: own.first_of(counts[process]) for process, own in places.items()}
    starts: dict[int | None, list[Integers]] = {process: [] for process, place in chosen.items() if place is not None}
    for process, scope, signature, start_ns in read() if starts else ():
        place = chosen.get(process)
        if place is not None:
            starts[process].append(start_ns[(scope == place[0]) & (signature == place[1])])
    return StepStarts({process: np.sort(np.concatenate(own)) for process, own in starts.items()})


class _Places:
    def __init__(self) -> None:
        self._counts: Counter[Place] = Counter()
        self._first_ns: dict[Place, int] = {}

    def add(self, scope: Integers, signature: Integers, start_ns: Integers) -> None:
        order = np.lexsort((start_ns, signature, scope))
        scope, signature, start_ns = scope[order], signature[order], start_ns[order]
        firsts: NDArray[np.intp] = np.flatnonzero(np.append(True, (np.diff(scope) != 0) | (np.diff(signature) != 0)))
        counts = np.diff(np.append(firsts, len(scope)))
        for place, count, first_ns in zip(
            zip(scope[firsts].tolist(), signature[firsts].tolist(), strict=True),
            counts.tolist(),
            start_ns[firsts].tolist(),
            strict=True,
        ):
            self._counts[place] += count
            self._first_ns[place] = min(self._first_ns.get(place, first_ns), first_ns)

    def first_of(self, count: int) -> Place | None:
        once_a_step = (place for place, number in self._counts.items() if number == count)
        return min(once_a_step, key=self._first_ns.__getitem__, default=None)


def find_step_starts(read: Callable[[], Iterable[Record | CallBlock]]) -> StepStarts | None:
    first = next(iter(read()), None)
    counts = step_counts(first.fields) if isinstance(first, Header) else {}
    if counts:
        return step_starts(lambda: _columns(read()), counts)
    end, last_ns, marks = None, 0, NumberSet()
    for record in read():
        match record:
            case End():
                end = record
            case Signature():
                marks.put(record.number, is_mark(record.op))
            case Calls() | CallBlock():
                block = block_of(record) if isinstance(record, Calls) else record
                own = block.start_ns[~marks.flags(block.signature)]
                last_ns = max(last_ns, int(own.max(initial=0)))
    starts = reported_starts(end, last_ns)
    return StepStarts({None: starts}) if len(starts) else None


def reported_starts(end: End | None, last_ns: int) -> Integers:
    starts = np.sort(np.array([] if end is None else end.step_starts_ns[: MOST_STEPS + 1], dtype=np.int64))
    return starts[starts <= last_ns] if len(starts) <= MOST_STEPS else starts[:0]


def _columns(records: Iterable[Record | CallBlock]) -> Iterator[Columns]:
    processes: dict[int, int | None] = {}
    for record in records:
        match record:
            case Thread():
                processes[record.number] = record.process
            case Calls() | CallBlock():
                block = block_of(record) if isinstance(record, Calls) else record
                yield processes.get(block.thread), block.scope, block.signature, block.start_ns


def step_counts(header: Mapping[str, Any]) -> dict[int | None, int]:
    processes = header.get("processes")
    items: list[tuple[int | None, Any]] = [(None, header)]
    if isinstance(processes, list):
        items = list(enumerate(processes))
    counts = {number: item.get("steps") for number, item in items if isinstance(item, dict)}
    return {number: count for number, count in counts.items() if type(count) is int and 0 < count <= MOST_STEPS}


class CallFilter:
    def __init__(self, patterns: Mapping[str, tuple[str, ...]], steps: tuple[range, StepStarts] | None = None) -> None:
        self._phase, self._module, self._op = (patterns.get(name, ()) for name in ("phase", "module", "op"))
        self._steps = steps
        self._modules: dict[int, str] = {}
        self._processes: dict[int, int | None] = {}
        self._scopes, self._signatures = NumberSet(), NumberSet()

    def note(self, record: Record | CallBlock) -> None:
        if isinstance(record, Scope):
            # as in `Trace.calls`, a backward call belongs to the module of its forward call
            of_forward = None if record.forward is None else self._modules.get(record.forward)
            name = record.module if of_forward is None else of_forward
            self._modules[record.number] = record.module
            self._scopes.put(record.number, matches(record.phase, self._phase) and matches(name, self._module))
        elif isinstance(record, Signature):
            self._signatures.put(record.number, matches(record.op, self._op))
        elif isinstance(record, Thread):
            self._processes[record.number] = record.process

    def select(self, block: CallBlock) -> CallBlock:
        flags = np.ones(len(block), dtype=np.bool_)
        if self._phase or self._module:
            flags &= self._scopes.flags(block.scope)
        if self._op:
            flags &= self._signatures.flags(block.signature)
        if self._steps is not None:
            chosen, starts = self._steps
            steps = starts.steps_of(self._processes.get(block.thread), block.start_ns)
            flags &= (steps >= chosen.start) & (steps < chosen.stop)
        return selected(block, flags)


def patterns_of(**patterns: str | Sequence[str]) -> dict[str, tuple[str, ...]]:
    chosen = {name: (value,) if isinstance(value, str) else tuple(value) for name, value in patterns.items() if value}
    phases = chosen.get("phase", ())
    if not any(matches(name, phases) for name in PHASES):
        raise UserError(f"unknown phase {', '.join(map(str, phases))}", f"choose from {', '.join(PHASES)}")
    return chosen


def call_filter(
    reader: TraceReader, patterns: Mapping[str, tuple[str, ...]], steps: range | int | None
) -> CallFilter | None:
    if steps is not None:
        if not isinstance(steps, int | range):
            raise UserError(f"steps={steps!r} is neither a number nor a range", "pass, for example, 3 or range(3, 5)")
        chosen = range(steps, steps + 1) if isinstance(steps, int) else steps
        return CallFilter(patterns, (chosen, _starts_of(reader, chosen)))
    return CallFilter(patterns) if patterns else None


def _starts_of(reader: TraceReader, steps: range) -> StepStarts:
    if steps.step != 1 or not steps or steps.start < 0:
        raise UserError(f"{steps} is not a range of consecutive steps", "count them from 0, as in range(3, 5)")
    starts = find_step_starts(lambda: reader.again().columns())
    if starts is None:
        raise UserError("the trace does not record how many steps it has", "select calls by phase or module")
    if not starts.begins:
        raise UserError(
            "the steps of the trace cannot be separated: no operator was called exactly once per step",
            "select calls by phase or module",
        )
    count = max(map(len, starts.begins.values()))
    if steps.start >= count:
        raise UserError(f"the trace has no step {steps.start}", f"the steps of the trace are 0 to {count - 1}")
    return starts
