"""Times of a case's calls in the program, or their estimated cost for traces without times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch

from opgrip.replay.cases.timing_clusters import TimingCluster, calm_times
from opgrip.replay.operators.lookup import Unsupported, find_operator, is_view
from opgrip.replay.operators.memory import bytes_of
from opgrip.replay.operators.work import work_of
from opgrip.traces.schema.arguments import TensorSpec, map_leaves
from opgrip.traces.schema.records import Signature
from opgrip.traces.table.call_table import COUNT, quantiles

FLOPS_PER_BYTE = 10
"""Floating-point operations that a machine does while it moves a byte. Accelerators and CPUs do 5 to 200."""


def estimated_cost(signature: Signature) -> float:
    """Return the estimated cost of a call: bytes moved, plus the time of its arithmetic in the same unit.

    The operator is not run; its formulas get tensors on the meta device.
    """
    if is_view(signature):
        return 1.0
    whole = float(bytes_of([signature.args, signature.kwargs, signature.outputs]))
    try:
        args, kwargs, outputs = map_leaves(_without_memory, (signature.args, signature.kwargs, signature.outputs))
        work = work_of(find_operator(signature).function, signature.op, args, kwargs, outputs)
    except (Unsupported, RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, OverflowError):
        return 1.0 + whole
    moved = whole if work.bytes is None else work.bytes
    return 1.0 + moved + (work.flops or 0) / FLOPS_PER_BYTE


def _without_memory(leaf: Any) -> Any:
    if not isinstance(leaf, TensorSpec):
        return leaf
    if leaf.stride is None or leaf.made_of is not None:
        raise Unsupported("a tensor without strides")
    return torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype, device="meta")


@dataclass(frozen=True, slots=True)
class CapturedTimes:
    """Times of a signature's calls; see `Case`."""

    count: int
    median_us: float
    total_us: float
    host_us: float | None
    spread: float | None
    perturbed: int


def captured_times(
    calls: pd.DataFrame, numbers: pd.Series[int], timing_clusters: Sequence[TimingCluster]
) -> dict[int, CapturedTimes]:
    calm, counts = calm_times(calls), calls[COUNT]
    of_case = calls.groupby(numbers)
    median = quantiles(_times_of(calls, calm, timing_clusters), numbers, counts)
    # one way to behave is not scattered because there is another
    typical = numbers.map(median)
    for cluster in timing_clusters:
        typical[cluster.calls] = cluster.captured_us * 1e3
    undisturbed = calm / typical.clip(lower=1.0)
    low, high = (quantiles(undisturbed, numbers, counts, share) for share in (0.25, 0.75))
    columns = (
        of_case[COUNT].sum(),
        median / 1e3,
        (calls["raw_ns"] * counts).groupby(numbers).sum() / 1e3,
        _or_none(quantiles(calls["duration_ns"], numbers, counts) / 1e3, of_case["device_ns"].count() > 0),
        _or_none(high - low, counts.where(undisturbed.notna(), 0).groupby(numbers).sum() > 1),
        (calls["perturbed"] * counts).groupby(numbers).sum(),
    )
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return {int(number): CapturedTimes(*row) for number, row in zip(median.index, rows, strict=True)}


def weights_of(captured: Mapping[int, CapturedTimes], signatures: Mapping[int, Signature]) -> dict[int, float]:
    """Return the time of each case's calls; if no call has a time, their estimated cost, if there are signatures."""
    times = {number: item.count * item.median_us for number, item in captured.items()}
    if any(times.values()):
        return times
    costs = {number: estimated_cost(signature) for number, signature in signatures.items() if number in captured}
    return {number: item.count * costs.get(number, 1.0) for number, item in captured.items()}


def _times_of(
    calls: pd.DataFrame, calm: pd.Series[float], timing_clusters: Iterable[TimingCluster]
) -> pd.Series[float]:
    """Return the time of each call in ns. A perturbed call gets the time of its timing cluster."""
    times = calls["time_ns"].astype(float)
    for cluster in timing_clusters:
        own = calm[cluster.calls]
        typical_ns = own.median() if own.notna().any() else cluster.captured_us * 1e3
        times[cluster.calls] = own.fillna(typical_ns)
    return times


def _or_none(values: pd.Series[float], is_known: pd.Series[bool]) -> pd.Series[Any]:
    return values.astype(object).where(is_known, None)
