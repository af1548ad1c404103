"""How long each call of a trace kept an accelerator busy, from the records that tell of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import pandas as pd

from opgrip.traces.schema.records import FUNCTION, Kernels
from opgrip.traces.table.profiler_labels import are_marks

Times: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]


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
