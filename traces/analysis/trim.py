"""Writer of a part of a trace: the selected calls, and the records that they refer to. Records keep their numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np

from opgrip.traces.analysis.trace_part import (
    Flags,
    KeptFlow,
    Outline,
    TracePart,
    read_outline,
    selected_calls,
    with_inner_calls,
)
from opgrip.traces.codec.call_blocks import CallBlock
from opgrip.traces.io.foreign_files import Losses
from opgrip.traces.io.reader import TraceReader
from opgrip.traces.io.tensor_file import HEADER_FIELD
from opgrip.traces.io.writer import TraceWriter
from opgrip.traces.schema.accelerator_records import (
    DeviceTimes,
    Graph,
    GraphTimes,
    Kernels,
    Wait,
)
from opgrip.traces.schema.json_values import LATEST_NS
from opgrip.traces.schema.records import (
    NO_STORAGE,
    Context,
    Effects,
    End,
    Header,
    Observed,
    Record,
    Scope,
    Signature,
    Thread,
    Values,
)
from opgrip.traces.table.call_source import selected
from opgrip.traces.table.profiler_labels import is_operator
from opgrip.traces.table.step_starts import StepStarts


@dataclass(frozen=True, slots=True)
class Trimmed:
    """Result of writing a part of a trace.

    calls, of_calls, signatures, of_signatures : numbers in the part and in the whole trace, as in `opgrip trace info`
    producers : number of calls that were added because selected calls read their results, directly or indirectly
    cut_edges : how often a call reads memory that an omitted call wrote
    losses : content of a trace that the source file lacks because another tool wrote it
    """

    calls: int
    of_calls: int
    signatures: int
    of_signatures: int
    producers: int
    cut_edges: int
    losses: Losses


def trim(
    path: str | Path,
    output: Path,
    part: TracePart,
    with_producers: bool = False,
    force: bool = False,
    partial: bool = False,
    unbounded: bool = False,
) -> Trimmed:
    """Write a part of a trace. The trace is read twice, and a few numbers per call are kept in memory.

    with_producers : add all calls that selected calls depend on, directly or indirectly, for their arguments
    """
    outline = read_outline(TraceReader(path, unbounded), partial)
    flags = selected_calls(outline, part)
    flow = KeptFlow(outline)
    counted = np.isin(outline.signature, _counted_signatures(outline.signatures, outline))
    selected_count = int((flags & counted).sum())
    if with_producers:
        flags = with_inner_calls(outline, flow.with_producers(flags))
    reader = TraceReader(path, unbounded)
    writing = _Writing(outline, flags)
    calls = int((flags & counted).sum())
    signatures, of_signatures = (_counted_signatures(of, outline) for of in (writing.signatures, outline.signatures))
    trimmed = Trimmed(
        calls=calls,
        of_calls=int(counted.sum()),
        signatures=len(signatures),
        of_signatures=len(of_signatures),
        producers=calls - selected_count,
        cut_edges=flow.cut_edges(flags),
        losses=reader.losses,
    )
    header = _header(outline, part, trimmed, same_folder=reader.path.resolve().parent == output.resolve().parent)
    with TraceWriter(output, header, force) as writer:
        for record in reader.columns():
            changed = writing.of(record)
            if changed is not None:
                writer.write(changed)
        writer.write(writing.end)
    return replace(trimmed, losses=reader.losses)


def _counted_signatures(numbers: Iterable[int], outline: Outline) -> list[int]:
    items = ((number, outline.signatures[number]) for number in numbers)
    return [number for number, item in items if is_operator(item.op, item.kind)]


def _header(outline: Outline, part: TracePart, trimmed: Trimmed, same_folder: bool) -> Header:
    fields = {name: value for name, value in outline.header.items() if name not in ("format", "version")}
    if not same_folder:
        # the file of full values is expected in the trace's folder
        fields.pop(HEADER_FIELD, None)
    if part.steps is not None and "steps" in fields:
        first, end = part.steps
        fields["steps"] = min(fields["steps"], fields["steps"] if end is None else end) - first
    facts = {"calls": trimmed.of_calls, "signatures": trimmed.of_signatures, "cut_edges": trimmed.cut_edges}
    earlier = [fields["trimmed"]] if isinstance(fields.get("trimmed"), dict) else []
    return Header({**fields, "trimmed": {**part.as_json(), **facts, **({"before": earlier[0]} if earlier else {})}})


class _Writing:
    def __init__(self, outline: Outline, flags: Flags) -> None:
        self._outline, self._flags = outline, flags
        self.signatures = set(outline.signature[flags].tolist()) & outline.signatures.keys()
        graphs = [outline.graphs[number] for number in self.signatures & outline.graphs.keys()]
        self.signatures.update(number for graph in graphs for number in graph.calls)
        scopes = {number for graph in graphs for number in graph.scope}
        scopes = _scopes(outline, scopes | set(outline.scope[flags].tolist()))
        self._observed = _observed(outline, flags, self.signatures)
        self._numbers: dict[type, set[Any]] = {
            Signature: self.signatures,
            Scope: scopes,
            Context: {outline.scopes[number].context for number in scopes},
            Thread: set(outline.thread[flags].tolist()),
            Values: self._used_values(),
        }
        self._all, self._selected = Counter(outline.signature.tolist()), Counter(outline.signature[flags].tolist())
        starts = outline.start_ns[flags]
        self._first_ns, self._until_ns = int(starts.min(initial=LATEST_NS)), int(starts.max(initial=-LATEST_NS))
        self._place = 0
        self._observed_place = 0
        self._newest = -1
        self._last_ns = 0
        self._written: Counter[int] = Counter()
        self._flags_of_thread: dict[int, Flags] = {}
        self._end = End(0, 0, 0)

    @property
    def end(self) -> End:
        duration = self._end.duration_ns or self._last_ns
        return replace(
            self._end,
            calls=int(self._flags.sum()),
            signatures=len(self.signatures),
            duration_ns=duration,
            step_starts_ns=self._step_starts_ns(),
        )

    def _step_starts_ns(self) -> list[int]:
        starts = self._outline.step_starts_ns
        if not len(starts):
            return []
        steps = StepStarts({None: starts}).steps_of(None, self._outline.start_ns[self._flags])
        step_starts: list[int] = starts[np.unique(steps)].tolist()
        return step_starts

    def of(self, record: Record | CallBlock) -> Record | CallBlock | None:
        match record:
            case Signature() | Scope() | Context() | Thread() | Values():
                return record if record.number in self._numbers[type(record)] else None
            case Observed():
                self._observed_place += 1
                return record if self._observed_place - 1 in self._observed else None
            case Effects():
                return record if record.signature in self.signatures else None
            case Graph() | GraphTimes():
                return record if record.signature in self.signatures else None
            case Kernels():
                return self._kernels(record)
            case CallBlock():
                return self._calls(record)
            case DeviceTimes():
                return self._device_times(record)
            case Wait():
                return record if self._first_ns <= record.at_ns <= self._until_ns else None
            case End():
                self._end = record
        # unfinished calls depend on calls around them, which may be left out
        return None

    def _used_values(self) -> set[int]:
        outline = self._outline
        used = {number for item in self.signatures for number in outline.signatures[item].values}
        used |= {number for item in self.signatures for number in outline.effects.get(item, ())}
        for place in self._observed:
            used |= {number for number in outline.observed[place].values if number is not None}
        return used

    def _calls(self, block: CallBlock) -> CallBlock | None:
        flags = self._flags[self._place : self._place + len(block)]
        self._place += len(block)
        self._last_ns = int((block.start_ns + block.duration_ns).max(initial=self._last_ns))
        if not flags.any():
            return None
        newest, part = self._newest, selected(block, flags)
        self._newest = int(part.storages.max(initial=newest))
        return replace(part, newest=newest)

    def _device_times(self, record: DeviceTimes) -> DeviceTimes | None:
        thread = record.thread
        if thread not in self._flags_of_thread:
            self._flags_of_thread[thread] = self._flags[self._outline.thread == thread]
        of_thread = self._flags_of_thread[thread]
        flags = of_thread[record.first : record.first + len(record.device_ns)].tolist()
        times = list(compress(record.device_ns, flags))
        first = int(np.count_nonzero(of_thread[: record.first]))
        return DeviceTimes(thread, first, times) if times else None

    def _kernels(self, record: Kernels) -> Kernels | None:
        selected, total = self._selected[record.signature], self._all[record.signature]
        if record.signature not in self.signatures:
            return None
        if selected == total:
            return record

        def part(numbers: list[int]) -> list[int]:
            return [-(-number * selected // total) for number in numbers]

        return replace(record, launches=part(record.launches), device_ns=part(record.device_ns))


def _scopes(outline: Outline, used: set[int]) -> set[int]:
    level = used & outline.scopes.keys()
    scopes = set(level)
    while level:
        causes = (outline.scopes[number].forward for number in level)
        level = {number for number in causes if number is not None and number in outline.scopes} - scopes
        scopes |= level
    return scopes


def _observed(outline: Outline, flags: Flags, signatures: set[int]) -> set[int]:
    # a record that describes one call is kept if that call is selected; any other, if its signature is
    memory = _first_memory(outline)
    places = set()
    for place, record in enumerate(outline.observed):
        if record.signature not in signatures:
            continue
        if record.since_ns is None:
            places.add(place)
            continue
        candidates = (outline.signature == record.signature) & (outline.start_ns >= record.since_ns)
        if record.storage is not None:
            candidates &= memory == record.storage
        rows = np.nonzero(candidates)[0]
        if len(rows) and flags[rows[outline.start_ns[rows].argmin()]]:
            places.add(place)
    return places


def _first_memory(outline: Outline) -> np.ndarray[Any, np.dtype[np.int64]]:
    padded = np.append(outline.storages, NO_STORAGE)
    return np.where(outline.tensors > 0, padded[outline.first_storage], NO_STORAGE)
