"""Blocks of calls as columns of numpy, to and from the lines of the file."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from opgrip.traces.codec.integer_text import Integers, parse_integers
from opgrip.traces.codec.json_values import LATEST_NS, LIMIT
from opgrip.traces.schema.records import NO_STORAGE, Calls

FAR = 999
"""Storages that are older than so many are written by their number."""


def encode_storages(numbers: Sequence[int] | NDArray[np.int64], newest: int) -> list[int]:
    """Numbers of storages as a block holds them, so that a loop's rounds read the same.

    A positive code is that much more than the largest number so far; 0 to `1 - FAR` is that much less than it; `-FAR`
    is `NO_STORAGE`; a lower code c is the number `-FAR - 1 - c`.
    """
    own = np.asarray(numbers, dtype=np.int64)
    # the largest before each
    largest = np.maximum.accumulate(np.concatenate([[newest], own]))[:-1]
    distance = largest - own
    near = np.where(distance < FAR, -distance, -FAR - 1 - own)
    codes: list[int] = np.where(own == NO_STORAGE, -FAR, near).tolist()
    return codes


def decode_storages(codes: list[int], newest: int) -> list[int]:
    """The numbers that `encode_storages` was given."""
    numbers = []
    for code in codes:
        if code > 0:
            newest += code
            numbers.append(newest)
        elif code > -FAR:
            numbers.append(newest + code)
        else:
            numbers.append(NO_STORAGE if code == -FAR else -FAR - 1 - code)
    return numbers


def decode_codes(codes: Integers, largest: Integers) -> Integers:
    """The same of arrays, (N,).

    Parameters
    ----------
    largest : the largest number so far, each time with that of the code
    """
    numbers = np.where(codes <= -FAR, -FAR - 1 - codes, largest + np.minimum(codes, 0))
    numbers[codes == -FAR] = NO_STORAGE
    return numbers


NONE: Integers = np.empty(0, dtype=np.int64)
Fields: TypeAlias = dict[str, bytes]
"""The text of each field of a line; of columns without their brackets."""
_COLUMNS = ("signature", "scope", "after_ns", "duration_ns")
_OPTIONAL_COLUMNS = ("tensors", "storages", "device_ns", "streams")
_NUMBERS = ("thread", "start_ns", "newest")
_PAIRS = ("page_faults", "perturbed", "slow_memory")
_NAMES = {name.encode(): name for names in (_COLUMNS, _OPTIONAL_COLUMNS, _NUMBERS, _PAIRS) for name in names}
_ARRAYS = ("signature", "scope", "start_ns", "duration_ns", *_OPTIONAL_COLUMNS)
_NEEDED = {"thread", "start_ns", *_COLUMNS}
_PREFIX = b'{"type":"calls",'
_ENDS = (b",", b"}")
"""What follows the value of a field, and of the last one."""
_NUMBER = re.compile(rb"-?(?:0|[1-9]\d{0,17})")
_LIST_OF_PAIRS = re.compile(rb"\[(?:\[\d{1,9},\d{1,15}\](?:,\[\d{1,9},\d{1,15}\])*)?\]")


def _none() -> Integers:
    return NONE


@dataclass(frozen=True, slots=True)
class CallBlock:
    """Calls of one thread in the order in which they ended: what `Calls` holds, in arrays of int64.

    Attributes
    ----------
    signature, scope, start_ns, duration_ns : (N,)
    tensors, device_ns, streams : (N,), or (0,) where the block tells nothing of them
    storages : (sum of `tensors`,)
    newest, page_faults, perturbed, slow_memory : as `Calls` has them
    """

    thread: int
    signature: Integers
    scope: Integers
    start_ns: Integers
    duration_ns: Integers
    tensors: Integers = field(default_factory=_none)
    storages: Integers = field(default_factory=_none)
    newest: int = NO_STORAGE
    device_ns: Integers = field(default_factory=_none)
    page_faults: list[tuple[int, int]] = field(default_factory=list)
    streams: Integers = field(default_factory=_none)
    perturbed: list[tuple[int, int]] = field(default_factory=list)
    slow_memory: list[tuple[int, int]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.signature)


def block_of(record: Calls) -> CallBlock:
    """A record of calls as columns."""

    def column(numbers: list[int]) -> Integers:
        return np.asarray(numbers, dtype=np.int64)

    return CallBlock(
        thread=record.thread,
        signature=column(record.signature),
        scope=column(record.scope),
        start_ns=column(record.start_ns),
        duration_ns=column(record.duration_ns),
        tensors=column(record.tensors),
        storages=column(record.storages),
        newest=record.newest,
        device_ns=column(record.device_ns),
        page_faults=record.page_faults,
        streams=column(record.streams),
        perturbed=record.perturbed,
        slow_memory=record.slow_memory,
    )


def record_of(block: CallBlock) -> Calls:
    """Columns as a record of calls."""
    return Calls(
        *(block.thread, block.signature.tolist(), block.scope.tolist(), block.start_ns.tolist()),
        *(block.duration_ns.tolist(), block.tensors.tolist(), block.storages.tolist(), block.newest),
        *(block.device_ns.tolist(), block.page_faults, block.streams.tolist(), block.perturbed),
        block.slow_memory,
    )


def perturbed_flags(runs: Sequence[tuple[int, int]], calls: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Of each call of a block, whether it was perturbed.

    Parameters
    ----------
    runs : as a block's `perturbed`
    calls : of the block
    """
    if not runs:
        return np.zeros(calls, dtype=np.bool_)
    # at their ends alone: the runs of a stranger's file may all lie over each other
    changes = np.zeros(calls + 1, dtype=np.int64)
    for place, count in runs:
        changes[place] += 1
        changes[min(place + count, calls)] -= 1
    return np.cumsum(changes[:-1]) > 0


