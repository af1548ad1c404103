"""Merge of the traces of several processes into one."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opgrip.errors import UserError
from opgrip.traces.analysis.ranks.alignment import measure_clocks, rank_of
from opgrip.traces.codec.call_blocks import CallBlock
from opgrip.traces.codec.record_forms import to_json
from opgrip.traces.io.reader import TraceReader, read_header
from opgrip.traces.io.shipped_traces import trace_file
from opgrip.traces.io.tensor_file import HEADER_FIELD
from opgrip.traces.io.writer import TraceWriter
from opgrip.traces.schema.arguments import TensorSpec, map_leaves
from opgrip.traces.schema.json_values import LATEST_NS
from opgrip.traces.schema.records import (
    NO_STORAGE,
    Context,
    DeviceTimes,
    Dropped,
    Effects,
    End,
    Entered,
    Graph,
    GraphTimes,
    Header,
    Kernels,
    Observed,
    Scope,
    Signature,
    Thread,
    Values,
    Wait,
    is_graph_launch,
    listed,
)
from opgrip.traces.schema.tensor_specs import map_values
from opgrip.traces.table.accelerators import merge_facts
from opgrip.traces.table.profiler_labels import is_operator


def merge(
    paths: Sequence[Path],
    output: Path,
    force: bool = False,
    partial: bool = False,
    unbounded: bool = False,
    align: bool = True,
) -> tuple[int, int]:
    """Write one trace with the calls of several traces; return its numbers of operator calls and signatures.

    align : True to correct the clocks of ranks by the collectives that they share
    """
    _check_once(paths)
    headers = [read_header(path, unbounded).fields for path in paths]
    for path, header in zip(paths, headers, strict=True):
        if "processes" in header:
            raise UserError(f"{path} is already a merge of several traces", "merge the traces of all processes at once")
    _check_recorded_once(paths, headers)
    starts = [_started(header) for header in headers]
    known_starts = [start for start in starts if start is not None]
    merged = headers[0] | {"processes": headers}
    if known_starts:
        merged["started_unix_ns"] = min(known_starts)
    shifts = [0 if start is None else start - min(known_starts) for start in starts]
    if align and sum(rank is not None for rank in map(rank_of, headers)) > 1:
        clocks = measure_clocks(paths, headers, shifts, unbounded)
        shifts = [shift + clock.offset_ns for shift, clock in zip(shifts, clocks, strict=True)]
        if any(clock.collectives for clock in clocks):
            merged["clocks"] = {"by": "collectives", "processes": [clock.as_json() for clock in clocks]}
    common = Header({name: value for name, value in merged.items() if name not in _OWN})
    try:
        with TraceWriter(output, common, force) as writer:
            join = _Join(writer)
            for process, (path, shift_ns) in enumerate(zip(paths, shifts, strict=True)):
                join.add(TraceReader(path, unbounded), process, shift_ns, partial)
            writer.write(join.end())
    except KeyError as error:
        raise UserError(
            f"one of the traces refers to record {error}, which it does not contain",
            "find the trace with opgrip trace validate, and capture it again",
        ) from error
    return join.operator_calls, len(join.operators)


def _started(header: Mapping[str, Any]) -> int | None:
    start = header.get("started_unix_ns")
    return start if type(start) is int and 0 <= start < LATEST_NS else None


def _check_once(paths: Sequence[Path]) -> None:
    path_of_file: dict[Path, Path] = {}
    for path in paths:
        file = trace_file(path).resolve()
        if file in path_of_file:
            same = "" if path_of_file[file] == path else f", also as {path_of_file[file]}"
            raise UserError(f"{path} is named twice{same}", "name each trace once: its calls would count twice")
        path_of_file[file] = path


def _check_recorded_once(paths: Sequence[Path], headers: Sequence[Mapping[str, Any]]) -> None:
    path_of_recording: dict[tuple[int, int], Path] = {}
    for path, header in zip(paths, headers, strict=True):
        start, process = _started(header), header.get("pid")
        if start is None or type(process) is not int:
            continue
        first = path_of_recording.setdefault((start, process), path)
        if first != path:
            raise UserError(
                f"{path} and {first} are from the same recording", "name one of them: its calls would count twice"
            )


# header fields that are not copied because they describe one trace only; `distilled` contains signature numbers
_OWN = ("format", "version", "rank", "distilled", HEADER_FIELD)


@dataclass(slots=True)
class _Numbers:
    signatures: dict[int, int] = field(default_factory=dict)
    scopes: dict[int, int] = field(default_factory=dict)
    contexts: dict[int, int] = field(default_factory=dict)
    values: dict[int, int] = field(default_factory=dict)
    threads: dict[int, int] = field(default_factory=dict)


class _Join:
    def __init__(self, writer: TraceWriter) -> None:
        self.writer = writer
        self._number_by_record: dict[bytes, int] = {}
        self._counts: Counter[str] = Counter()
        self._newest = self._newest_of_graphs = -1
        self._end = End(0, 0, 0)
        self._running: list[tuple[Entered, _Numbers]] = []
        self.operators: set[int] = set()
        self.operator_calls = 0

    def add(self, reader: TraceReader, process: int, shift_ns: int, partial: bool) -> None:
        numbers, first_storage = _Numbers(), max(self._newest, self._newest_of_graphs) + 1
        for record in reader.columns():
            match record:
                case Signature():
                    # graphs of two files have equal launches, and different calls
                    only_here = is_graph_launch(record.op)
                    number = self._once("signature", self._renumber(record, numbers), only_here)
                    numbers.signatures[record.number] = number
                    if is_operator(record.op, record.kind):
                        self.operators.add(number)
                case Scope():
                    context, forward = record.context, record.forward
                    moved = replace(
                        record,
                        context=None if context is None else numbers.contexts.get(context),
                        forward=None if forward is None else numbers.scopes.get(forward),
                    )
                    numbers.scopes[record.number] = self._once("scope", moved)
                case Context():
                    numbers.contexts[record.number] = self._once("context", record)
                case Observed():
                    self._observed(record, numbers, first_storage, shift_ns)
                case Effects():
                    self._effects(record, numbers)
                case Values():
                    if record.number in numbers.values:
                        self.writer.write(replace(record, number=numbers.values[record.number]))
                    else:
                        numbers.values[record.number] = self._once("values", record)
                case Thread():
                    self._thread(record.number, numbers, process, record.name)
                case CallBlock():
                    thread = self._thread(record.thread, numbers, process)
                    self._calls(replace(record, thread=thread), numbers, first_storage, shift_ns, reader.path)
                case DeviceTimes():
                    self.writer.write(replace(record, thread=self._thread(record.thread, numbers, process)))
                case Graph():
                    self._graph(record, numbers, first_storage)
                case Kernels() | GraphTimes():
                    self.writer.write(replace(record, signature=numbers.signatures[record.signature]))
                case Wait():
                    at_ns, until_ns = record.at_ns + shift_ns, record.until_ns + shift_ns
                    self.writer.write(replace(record, at_ns=at_ns, until_ns=until_ns))
                case Entered():
                    self._entered(record, numbers, process, shift_ns)
                case End():
                    self._add_end(record, shift_ns)
                case Header():
                    pass
        if reader.missing and not partial:
            raise UserError(reader.missing, "merge it with --partial")

    def end(self) -> End:
        self._write_running()
        return replace(self._end, calls=self._counts["calls"], signatures=self._counts["signature"])

    def _once(self, kind: str, record: Any, again: bool = False) -> int:
        text = json.dumps([kind, to_json(replace(record, number=0))], sort_keys=True)
        # the texts themselves would take half a gigabyte for some tens of ranks
        digest = blake2b(text.encode("utf-8", "backslashreplace"), digest_size=16).digest()
        number = self._number_by_record.get(digest)
        if number is None or again:
            number = self._number_by_record[digest] = self._counts[kind]
            self._counts[kind] += 1
            self.writer.write(replace(record, number=number))
        return number

    def _thread(self, number: int, numbers: _Numbers, process: int, name: str = "") -> int:
        if number not in numbers.threads:
            numbers.threads[number] = self._counts["thread"]
            self.writer.write(Thread(self._counts["thread"], name, process))
            self._counts["thread"] += 1
        return numbers.threads[number]

    def _renumber(self, record: Signature, numbers: _Numbers) -> Signature:
        move = self._mover(numbers)
        moved = (map_leaves(move, tree) for tree in (record.args, record.kwargs, record.outputs))
        return replace(record, **dict(zip(("args", "kwargs", "outputs"), moved, strict=True)))

    def _mover(self, numbers: _Numbers) -> Callable[[Any], Any]:
        def move(leaf: Any) -> Any:
            if not isinstance(leaf, TensorSpec):
                return leaf
            return map_values(lambda number: self._value_number(number, numbers), leaf)

        return move

    def _value_number(self, number: int | None, numbers: _Numbers) -> int | None:
        if number is not None and number not in numbers.values:
            # values of tensors on a device come later
            numbers.values[number] = self._counts["values"]
            self._counts["values"] += 1
        return None if number is None else numbers.values[number]

    def _observed(self, record: Observed, numbers: _Numbers, first_storage: int, shift_ns: int) -> None:
        values = [self._value_number(number, numbers) for number in record.values]
        if record.signature in numbers.signatures:
            since_ns = None if record.since_ns is None else record.since_ns + shift_ns
            storage = None if record.storage is None else record.storage + first_storage
            number = numbers.signatures[record.signature]
            self.writer.write(replace(record, signature=number, values=values, since_ns=since_ns, storage=storage))

    def _effects(self, record: Effects, numbers: _Numbers) -> None:
        move = self._mover(numbers)
        moved = replace(
            record,
            signature=numbers.signatures[record.signature],
            after=map_leaves(move, record.after),
            random_state=map_leaves(move, record.random_state),
        )
        self.writer.write(moved)

    def _calls(self, block: CallBlock, numbers: _Numbers, first_storage: int, shift_ns: int, path: Path) -> None:
        latest_ns = int((block.start_ns + block.duration_ns).max(initial=0))
        if max(abs(int(block.start_ns.min(initial=0))), latest_ns) + abs(shift_ns) > LATEST_NS:
            raise UserError(
                f"{path} starts centuries before or after the other traces, so it is damaged", "capture it again"
            )
        storages = block.storages
        if len(storages) and int(storages.max()) + first_storage >= LATEST_NS:
            raise UserError(f"{path} numbers its storages above 2**62, so it is damaged", "capture it again")
        storages = np.where(storages == NO_STORAGE, storages, storages + first_storage)
        moved = replace(
            block,
            signature=_renumbered(block.signature, numbers.signatures),
            scope=_renumbered(block.scope, numbers.scopes),
            start_ns=block.start_ns + shift_ns,
            storages=storages,
            newest=self._newest,
        )
        self.writer.write(moved)
        self._newest = max(self._newest, int(storages.max(initial=NO_STORAGE)))
        self._counts["calls"] += len(block)
        self.operator_calls += int(np.isin(moved.signature, list(self.operators)).sum())

    def _graph(self, record: Graph, numbers: _Numbers, first_storage: int) -> None:
        storages = [number if number == NO_STORAGE else number + first_storage for number in record.storages]
        moved = replace(
            record,
            signature=numbers.signatures[record.signature],
            calls=[numbers.signatures[number] for number in record.calls],
            scope=[numbers.scopes[number] for number in record.scope],
            storages=storages,
        )
        self.writer.write(moved)
        self._newest_of_graphs = max([self._newest_of_graphs, *storages])

    def _entered(self, record: Entered, numbers: _Numbers, process: int, shift_ns: int) -> None:
        # the signature of such a call is written only when one of its calls ends, which may be later or never
        moved = replace(
            record,
            thread=self._thread(record.thread, numbers, process),
            start_ns=record.start_ns + shift_ns,
            scope=numbers.scopes[record.scope],
            opened=None if record.opened is None else self._renumber(record.opened, numbers),
        )
        self._running.append((moved, numbers))

    def _write_running(self) -> None:
        unused = count(self._counts["signature"])
        for record, numbers in self._running:
            if record.signature not in numbers.signatures:
                if record.opened is None:
                    continue
                numbers.signatures[record.signature] = next(unused)
            number = numbers.signatures[record.signature]
            opened = None if record.opened is None else replace(record.opened, number=number)
            self.writer.write(replace(record, signature=number, opened=opened))

    def _add_end(self, record: End, shift_ns: int) -> None:
        end = self._end
        self._end = replace(
            end,
            duration_ns=max(end.duration_ns, record.duration_ns + shift_ns),
            dropped=_sum(end.dropped, record.dropped),
            passed_by=_sum(end.passed_by, record.passed_by),
            without_values=_sum(end.without_values, record.without_values),
            without_work=_sum(end.without_work, record.without_work),
            stopped=end.stopped or record.stopped,
            devices=end.devices | record.devices,
            accelerator=merge_facts(end.accelerator, record.accelerator),
            thinned=dict(Counter(end.thinned) + Counter(record.thinned)),
            contended=max(end.contended, record.contended),
            before=end.before if record.before is None else (end.before or 0) + record.before,
        )


def _renumbered(numbers: NDArray[np.int64], new: Mapping[int, int]) -> NDArray[np.int64]:
    unique, inverse = np.unique(numbers, return_inverse=True)
    return np.array([new[number] for number in unique.tolist()], dtype=np.int64)[inverse.reshape(-1)]


def _sum(*lists: list[Dropped]) -> list[Dropped]:
    counts: Counter[tuple[str, str]] = Counter()
    for item in (item for items in lists for item in items):
        counts[item.op, item.reason] += item.count
    return listed(counts)
