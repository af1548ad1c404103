"""Blocks of calls, and what is told of them later, as the JSON objects that stand in the file."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from operator import add

from opgrip.traces.codec.call_blocks import decode_storages, encode_storages
from opgrip.traces.codec.json_values import LATEST_NS, integer, integers, text
from opgrip.traces.schema.arguments import FormatError, Json
from opgrip.traces.schema.records import Calls, DeviceTimes, Kernels

NEGATIVE = "calls that took less than no time"
FAR_AWAY = f"calls that are more than {LATEST_NS} ns away from the start of the capture"
"""What is wrong with times that are none."""


def calls_to_json(record: Calls) -> dict[str, Json]:
    """The object of a block of calls."""
    starts = record.start_ns
    after = [later - earlier for earlier, later in pairwise(starts)]
    form: dict[str, Json] = {
        "type": "calls",
        "thread": record.thread,
        "start_ns": starts[0] if starts else 0,
        "signature": record.signature,
        "scope": record.scope,
        "after_ns": [0, *after] if starts else [],
        "duration_ns": record.duration_ns,
        "tensors": record.tensors,
        "newest": record.newest,
        "storages": encode_storages(record.storages, record.newest),
    }
    if record.device_ns:
        form["device_ns"] = record.device_ns
    if record.page_faults:
        form["page_faults"] = [list(pair) for pair in record.page_faults]
    if any(record.streams):
        form["streams"] = record.streams
    if record.perturbed:
        form["perturbed"] = [list(pair) for pair in record.perturbed]
    if record.slow_memory:
        form["slow_memory"] = [list(pair) for pair in record.slow_memory]
    return form


def calls_from_json(form: Mapping[str, Json]) -> Calls:
    """The block of an object; raises `FormatError` where its columns do not go together."""
    columns = [integers(form[name]) for name in ("signature", "scope", "after_ns", "duration_ns")]
    if len({len(column) for column in columns}) != 1:
        raise FormatError("a block of calls whose columns differ in length")
    start = integer(form["start_ns"])
    starts = integers([start := start + after for after in columns[2]])
    _check_times(starts, columns[3])
    tensors, newest = integers(form.get("tensors", [])), integer(form.get("newest", -1))
    storages = integers(decode_storages(integers(form.get("storages", [])), newest))
    if tensors and (len(tensors) != len(starts) or min(tensors) < 0 or sum(tensors) != len(storages)):
        raise FormatError("a block of calls whose storages are not those of its calls")
    device_ns, streams = (integers(form.get(name, [])) for name in ("device_ns", "streams"))
    if not {len(device_ns), len(streams)} <= {0, len(starts)}:
        raise FormatError("a block of calls whose columns differ in length")
    return Calls(
        *(integer(form["thread"]), columns[0], columns[1], starts, columns[3]),
        *(tensors, storages, newest, device_ns, counts_by_place(form, "page_faults", len(starts))),
        *(streams, counts_by_place(form, "perturbed", len(starts))),
        counts_by_place(form, "slow_memory", len(starts)),
    )


def _check_times(starts: list[int], durations: list[int]) -> None:
    """Raise `FormatError` for calls that end before they start; or so far away that times between them overflow."""
    if min(durations, default=0) < 0:
        raise FormatError(NEGATIVE)
    if min(starts, default=0) < -LATEST_NS or max(map(add, starts, durations), default=0) > LATEST_NS:
        raise FormatError(FAR_AWAY)


def counts_by_place(form: Mapping[str, Json], name: str, calls: int) -> list[tuple[int, int]]:
    """Places in a block of so many calls, each with a count."""
    pairs = form.get(name, [])
    if not isinstance(pairs, list):
        raise FormatError(f"{name} that are no list")
    counted = [integers(pair) for pair in pairs]
    if any(len(pair) != 2 or not 0 <= pair[0] < calls or pair[1] < 0 for pair in counted):
        raise FormatError(f"{name} of calls that are not in their block")
    return [(place, count) for place, count in counted]


def device_times_to_json(record: DeviceTimes) -> dict[str, Json]:
    """The object of times that came later."""
    return {"type": "device_times", "thread": record.thread, "first": record.first, "device_ns": record.device_ns}


def device_times_from_json(form: Mapping[str, Json]) -> DeviceTimes:
    """The times of an object."""
    first = integer(form["first"])
    if first < 0:
        raise FormatError("device times of a call before the first")
    return DeviceTimes(integer(form["thread"]), first, integers(form["device_ns"]))


def kernels_to_json(record: Kernels) -> dict[str, Json]:
    """The object of what calls ran on an accelerator."""
    form: dict[str, Json] = {"type": "kernels", "signature": record.signature, "names": record.names}
    return form | {"launches": record.launches, "device_ns": record.device_ns}


def kernels_from_json(form: Mapping[str, Json]) -> Kernels:
    """The kernels of an object."""
    names, launches, times = form["names"], integers(form["launches"]), integers(form["device_ns"])
    if not isinstance(names, list) or not len(names) == len(launches) == len(times):
        raise FormatError("kernels whose columns differ in length")
    if min([*launches, *times], default=0) < 0:
        raise FormatError("kernels with a count or a time below 0")
    return Kernels(integer(form["signature"]), [text(name) for name in names], launches, times)
