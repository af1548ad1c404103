"""How long each call of a trace kept an accelerator busy, from the records that tell of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import pandas as pd

from opgrip.traces.labels import are_marks
from opgrip.traces.records import FUNCTION, Calls, DeviceTimes, Kernels

Times: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]


def device_times(blocks: Sequence[Calls], later: Sequence[DeviceTimes]) -> Times:
    """The device time of each call of the blocks in ns, nan for what ran on the host alone.

    Parameters
    ----------
    later : times that were known after their calls; those of calls that are not there are passed over
    """
    pieces = [np.asarray(block.device_ns or [-1] * len(block.signature), dtype=np.float64) for block in blocks]
    times = np.concatenate(pieces) if pieces else np.empty(0)
    if later:
        thread_by_call = np.repeat([block.thread for block in blocks], [len(piece) for piece in pieces])
        rows_by_thread = {record.thread: np.flatnonzero(thread_by_call == record.thread) for record in later}
        for record in later:
            rows = rows_by_thread[record.thread][record.first : record.first + len(record.device_ns)]
            times[rows] = record.device_ns[: len(rows)]
    return np.where(times < 0, np.nan, times)


def streams(blocks: Sequence[Calls]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The number of each call's stream, 0 for the default one."""
    pieces = [np.asarray(block.streams or [0] * len(block.signature), dtype=np.int64) for block in blocks]
    return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64)


def with_functions(calls: pd.DataFrame) -> Times:
    """The device times of a trace's calls, where a function of the program has that of the calls inside it."""
    times = calls["device_ns"].to_numpy(dtype=np.float64, copy=True)
    functions = (calls["kind"] == FUNCTION).to_numpy()
    if not functions.any() or np.isnan(times).all():
        return times
    # what an extension function calls is in the time of that
    own = ((calls["inside"].isna() | calls["gripped"]) & ~are_marks(calls)).to_numpy() & ~functions & ~np.isnan(times)
    starts = calls["start_ns"].to_numpy()
    ends = starts + calls["duration_ns"].to_numpy()
    thread = calls.groupby(["process", "thread"], observed=True, dropna=False).ngroup().to_numpy()
    for number in np.unique(thread[functions]):
        inner, outer = np.flatnonzero(own & (thread == number)), np.flatnonzero(functions & (thread == number))
        sums = np.concatenate([[0.0], np.cumsum(times[inner])])
        first, last = np.searchsorted(starts[inner], starts[outer]), np.searchsorted(starts[inner], ends[outer])
        times[outer] = np.where(np.isnan(times[outer]) & (last > first), sums[last] - sums[first], times[outer])
    return times


def summarize_kernels(kernels: Sequence[Kernels], op_by_signature: Mapping[int, str]) -> pd.DataFrame:
    """One row a kernel and the operator that launches it, by falling time: kernel, op, launches, time_us, share."""
    rows = [
        (name, op_by_signature.get(record.signature, ""), launches, device_ns / 1e3)
        for record in kernels
        for name, launches, device_ns in zip(record.names, record.launches, record.device_ns, strict=True)
    ]
    table = pd.DataFrame(rows, columns=["kernel", "op", "launches", "time_us"])
    table = table.groupby(["kernel", "op"], as_index=False, sort=False).sum()
    table["share"] = table["time_us"] / max(float(table["time_us"].sum()), 1e-3)
    return table.sort_values(["time_us", "launches"], ascending=False, ignore_index=True)
