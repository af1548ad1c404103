"""In which memory the results of a trace's calls came: in fresh pages of the system, or in what was used before."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from opgrip.platform.machine import page_size
from opgrip.replay.cases.flow import Flow
from opgrip.replay.operators.memory import LARGE, bytes_of, mostly_fresh
from opgrip.traces.schema.records import NO_STORAGE
from opgrip.traces.table.trace import Trace
from opgrip.traces.table.weighted_quantiles import COUNT

UNWRITTEN = ("aten.empty", "aten.new_empty")
"""Operators that write nothing into their results: whoever takes these first meets the pages."""


@dataclass(frozen=True, slots=True)
class NewMemory:
    """Large memory that a call made on the CPU.

    Attributes
    ----------
    sizes : in bytes, of each
    fresh_bytes : how much the system had to give for it and for what the call needed besides
    """

    sizes: tuple[int, ...]
    fresh_bytes: int


def new_memory(trace: Trace, flow: Flow) -> dict[int, NewMemory]:
    """By the places of calls in a flow, the large memory that they made; empty where page faults were not counted."""
    page = page_size(trace.header)
    if page is None:
        return {}
    fresh_bytes = (_faults(trace.own_calls) * page).tolist()
    made: dict[int, NewMemory] = {}
    unwritten: dict[int, tuple[int, int]] = {}
    seen = {NO_STORAGE, *flow.outside}
    for place, (call, fresh) in enumerate(zip(flow.calls, fresh_bytes, strict=True)):
        numbers = [number for number in dict.fromkeys(call.gives) if number not in seen]
        seen.update(numbers)
        sizes = {number: flow.needs[number].bytes for number in numbers if _is_large(flow, number)}
        given = {*call.gives}
        for number in {*call.takes} & unwritten.keys():
            # a view of it meets no page
            if fresh or number not in given:
                maker, size = unwritten.pop(number)
                made[maker] = NewMemory((size,), max(min(fresh - sum(sizes.values()), size), 0))
        if call.op.startswith(UNWRITTEN):
            unwritten |= {number: (place, size) for number, size in sizes.items()}
        elif sizes:
            made[place] = NewMemory(tuple(sizes.values()), fresh)
    return made


def _faults(calls: pd.DataFrame) -> pd.Series[int]:
    """Page faults of calls; of those that the capture perturbed no more, and no less, than their signature's others."""
    counts = calls["page_faults"]
    others = counts.where(~calls["perturbed"]).groupby(calls["signature"])
    return counts.clip(others.transform("min"), others.transform("max")).astype("int64")


def _is_large(flow: Flow, number: int) -> bool:
    need = flow.needs.get(number)
    return need is not None and need.bytes >= LARGE and need.device.partition(":")[0] == "cpu"


def shares_of_fresh(trace: Trace, calls: pd.DataFrame) -> dict[int, float]:
    """By signature with large results, the share of its calls that got them in fresh memory."""
    page = page_size(trace.header)
    if page is None:
        return {}
    size = {signature.number: bytes_of(signature.outputs) for signature in trace.signatures}
    results = calls["signature"].map(size).fillna(0)
    large = calls[results >= LARGE]
    fresh = mostly_fresh(large["page_faults"] * float(page), results[large.index])
    counts = large[COUNT]
    shares = (fresh * counts).groupby(large["signature"]).sum() / counts.groupby(large["signature"]).sum()
    return dict(zip(shares.index.tolist(), shares.tolist(), strict=True))
