"""Selection and writing of a part of a trace: calls, and the records that they refer to."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opgrip.cli.command import nearest
from opgrip.cli.option_types import matches
from opgrip.errors import UserError
from opgrip.traces.codec.call_blocks import CallBlock
from opgrip.traces.io.foreign_files import Losses
from opgrip.traces.io.reader import TraceReader
from opgrip.traces.io.tensor_file import HEADER_FIELD
from opgrip.traces.io.writer import TraceWriter
from opgrip.traces.schema.arguments import numbers_of, tensors
from opgrip.traces.schema.json_values import LATEST_NS
from opgrip.traces.schema.operator_arguments import written
from opgrip.traces.schema.records import (
    FUNCTION,
    NO_STORAGE,
    OPERATOR,
    Context,
    DeviceTimes,
    Effects,
    End,
    Graph,
    GraphTimes,
    Header,
    Kernels,
    Observed,
    Record,
    Scope,
    Signature,
    Thread,
    Values,
    Wait,
)
from opgrip.traces.table.call_source import concatenated, or_all, selected
from opgrip.traces.table.profiler_labels import is_mark, is_operator
from opgrip.traces.table.step_starts import StepStarts, reported_starts, step_starts
from opgrip.traces.table.trace import Trace, load

COLUMNS = ("thread", "signature", "scope", "start_ns", "tensors", "storages")


@dataclass(frozen=True, slots=True)
class SignatureOutline:
    kind: str
    op: str
    values: tuple[int, ...]
    written: tuple[bool, ...]


@dataclass(slots=True)
class Outline:
    """Calls of a trace in file order, with the facts that decide which calls are selected.

    storages : storage numbers of the tensors of all calls, call after call
    """

    header: dict[str, Any] = field(default_factory=dict)
    signatures: dict[int, SignatureOutline] = field(default_factory=dict)
    scopes: dict[int, Scope] = field(default_factory=dict)
    observed: list[Observed] = field(default_factory=list)
    effects: dict[int, tuple[int, ...]] = field(default_factory=dict)
    graphs: dict[int, Graph] = field(default_factory=dict)
    thread: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    signature: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    scope: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    start_ns: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    tensors: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    storages: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    step_starts_ns: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    @property
    def first_storage(self) -> NDArray[np.int64]:
        first: NDArray[np.int64] = np.cumsum(self.tensors) - self.tensors
        return first

    def op_of(self, signature: int) -> str:
        item = self.signatures.get(signature)
        return "" if item is None else item.op

    def phase_of(self, scope: int) -> str:
        record = self.scopes.get(scope)
        return "" if record is None else record.phase

    def module_of(self, scope: int) -> str:
        record = self.scopes.get(scope)
        if record is None:
            return ""
        return self.scopes.get(record.forward, record).module if record.forward is not None else record.module


def read_outline(reader: TraceReader, partial: bool) -> Outline:
    outline = Outline()
    end: End | None = None
    pieces: dict[str, list[NDArray[np.int64]]] = {name: [] for name in COLUMNS}
    for record in reader.columns():
        match record:
            case Header():
                outline.header = record.fields
            case Signature():
                outline.signatures[record.number] = _outline(record)
            case Scope():
                outline.scopes[record.number] = record
            case Observed():
                outline.observed.append(record)
            case Effects():
                outline.effects[record.signature] = tuple(_present(numbers_of((record.after, record.random_state))))
            case Graph():
                outline.graphs[record.signature] = record
            case CallBlock():
                tensors_of = or_all(record.tensors, len(record), 0)
                storages = record.storages[: len(record.storages) if len(record.tensors) else 0]
                thread = np.full(len(record), record.thread)
                columns = (thread, record.signature, record.scope, record.start_ns, tensors_of, storages)
                for name, column in zip(COLUMNS, columns, strict=True):
                    pieces[name].append(column)
            case End():
                end = record
    if reader.missing and not partial:
        raise UserError(reader.missing, "trim it with --partial")
    for name in COLUMNS:
        setattr(outline, name, concatenated(pieces.pop(name)))
    if not len(outline.start_ns):
        raise UserError(f"{reader.path} contains no calls", "capture a program that calls operators")
    marks = [number for number, item in outline.signatures.items() if is_mark(item.op)]
    own = outline.start_ns[~np.isin(outline.signature, marks)]
    outline.step_starts_ns = reported_starts(end, int(own.max(initial=0)))
    return outline


def _outline(record: Signature) -> SignatureOutline:
    values = _present(numbers_of([record.args, record.kwargs, record.outputs]))
    flags = written(record) if any(True for _ in tensors([record.args, record.kwargs])) else []
    return SignatureOutline(record.kind, record.op, tuple(values), tuple(flags))


def _present(numbers: list[int | None]) -> Iterator[int]:
    return (number for number in numbers if number is not None)


Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class TracePart:
    """Conditions that select a part of a trace; a selected call meets all of them.

    steps : indices of the first step and of the step after the last one; None for the end of the trace
    phases, modules, ops, labels : shell patterns, of which one must match; empty for all
    time_ns : range of start times, counted from the start of the capture; None for the end of the trace
    """

    steps: tuple[int, int | None] | None = None
    phases: Sequence[str] = ()
    modules: Sequence[str] = ()
    ops: Sequence[str] = ()
    time_ns: tuple[int, int | None] | None = None
    labels: Sequence[str] = ()

    def as_json(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self.__slots__}
        return {name: list(value) for name, value in values.items() if value}


def selected_calls(outline: Outline, part: TracePart, is_labeled: Flags | None = None) -> Flags:
    flags = np.ones(len(outline.start_ns), dtype=np.bool_)
    if part.ops:
        flags &= _matching(outline, part.ops, "op", outline.op_of, outline.signature)
    if part.modules:
        flags &= _matching(outline, part.modules, "module", outline.module_of, outline.scope)
    if part.phases:
        flags &= _matching(outline, part.phases, "phase", outline.phase_of, outline.scope)
    if part.time_ns is not None:
        flags &= within(outline.start_ns, part.time_ns)
    if is_labeled is not None:
        flags &= is_labeled
    if part.steps is not None:
        flags &= _of_steps(outline, part.steps)
    if not flags.any():
        raise UserError("no call matches all conditions", "see opgrip trace info")
    return with_inner_calls(outline, flags)


def _labeled(trace: Trace, labels: Sequence[str]) -> Flags:
    # in file order
    starts = concatenated([block.start_ns for block in trace.source])
    flags = np.empty(len(starts), dtype=np.bool_)
    flags[np.argsort(starts, kind="stable")] = trace.within_labels(lambda label: matches(label, labels))
    return flags


def with_inner_calls(outline: Outline, flags: Flags) -> Flags:
    around = flags & np.isin(outline.signature, [n for n, item in outline.signatures.items() if item.kind != OPERATOR])
    if not around.any():
        return flags
    flags = flags.copy()
    for thread in np.unique(outline.thread[around]):
        begin: int | None = None
        # calls are in order of their ends: inner calls come before outer ones
        for index in np.nonzero(outline.thread == thread)[0][::-1].tolist():
            start = int(outline.start_ns[index])
            if begin is not None and start >= begin:
                flags[index] = True
            else:
                begin = start if around[index] else None
    return flags


def within(starts: NDArray[np.int64], span: tuple[int, int | None]) -> Flags:
    first, end = span
    return (starts >= first) & (True if end is None else starts < end)


def _matching(
    outline: Outline, patterns: Sequence[str], what: str, name_of: Callable[[int], str], numbers: NDArray[np.int64]
) -> Flags:
    names = {int(number): name_of(int(number)) for number in np.unique(numbers)}
    numbers_matched = [number for number, name in names.items() if matches(name, patterns)]
    if not numbers_matched:
        near = ", ".join(map(repr, nearest(patterns[0], sorted(set(names.values()) - {""}))))
        hint = f"the trace has {near}" if near else f"the trace names no {what}"
        raise UserError(f"no {what} matches --{what} {' '.join(patterns)}", hint)
    return np.isin(numbers, numbers_matched)


def _of_steps(outline: Outline, steps: tuple[int, int | None]) -> Flags:
    begins = outline.step_starts_ns.tolist()
    count = outline.header.get("steps", len(begins))
    if type(count) is not int or not 0 < count <= len(outline.start_ns):
        raise UserError("the trace does not record how many steps it has", "select a time span with --time")
    first, end = steps
    if first >= count:
        raise UserError(f"the trace has no step {first}", f"the steps of the trace are 0 to {count - 1}")
    if "steps" in outline.header:
        begins = _beginnings(outline, count)
    until = None if end is None or end >= count else begins[end]
    return within(outline.start_ns, (begins[first] if first else int(outline.start_ns.min()), until))


def _beginnings(outline: Outline, count: int) -> list[int]:
    begins = step_starts(lambda: [(None, outline.scope, outline.signature, outline.start_ns)], {None: count}).begins
    if None not in begins:
        raise UserError(
            "the steps of the trace cannot be separated: no operator was called exactly once per step",
            "use --time instead",
        )
    starts_ns: list[int] = begins[None].tolist()
    return starts_ns


class KeptFlow:
    """For each call, the earlier calls that created or last wrote the memory of its arguments."""

    def __init__(self, outline: Outline) -> None:
        self._order = _own_calls(outline)
        readers, producers = array("q"), array("q")
        writer: dict[int, int] = {}
        first = outline.first_storage
        signatures, counts, storages = outline.signature.tolist(), outline.tensors.tolist(), outline.storages.tolist()
        for index in self._order:
            begin = int(first[index])
            mentioned = storages[begin : begin + counts[index]]
            signature = outline.signatures.get(signatures[index])
            flags = signature.written if signature is not None else ()
            inputs = mentioned[: len(flags)]
            before = {writer[storage] for storage in inputs if storage in writer} - {index}
            producers.extend(sorted(before))
            readers.extend([index] * len(before))
            arguments = {*inputs}
            for place, storage in enumerate(mentioned):
                # a result in the memory of an argument is a view and creates nothing
                makes = flags[place] if place < len(flags) else storage not in arguments and storage not in writer
                if makes and storage != NO_STORAGE:
                    writer[storage] = index
        self._readers = np.frombuffer(readers, dtype=np.int64) if readers else np.empty(0, dtype=np.int64)
        self._producers = np.frombuffer(producers, dtype=np.int64) if producers else np.empty(0, dtype=np.int64)

    def with_producers(self, flags: Flags) -> Flags:
        flags = flags.copy()
        # edges are in order of the readers' starts, and producers come before readers
        for reader, producer in zip(self._readers[::-1].tolist(), self._producers[::-1].tolist(), strict=True):
            if flags[reader]:
                flags[producer] = True
        return flags

    def cut_edges(self, flags: Flags) -> int:
        return int(np.count_nonzero(flags[self._readers] & ~flags[self._producers]))


def _own_calls(outline: Outline) -> list[int]:
    passed = [n for n, item in outline.signatures.items() if item.kind == FUNCTION or is_mark(item.op)]
    inside = [n for n, scope in outline.scopes.items() if scope.inside is not None and not scope.gripped]
    own: NDArray[np.bool_] = ~np.isin(outline.signature, passed) & ~np.isin(outline.scope, inside)
    order = np.argsort(outline.start_ns, kind="stable")
    indices: list[int] = order[own[order]].tolist()
    return indices


@dataclass(frozen=True, slots=True)
class Trimmed:
    """Result of writing a part of a trace.

    producers : number of calls that were added because selected calls read their results, directly or indirectly
    cut_edges : number of times that a call takes memory which an omitted call created or wrote
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
    outline = read_outline(TraceReader(path, unbounded), partial)
    is_labeled = _labeled(load(path, partial, unbounded), part.labels) if part.labels else None
    flags = selected_calls(outline, part, is_labeled)
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
    padded = np.append(outline.storages, NO_STORAGE)
    memory = np.where(outline.tensors > 0, padded[outline.first_storage], NO_STORAGE)
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