def exact_sum(column: Integers) -> int:
    """The sum of a column, which can be more than 64 bits hold."""
    return int(column.sum()) if _farthest(column, 0) < LIMIT else sum(column.tolist())


def parse_block(line: bytes) -> CallBlock | None:
    """The block of a line that is written as captures write it; None for any other line, and for one with a fault.

    What this gives is what `calls_from_json` makes of the line, and what it does not take is for that to read, or to
    say what is wrong with it.
    """
    fields = block_fields(line)
    blocks = None if fields is None else parse_blocks([fields])
    return None if blocks is None else blocks[0]


def block_fields(line: bytes) -> Fields | None:
    """The text of each field of a block; None where the line is not one that a capture writes."""
    if not line.startswith(_PREFIX):
        return None
    parts = line.split(b'"')
    if (
        not len(parts) % 2
        or parts[4] != b","
        or any(part.endswith(b"}") for part in parts[:-1])
        or not parts[-1].endswith(b"}")
    ):
        return None
    fields: Fields = {}
    for quoted, between in zip(parts[5::2], parts[6::2], strict=True):
        name = _NAMES.get(quoted)
        if name is None or name in fields or not between.startswith(b":") or not between.endswith(_ENDS):
            return None
        value = between[1:-1]
        if name in _NUMBERS:
            if not _NUMBER.fullmatch(value):
                return None
        elif name in _PAIRS:
            if not _LIST_OF_PAIRS.fullmatch(value):
                return None
        elif not value.startswith(b"[") or not value.endswith(b"]"):
            return None
        else:
            value = value[1:-1]
        fields[name] = value
    return fields if fields.keys() >= _NEEDED else None


def parse_blocks(lines: Sequence[Fields]) -> list[CallBlock] | None:
    """The blocks of lines, all decoded at once; None where there is a fault in any of them."""
    columns = _parse_columns(lines)
    if columns is None:
        return None
    calls = columns.counts["signature"]
    if not all(calls) or not _go_together(columns.counts):
        return None
    starts = _starts([int(fields["start_ns"]) for fields in lines], columns)
    newest = [int(fields.get("newest", NO_STORAGE)) for fields in lines]
    storages = _storages(newest, columns)
    pairs = {name: [_pairs(fields.get(name)) for fields in lines] for name in _PAIRS}
    if starts is None or storages is None:
        return None
    if any(place >= end for lists in pairs.values() for own, end in zip(lists, calls, strict=True) for place, _ in own):
        return None
    parts = columns.split | {
        "start_ns": _split(starts, calls),
        "storages": _split(storages, columns.counts["storages"]),
    }
    return [
        CallBlock(
            thread=int(fields["thread"]),
            newest=newest[place],
            page_faults=pairs["page_faults"][place],
            perturbed=pairs["perturbed"][place],
            slow_memory=pairs["slow_memory"][place],
            **{name: parts[name][place] for name in _ARRAYS},
        )
        for place, fields in enumerate(lines)
    ]


@dataclass(frozen=True, slots=True)
class _Columns:
    """Columns of some lines, one line after the other.

    Attributes
    ----------
    whole : each column of all lines; of those that no line has, an empty one
    counts : by column, the numbers of each line
    """

    whole: dict[str, Integers]
    counts: dict[str, list[int]]

    @property
    def split(self) -> dict[str, list[Integers]]:
        """By column, that of each line."""
        return {name: _split(column, self.counts[name]) for name, column in self.whole.items()}


