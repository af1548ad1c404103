"""Writer of a trace to a Parquet file with one row per call, whose arguments are one line of text.

Names are looked up for many rows at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray

from opgrip.cli.plugins import needed
from opgrip.traces.codec.call_blocks import CallBlock, block_of, perturbed_flags, record_of
from opgrip.traces.codec.record_forms import to_json
from opgrip.traces.formats.parquet_files import MARK
from opgrip.traces.schema.arguments import TensorSpec, encode
from opgrip.traces.schema.records import Calls, Header, Record, Scope, Signature, Thread
from opgrip.traces.schema.tensor_specs import plain_name, tensor_outline
from opgrip.traces.table.call_source import concatenated
from opgrip.traces.table.step_starts import StepStarts

MOST_OUTLINE = 1000  # maximum number of characters of a call's arguments


def outline(signature: Signature) -> str:
    """Return the arguments of a call as short text, such as `float32[2,3], 1, alpha=2`."""
    named = (f"{name}={_outline(value)}" for name, value in signature.kwargs.items())
    text = ", ".join([*map(_outline, signature.args), *named])
    return text if len(text) <= MOST_OUTLINE else f"{text[: MOST_OUTLINE - 1]}…"


def _outline(value: Any) -> str:
    match value:
        case TensorSpec():
            return tensor_outline(value.dtype, value.shape)
        case list() | tuple():
            return f"[{', '.join(map(_outline, value))}]"
        case None | bool() | int() | float() | str():
            return repr(value)
        case torch.dtype() | torch.layout() | torch.memory_format() | torch.device():
            return plain_name(value)
    return json.dumps(encode(value))


ALONE = b"opgrip.records"  # metadata key under which the records of a trace without calls are stored
NUMBERS = ("signature", "scope", "start_ns", "duration_ns", "device_ns", "stream")  # columns from which a trace is read
STORAGES = "storages"
RECORDS = "records"
OF_SIGNATURE = ("op", "kind", "arguments")
OF_SCOPE = ("module", "function", "file", "line", "phase", "inside")
OF_BLOCK = ("thread", "process", "rank")
GROUP = 1 << 17  # number of calls written at a time

Integers = NDArray[np.int64]


@dataclass(slots=True)
class _Group:
    """Rows that are not written yet. Each column is a list of arrays, one for each block of calls.

    numbers : the columns of integers, by name
    threads, lengths : thread and number of calls of each block
    texts : records that are stored with each block, as text
    """

    rows: int = 0
    numbers: dict[str, list[Integers]] = field(default_factory=lambda: {name: [] for name in NUMBERS})
    steps: list[Integers] = field(default_factory=list)
    tensors: list[Integers] = field(default_factory=list)
    storages: list[Integers] = field(default_factory=list)
    perturbed: list[NDArray[np.bool_]] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)


class ParquetTable:
    """A Parquet file that is being written. The latest block stays in memory until the records after it are known.

    steps : start times of the steps of each process; None if the trace does not have them
    """

    def __init__(self, file: IO[bytes], steps: StepStarts | None = None) -> None:
        self._arrow = needed("pyarrow")
        self._parquet = needed("pyarrow.parquet")
        self._file = file
        self._steps = steps
        self._writer: Any = None
        self._group = _Group()
        self._lines: list[str] = []
        self._block: CallBlock | None = None
        self._ranks: list[int | None] = []
        self._signatures: dict[int, tuple[str, str, str]] = {}
        self._scopes: dict[int, Scope] = {}
        self._threads: dict[int, Thread] = {}

    def add(self, record: Record | CallBlock) -> None:
        match record:
            case Header():
                self._ranks = ranks_of(record.fields)
            case Signature():
                self._signatures[record.number] = (record.op, record.kind, outline(record))
            case Scope():
                self._scopes[record.number] = record
            case Thread():
                self._threads[record.number] = record
        if isinstance(record, Calls):
            record = block_of(record)
        if not isinstance(record, CallBlock):
            form = to_json(record)
        else:
            form = self._begin_block(record) if len(record) else to_json(record_of(record))
        self._lines.append(json.dumps(form, allow_nan=False, separators=(",", ":")))

    def close(self) -> None:
        self._end_block()
        if self._group.rows or self._writer is None:
            self._write()
        self._writer.close()

    def _begin_block(self, record: CallBlock) -> dict[str, Any]:
        """Keep a block in memory, and return the members that the column `records` stores for it."""
        self._end_block()
        self._block = record
        form: dict[str, Any] = {
            "type": "calls",
            "rows": len(record),
            "thread": record.thread,
            "newest": record.newest,
            "device_ns": bool(len(record.device_ns)),
            "tensors": bool(len(record.tensors)),
        }
        pairs = {name: getattr(record, name) for name in ("page_faults", "perturbed", "slow_memory")}
        return form | {name: values for name, values in pairs.items() if values}

    def _end_block(self) -> None:
        """Add the calls of the block in memory to the rows, together with the other records that belong to it."""
        block = self._block
        if block is None:
            return
        group, count = self._group, len(block)
        none = np.full(count, -1, dtype=np.int64)
        for name in ("signature", "scope", "start_ns", "duration_ns"):
            group.numbers[name].append(getattr(block, name))
        group.numbers["device_ns"].append(block.device_ns if len(block.device_ns) else none)
        group.numbers["stream"].append(block.streams if len(block.streams) else np.zeros_like(none))
        group.tensors.append(block.tensors if len(block.tensors) else none)
        group.storages.append(block.storages if len(block.tensors) else none[:0])
        group.perturbed.append(perturbed_flags(block.perturbed, len(block)))
        if self._steps is not None:
            group.steps.append(self._steps.steps_of(self._process(block.thread), group.numbers["start_ns"][-1]))
        group.threads.append(block.thread)
        group.lengths.append(count)
        group.texts.append("\n".join(self._lines))
        group.rows += count
        self._lines.clear()
        self._block = None
        if group.rows >= GROUP:
            self._write()

    def _process(self, thread: int) -> int | None:
        record = self._threads.get(thread)
        return None if record is None else record.process

    def _write(self) -> None:
        arrow, columns = self._arrow, self._columns()
        if self._writer is None:
            notes = {MARK: b"1"}
            if not self._group.rows:
                notes[ALONE] = "\n".join(self._lines).encode("utf-8", "backslashreplace")
            fields = [arrow.field(name, column.type) for name, column in columns.items()]
            schema = arrow.schema(fields, metadata=notes)
            # dictionaries of numbers that hardly repeat take time and do not reduce the size
            coded = [name for name in columns if name not in ("start_ns", "duration_ns", "device_ns")]
            self._writer = self._parquet.ParquetWriter(
                self._file, schema, compression="zstd", use_dictionary=[*coded, f"{STORAGES}.list.element"]
            )
        self._writer.write_table(arrow.table(list(columns.values()), names=list(columns)))
        self._group = _Group()

    def _columns(self) -> dict[str, Any]:
        arrow, group = self._arrow, self._group
        numbers = {name: concatenated(pieces) for name, pieces in group.numbers.items()}
        device_ns = numbers.pop("device_ns")
        columns = {name: arrow.array(column) for name, column in numbers.items()}
        columns["device_ns"] = arrow.array(device_ns, mask=device_ns < 0)
        steps = concatenated(group.steps) if group.steps else np.full(group.rows, -1, dtype=np.int64)
        columns["step"] = arrow.array(steps, mask=steps < 0)
        columns |= self._named(numbers["signature"], OF_SIGNATURE, self._of_signature)
        columns |= self._named(numbers["scope"], OF_SCOPE, self._of_scope)
        thread = np.repeat(_integers(group.threads), group.lengths)
        columns |= self._named(thread, OF_BLOCK, self._of_thread)
        columns["perturbed"] = arrow.array(np.concatenate(group.perturbed or [np.empty(0, dtype=np.bool_)]))
        columns[STORAGES] = self._storages()
        columns[RECORDS] = self._records()
        return columns

    def _storages(self) -> Any:
        """Return the column of storage numbers, a list for each call; null for calls of a block without storages."""
        arrow = self._arrow
        tensors = concatenated(self._group.tensors)
        ends = np.concatenate([[0], np.cumsum(np.maximum(tensors, 0))]).astype(np.int32)
        offsets = arrow.array(ends, mask=np.append(tensors < 0, False))
        return arrow.ListArray.from_arrays(offsets, arrow.array(concatenated(self._group.storages)))

    def _records(self) -> Any:
        """Return the column of records between blocks; a text is in the row of the first call of its block."""
        group = self._group
        lengths = _integers(group.lengths)
        places = np.full(group.rows, -1, dtype=np.int64)
        places[np.cumsum(lengths) - lengths] = np.arange(len(lengths))
        texts = self._arrow.array(group.texts, self._arrow.string())
        return texts.take(self._arrow.array(places, mask=places < 0))

    def _named(self, numbers: Integers, names: Sequence[str], of: Callable[[int], Sequence[Any]]) -> dict[str, Any]:
        """Return the columns `names`, whose values `of` looks up by the number in each row."""
        arrow = self._arrow
        unique, inverse = np.unique(numbers, return_inverse=True)
        rows = [of(number) for number in unique.tolist()]
        indices = arrow.array(inverse.reshape(-1).astype(np.int32))
        columns: Mapping[str, list[Any]] = {name: [row[place] for row in rows] for place, name in enumerate(names)}
        types = {name: arrow.int64() if name in ("line", "process", "rank") else arrow.string() for name in names}
        return {name: arrow.array(values, types[name]).take(indices) for name, values in columns.items()}

    def _of_signature(self, number: int) -> Sequence[Any]:
        return self._signatures.get(number, ("", "", ""))

    def _of_scope(self, number: int) -> Sequence[Any]:
        scope = self._scopes.get(number)
        if scope is None:
            return ("", "", "", 0, "", None)
        # like `Trace.calls`: a backward call belongs to the module of its forward call
        origin = self._scopes.get(scope.forward, scope) if scope.forward is not None else scope
        return (origin.module, origin.function, origin.file, origin.line, scope.phase, scope.inside)

    def _of_thread(self, number: int) -> Sequence[Any]:
        record = self._threads.get(number)
        if record is None:
            return (str(number), None, self._rank(None))
        return (record.name, record.process, self._rank(record.process))

    def _rank(self, process: int | None) -> int | None:
        place = process or 0
        return self._ranks[place] if 0 <= place < len(self._ranks) else None


def ranks_of(header: Mapping[str, Any]) -> list[int | None]:
    """Return the rank of each process in a trace's header; None for a process without rank."""
    processes = header.get("processes")
    headers = processes if isinstance(processes, list) else [header]
    ranks = [item.get("rank") if isinstance(item, dict) else None for item in headers]
    return [rank if type(rank) is int and 0 <= rank < 1 << 31 else None for rank in ranks]


def _integers(values: Sequence[int]) -> Integers:
    return np.asarray(values, dtype=np.int64)
