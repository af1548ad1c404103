"""Blocks of calls as numpy columns, and their lines in the file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from operator import sub
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from opgrip.errors import FormatError
from opgrip.traces.schema.json_values import LATEST_NS, LIMIT, Count, Int64, Json, convert
from opgrip.traces.schema.records import NO_STORAGE, Calls

Integers: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
NONE: Integers = np.empty(0, dtype=np.int64)

FAR = 999  # distance to the newest storage number from which on absolute numbers are written


def encode_storages(numbers: Sequence[int] | NDArray[np.int64], newest: int) -> list[int]:
    """Return codes for storage numbers.

    A code above `-FAR` is the difference to the largest number so far. `-FAR` means `NO_STORAGE`. A lower code c means
    the number `-FAR - 1 - c` itself.

    newest : largest storage number in earlier blocks
    """
    own = np.asarray(numbers, dtype=np.int64)
    # the largest number before each one
    largest = np.maximum.accumulate(np.concatenate([[newest], own]))[:-1]
    distance = largest - own
    near = np.where(distance < FAR, -distance, -FAR - 1 - own)
    codes: list[int] = np.where(own == NO_STORAGE, -FAR, near).tolist()
    return codes


def decode_storages(codes: list[int], newest: int) -> list[int]:
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


_ARRAYS = ("signature", "scope", "start_ns", "duration_ns", "tensors", "storages", "device_ns", "streams")
_PAIRS = ("page_faults", "perturbed", "slow_memory")


@dataclass(frozen=True, slots=True)
class CallBlock:
    """A `Calls` record as int64 arrays: N calls of one thread in the order in which they ended.

    tensors, device_ns, streams : (N,), or (0,) if the block omits them; `tensors` is the number of each call's tensors
    storages : (sum of `tensors`,), storage numbers of these tensors, call after call
    newest : largest storage number in earlier blocks
    """

    thread: int
    signature: Integers
    scope: Integers
    start_ns: Integers
    duration_ns: Integers
    tensors: Integers = field(default_factory=lambda: NONE)
    storages: Integers = field(default_factory=lambda: NONE)
    newest: int = NO_STORAGE
    device_ns: Integers = field(default_factory=lambda: NONE)
    page_faults: list[tuple[int, int]] = field(default_factory=list)
    streams: Integers = field(default_factory=lambda: NONE)
    perturbed: list[tuple[int, int]] = field(default_factory=list)
    slow_memory: list[tuple[int, int]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.signature)


def block_of(record: Calls) -> CallBlock:
    values: dict[str, Any] = {name: np.asarray(getattr(record, name), dtype=np.int64) for name in _ARRAYS}
    values |= {name: getattr(record, name) for name in _PAIRS}
    return CallBlock(record.thread, newest=record.newest, **values)


def record_of(block: CallBlock) -> Calls:
    values: dict[str, Any] = {name: getattr(block, name).tolist() for name in _ARRAYS}
    values |= {name: getattr(block, name) for name in _PAIRS}
    return Calls(block.thread, newest=block.newest, **values)


def perturbed_flags(runs: Sequence[tuple[int, int]], calls: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    if not runs:
        return np.zeros(calls, dtype=np.bool_)
    # marks only the ends of runs, because all runs of an untrusted file may overlap
    changes = np.zeros(calls + 1, dtype=np.int64)
    for place, count in runs:
        changes[place] += 1
        changes[min(place + count, calls)] -= 1
    return np.cumsum(changes[:-1]) > 0


def exact_sum(column: Integers) -> int:
    return int(column.sum()) if _largest(column) * len(column) < LIMIT else sum(column.tolist())


Pairs: TypeAlias = list[tuple[Count, Count]]  # pairs of a position in a block and a count
Column = TypeVar("Column")


class CallsForm(msgspec.Struct, Generic[Column], tag_field="type", tag="calls", forbid_unknown_fields=True):
    """The JSON object of a block of calls.

    start_ns : start of the first call relative to the start of the capture
    after_ns : start of each call relative to that of the previous one; 0 for the first
    storages : storages of the calls' tensors, encoded by `encode_storages`
    """

    thread: Int64
    start_ns: Int64
    signature: Column
    scope: Column
    after_ns: Column
    duration_ns: Column
    tensors: Column = None  # type: ignore[assignment]
    newest: Int64 = NO_STORAGE
    storages: Column = None  # type: ignore[assignment]
    device_ns: Column = None  # type: ignore[assignment]
    page_faults: Pairs = []
    streams: Column = None  # type: ignore[assignment]
    perturbed: Pairs = []
    slow_memory: Pairs = []


_COLUMNS = ("signature", "scope", "after_ns", "duration_ns", "tensors", "storages", "device_ns", "streams")
_decoder = msgspec.json.Decoder(CallsForm[msgspec.Raw])
_PREFIX = b'{"type":"calls",'


def json_keys_of_calls() -> set[str]:
    return set(CallsForm.__struct_encode_fields__)


def parse_block(line: bytes) -> CallBlock | None:
    if not line.startswith(_PREFIX):
        return None
    try:
        form = _decoder.decode(line)
        return _block(form, *_parse_columns([bytes(getattr(form, name) or b"[]") for name in _COLUMNS]))
    except (ValueError, FormatError):
        return None


def _parse_columns(columns: Sequence[bytes]) -> tuple[list[Integers], int]:
    if not all(column.startswith(b"[") for column in columns):
        raise FormatError("a block of calls has a column that is not a list")
    texts = [column[1:-1] for column in columns]
    joined = b",".join(filter(None, texts))
    if joined.translate(None, b"0123456789-,"):
        raise FormatError("a block of calls has a column with elements that are not integers")
    numbers = np.fromstring(joined, dtype=np.int64, sep=",") if joined else NONE
    # integers beyond 64 bits become the largest or the smallest one
    largest = _largest(numbers)
    if largest >= LIMIT - 1:
        raise FormatError("a block of calls has an integer that may have more than 64 bits")
    ends = accumulate(text.count(b",") + 1 if text else 0 for text in texts)
    # an empty slice of a column would keep the whole column in memory
    return [numbers[start:end] if end > start else NONE for start, end in pairwise([0, *ends])], largest


def _largest(numbers: Integers) -> int:
    return max(int(numbers.max()), -int(numbers.min())) if len(numbers) else 0


def calls_from_json(form: Mapping[str, Json]) -> Calls:
    fields = {name: value for name, value in form.items() if name == "type" or name in json_keys_of_calls()}
    lists = convert(fields, CallsForm[list[Int64]], "calls")
    columns = [np.asarray(getattr(lists, name) or [], dtype=np.int64) for name in _COLUMNS]
    return record_of(_block(lists, columns, max(map(_largest, columns))))


def _block(form: CallsForm[Any], columns: Sequence[Integers], largest: int) -> CallBlock:
    signature, scope, after, durations, tensors, codes, device_ns, streams = columns
    calls = len(signature)
    if not len(scope) == len(after) == len(durations) == calls:
        raise FormatError("the columns of a block of calls differ in length")
    if any(len(column) not in (0, calls) for column in (tensors, device_ns, streams)):
        raise FormatError("the columns of a block of calls differ in length")
    # bounds the sum of any subset of these integers
    if largest * (calls + len(codes) + 1) + abs(form.start_ns) + abs(form.newest) <= LATEST_NS:
        starts, storages = np.cumsum(after) + form.start_ns, _decode_codes(codes, form.newest)
    else:
        starts = _exact_column(list(accumulate(after.tolist(), initial=form.start_ns))[1:])
        storages = _exact_column(decode_storages(codes.tolist(), form.newest))
    check_times(starts, durations)
    if len(tensors) and (tensors.min() < 0 or exact_sum(tensors) != len(storages)):
        raise FormatError(f"a block of calls has {len(storages)} storage numbers, but another number of tensors")
    values: dict[str, Any] = {name: getattr(form, name) for name in _PAIRS}
    for name, items in values.items():
        if any(place >= calls for place, _ in items):
            raise FormatError(f"{name} of a block of {calls} calls has an index beyond the last call")
    arrays = (signature, scope, starts, durations, tensors, storages, device_ns, streams)
    values |= zip(_ARRAYS, arrays, strict=True)
    return CallBlock(form.thread, newest=form.newest, **values)


def _exact_column(numbers: list[int]) -> Integers:
    if min(numbers, default=0) < -LIMIT or max(numbers, default=0) >= LIMIT:
        raise FormatError("a start time or storage number in a block of calls has more than 64 bits")
    return np.asarray(numbers, dtype=np.int64)


def _decode_codes(codes: Integers, newest: int) -> Integers:
    largest = np.cumsum(np.maximum(codes, 0)) + newest
    numbers = np.where(codes <= -FAR, -FAR - 1 - codes, largest + np.minimum(codes, 0))
    numbers[codes == -FAR] = NO_STORAGE
    return numbers


def check_times(starts: Integers, durations: Integers) -> None:
    if not len(starts):
        return
    if durations.min() < 0:
        raise FormatError("a block has calls with a negative duration")
    # arranged so that no difference overflows
    if starts.min() < -LATEST_NS or starts.max() > LATEST_NS or (durations - LATEST_NS > -starts).any():
        raise FormatError(f"a block has calls more than {LATEST_NS} ns away from the start of the capture")


def calls_to_json(record: Calls) -> dict[str, Json]:
    starts = record.start_ns
    form: dict[str, Json] = {
        "type": "calls",
        "thread": record.thread,
        "start_ns": starts[0] if starts else 0,
        "signature": record.signature,
        "scope": record.scope,
        "after_ns": [0, *map(sub, starts[1:], starts)] if starts else [],
        "duration_ns": record.duration_ns,
        "tensors": record.tensors,
        "newest": record.newest,
        "storages": encode_storages(record.storages, record.newest),
    }
    optional = {name: getattr(record, name) for name in ("device_ns", "page_faults", "perturbed", "slow_memory")}
    if any(record.streams):
        optional["streams"] = record.streams
    return form | {name: values for name, values in optional.items() if values}