def _parse_columns(lines: Sequence[Fields]) -> _Columns | None:
    texts: list[bytes] = []
    counts: dict[str, list[int]] = {}
    for name in (*_COLUMNS, *_OPTIONAL_COLUMNS):
        of_lines = [fields.get(name, b"") for fields in lines]
        counts[name] = [text.count(b",") + 1 if text else 0 for text in of_lines]
        texts += filter(None, of_lines)
    numbers = parse_integers(b",".join(texts)) if texts else NONE
    if numbers is None:
        return None
    ends = [*accumulate(map(sum, counts.values()))]
    whole = {name: numbers[end - sum(counts[name]) : end] for name, end in zip(counts, ends, strict=True)}
    return _Columns(whole, counts)


def _go_together(counts: Mapping[str, list[int]]) -> bool:
    """Whether the columns of each line are as long as each other, as far as it has them."""
    calls = counts["signature"]
    if any(counts[name] != calls for name in _COLUMNS):
        return False
    optional = (zip(counts[name], calls, strict=True) for name in ("tensors", "device_ns", "streams"))
    return all(count in (0, number) for pairs in optional for count, number in pairs)


def _starts(first_ns: Sequence[int], columns: _Columns) -> Integers | None:
    """When calls started; None where one is too far away or ends before it starts."""
    after, durations = columns.whole["after_ns"], columns.whole["duration_ns"]
    if _farthest(after, max(map(abs, first_ns))) > LATEST_NS or durations.min() < 0:
        return None
    starts = _sums(after, columns.counts["after_ns"], first_ns)
    return starts if int((starts + durations).max()) <= LATEST_NS else None


def _storages(newest: Sequence[int], columns: _Columns) -> Integers | None:
    """The memory of calls' tensors; None where there is not as much of it as there are tensors."""
    codes, tensors = columns.whole["storages"], columns.whole["tensors"]
    if _farthest(codes, max(map(abs, newest))) > LATEST_NS or (len(tensors) and tensors.min() < 0):
        return None
    # sums that are larger than any number of storages could pass for a small one
    if _farthest(tensors, 0) >= LIMIT:
        return None
    if len(tensors):
        ends = np.cumsum(columns.counts["tensors"])
        until = np.concatenate([[0], np.cumsum(tensors)])
        own = until[ends] - until[ends - columns.counts["tensors"]]
        has_tensors = np.asarray(columns.counts["tensors"]) > 0
        if np.any(has_tensors & (own != columns.counts["storages"])):
            return None
    return decode_codes(codes, _sums(np.maximum(codes, 0), columns.counts["storages"], newest))


def _sums(steps: Integers, counts: Sequence[int], firsts: Sequence[int]) -> Integers:
    """In each line, the sums of its first number and its steps so far."""
    sums: Integers = np.cumsum(steps)
    ends = np.cumsum(counts)
    # what the lines before add
    before = np.concatenate([[0], sums])[ends - counts]
    sums += np.repeat(np.asarray(firsts, dtype=np.int64) - before, counts)
    return sums


def _split(column: Integers, counts: Sequence[int]) -> list[Integers]:
    # an empty part of a column would keep all of it in memory
    return [column[end - count : end] if count else NONE for end, count in zip(accumulate(counts), counts, strict=True)]


def _pairs(text: bytes | None) -> list[tuple[int, int]]:
    return [] if text is None else [(place, count) for place, count in json.loads(text)]


def _farthest(steps: Integers, start: int) -> int:
    """A bound of how far from 0 one can come that goes so many steps from `start`."""
    return max(int(steps.max()), -int(steps.min())) * len(steps) + abs(start) if len(steps) else abs(start)


def encode_block(block: CallBlock) -> bytes:
    """The line that `encode_line` makes of the same calls as a record."""
    starts = block.start_ns
    parts = [
        f'{{"type":"calls","thread":{block.thread},"start_ns":{int(starts[0]) if len(starts) else 0}',
        *(f'"{name}":{_text(column)}' for name, column in (("signature", block.signature), ("scope", block.scope))),
        f'"after_ns":{_text(np.diff(starts, prepend=starts[:1]))}',
        f'"duration_ns":{_text(block.duration_ns)}',
        f'"tensors":{_text(block.tensors)}',
        f'"newest":{block.newest}',
        f'"storages":{_plain(encode_storages(block.storages, block.newest))}',
    ]
    if len(block.device_ns):
        parts.append(f'"device_ns":{_text(block.device_ns)}')
    if block.page_faults:
        parts.append(f'"page_faults":{_plain([list(pair) for pair in block.page_faults])}')
    if block.streams.any():
        parts.append(f'"streams":{_text(block.streams)}')
    if block.perturbed:
        parts.append(f'"perturbed":{_plain([list(pair) for pair in block.perturbed])}')
    if block.slow_memory:
        parts.append(f'"slow_memory":{_plain([list(pair) for pair in block.slow_memory])}')
    return f"{','.join(parts)}}}\n".encode()


def _text(column: NDArray[np.int64]) -> str:
    return _plain(column.tolist())


def _plain(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
