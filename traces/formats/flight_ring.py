"""Reader of ring files: the last calls of a process that died before its flight recorder could write a trace.

A ring file is mapped into memory and written by `opgrip.capture.writing.flight_recorder`. It begins with `MAGIC`. Then
come chunks, each of four little-endian 64-bit integers and a payload that is padded to 8 bytes. The first integer is
the kind; it is written last, so that a chunk that a dying process did not complete looks like the end of the file.

    kind     further integers            payload
    START    calls to keep, start of     none
             the capture in ns, number
             of earlier calls
    LINES    bytes                       records of a trace, the header first, as JSON lines
    PAIRS    number of pairs             for each pair: its number, signature, scope and number of tensors
    CALLS    thread, calls, storages     for each call: pair, start, end and autograd's sequence number;
                                         then each call's number of tensors; then their storages
    RUNNING  bytes                       the calls that had not ended, as JSON lines

The file lacks data that are only known when a trace is written: device times, page faults and perturbed calls.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opgrip.cli.output_files import Damage
from opgrip.errors import FormatError
from opgrip.traces.codec.record_forms import from_json
from opgrip.traces.io.foreign_files import ForeignFile, Format, formats
from opgrip.traces.schema.arguments import tensors
from opgrip.traces.schema.json_values import check_nesting
from opgrip.traces.schema.records import Calls, Entered, Header, Record, Scope, Signature

MAGIC = b"opgrip flight ring 1".ljust(31) + b"\n"
START, LINES, PAIRS, CALLS, RUNNING = range(1, 6)
HEAD = 4  # number of integers before a chunk's payload
COLUMNS = 4  # number of integers per call, in addition to the integers for its tensors
MOST = 1 << 40  # maximum plausible number of calls or bytes

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Block:
    thread: int
    calls: Integers
    tensors: Integers
    storages: Integers


@dataclass(slots=True)
class _Ring:
    last: int = 0
    started_ns: int = 0
    before: int = 0
    lines: list[bytes] = field(default_factory=list)
    running: bytes = b""
    pairs: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    blocks: list[_Block] = field(default_factory=list)


def _read(file: ForeignFile) -> Iterator[Record]:
    ring = _parse(b"".join(file.chunks()))
    records = [_record(line) for line in b"".join(ring.lines).splitlines()]
    if not records or not isinstance(records[0], Header):
        raise Damage("its first record is not a header")
    ends = np.concatenate([block.calls[:, 2] for block in ring.blocks] or [np.zeros(0, dtype=np.int64)])
    surplus = max(0, len(ends) - ring.last)
    oldest_ns = int(np.partition(ends, surplus)[surplus]) if surplus else int(ends.min(initial=0))
    flight = {"last": ring.last, "before": ring.before + int((ends < oldest_ns).sum())}
    yield replace(records[0], fields={**records[0].fields, "flight": flight})
    yield from (record for record in records[1:] if record is not None and not isinstance(record, Header))
    scopes = _ForwardScopes(ring, [record for record in records if record is not None])
    newest = -1
    for block in ring.blocks:
        first = int(np.searchsorted(block.calls[:, 2], oldest_ns))
        if first < len(block.calls):
            calls, new_scopes = scopes.calls(block, first, newest)
            newest = max(newest, *calls.storages, -1)
            yield from new_scopes
            yield calls
    yield from (record for line in ring.running.splitlines() if isinstance(record := _record(line), Entered))
    raise Damage("its process ended before the recording did")


def _parse(data: bytes) -> _Ring:
    ring, position = _Ring(), len(MAGIC)
    while position + 8 * HEAD <= len(data):
        kind, *numbers = np.frombuffer(data, "<i8", HEAD, position).tolist()
        position += 8 * HEAD
        if kind == 0:
            break
        if min(numbers) < 0 or max(numbers) > max(MOST, numbers[1] if kind == START else 0):
            raise Damage("a chunk has a negative or too large size")
        if kind == START:
            ring.last, ring.started_ns, ring.before = numbers
            continue
        size = {PAIRS: 32 * numbers[0], CALLS: 8 * (COLUMNS + 1) * numbers[1] + 8 * numbers[2]}.get(kind, numbers[0])
        if position + size > len(data):
            raise Damage("its last chunk is cut")
        _add_chunk(ring, kind, numbers, data[position : position + size])
        position += -(-size // 8) * 8
    return ring


def _add_chunk(ring: _Ring, kind: int, numbers: list[int], payload: bytes) -> None:
    if kind == LINES:
        ring.lines.append(payload)
    elif kind == RUNNING:
        ring.running = payload
    elif kind == PAIRS:
        rows = np.frombuffer(payload, "<i8").reshape(-1, 4).tolist()
        ring.pairs.update((number, (signature, scope, count)) for number, signature, scope, count in rows)
    elif kind == CALLS:
        thread, count, storages = numbers
        values = np.frombuffer(payload, "<i8")
        calls = values[: COLUMNS * count].reshape(-1, COLUMNS)
        tensor_counts, flows = values[COLUMNS * count :][:count], values[(COLUMNS + 1) * count :]
        is_whole = ring.pairs.keys() >= set(calls[:, 0].tolist()) and int(tensor_counts.sum()) == storages
        if not is_whole or tensor_counts.min(initial=0) < 0 or (np.diff(calls[:, 2]) < 0).any():
            raise Damage(
                "a chunk has calls with unknown signatures, in the wrong order, or with the wrong number of tensors"
            )
        ring.blocks.append(_Block(thread, calls, tensor_counts, flows))


def _record(line: bytes) -> Record | None:
    try:
        form: Any = json.loads(line)
        check_nesting(line, form)
        return from_json(form)
    except (ValueError, RecursionError, FormatError, AttributeError, TypeError, KeyError) as error:
        raise Damage(f"a line is not a record of a trace: {line[:60].decode(errors='replace')!r}") from error


class _ForwardScopes:
    def __init__(self, ring: _Ring, records: list[Record]) -> None:
        self._ring = ring
        self._scopes = {record.number: record for record in records if isinstance(record, Scope)}
        self._backward: dict[tuple[int, int], int] = {}
        self._new: list[Scope] = []
        differentiable = {
            record.number
            for record in records
            if isinstance(record, Signature)
            and any(spec.requires_grad for spec in tensors((record.args, record.kwargs)))
        }
        self._forward: dict[int, dict[int, int]] = {}
        for block in ring.blocks:
            forward, last = self._forward.setdefault(block.thread, {}), None
            for pair, sequence in block.calls[block.calls[:, 3] >= 0][:, [0, 3]].tolist():
                signature, scope, _ = ring.pairs[pair]
                # the autograd node is created, and its sequence number taken, before the operator is seen
                if last is not None and sequence != last and signature in differentiable:
                    forward[sequence - 1] = scope
                last = sequence

    def calls(self, block: _Block, first: int, newest: int) -> tuple[Calls, list[Scope]]:
        rows, self._new = block.calls[first:], []
        pairs = [self._ring.pairs[pair] for pair in rows[:, 0].tolist()]
        scopes = [self._scope(pair[1], sequence) for pair, sequence in zip(pairs, rows[:, 3].tolist(), strict=True)]
        storages = block.storages[int(block.tensors[:first].sum()) :].tolist()
        starts, durations = (rows[:, 1] - self._ring.started_ns).tolist(), (rows[:, 2] - rows[:, 1]).tolist()
        signatures, counts = [pair[0] for pair in pairs], block.tensors[first:].tolist()
        return Calls(block.thread, signatures, scopes, starts, durations, counts, storages, newest), self._new

    def _scope(self, scope: int, sequence: int) -> int:
        scopes = [numbers[-1 - sequence] for numbers in self._forward.values() if -1 - sequence in numbers]
        if sequence >= 0 or len(scopes) != 1 or scopes[0] not in self._scopes or scope not in self._scopes:
            return scope
        number = self._backward.get((scope, scopes[0]))
        if number is None:
            number = self._backward[scope, scopes[0]] = 1 + max(self._scopes)
            record = replace(self._scopes[scope], number=number, forward=scopes[0])
            self._scopes[number] = record
            self._new.append(record)
        return number


formats.register("ring")(
    Format(
        "the last calls of a process that died, from its flight recorder",
        lambda head: head.start.startswith(MAGIC),
        _read,
    )
)
