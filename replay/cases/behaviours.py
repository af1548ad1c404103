"""Ways in which calls of one signature behave, where those of some places of a program take other times than others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from opgrip.traces.arguments import numbers_of, with_numbers
from opgrip.traces.records import Observed, Signature
from opgrip.traces.trace import Trace

DIFFERENT = 1.5
"""Calls behave in two ways where those of one place take so many times as long as those of another."""


@dataclass(frozen=True, slots=True)
class Behaviour:
    """Some calls of a signature, alike in what they take.

    Attributes
    ----------
    signature : with the values and results of one of them
    calls : their indices in the trace's table
    captured_us : median time of them
    place : of that one: its module, function and line
    """

    signature: Signature
    calls: pd.Index[int]
    captured_us: float
    place: str


def behaviours_in(trace: Trace, calls: pd.DataFrame) -> dict[int, list[Behaviour]]:
    """By the number of a signature, the behaviours of its calls, the most frequent first; only where there are several.

    Parameters
    ----------
    calls : those of the trace that are selected
    """
    placed = {
        number: [item for item in observed if item.since_ns is not None] for number, observed in trace.observed.items()
    }
    placed = {number: observed for number, observed in placed.items() if len(observed) > 1}
    if not placed:
        return {}
    signatures = {signature.number: signature for signature in trace.signatures}
    behaviours: dict[int, list[Behaviour]] = {}
    for number, own in calls[calls["signature"].isin(list(placed))].groupby("signature"):
        found = list(_behaviours(signatures[int(str(number))], placed[int(str(number))], own, trace.storages))
        if len(found) > 1:
            behaviours[int(str(number))] = sorted(found, key=lambda item: -len(item.calls))
    return behaviours


def variant_of(signature: Signature, observed: Observed) -> Signature | None:
    """A signature as one of its later calls had it; None where the two do not fit."""
    if len(numbers_of([signature.args, signature.kwargs])) != len(observed.values):
        return None
    args, kwargs = with_numbers((signature.args, signature.kwargs), observed.values)
    return replace(signature, args=args, kwargs=kwargs, outputs=observed.outputs)


def _behaviours(
    signature: Signature, observed: Sequence[Observed], calls: pd.DataFrame, memory: NDArray[np.int64]
) -> Iterator[Behaviour]:
    calls = calls.sort_values("start_ns", kind="stable")
    starts, typical_ns = calls["start_ns"].to_numpy(), _typical_ns(calls, memory)
    examples: list[tuple[float, int, Signature]] = []
    for item in observed:
        row = int(np.searchsorted(starts, item.since_ns or 0))
        variant = variant_of(signature, item)
        if row < len(starts) and variant is not None:
            examples.append((float(typical_ns[row]), row, variant))
    distinct: list[tuple[float, int, Signature]] = []
    for example in sorted(examples, key=lambda example: example[:2]):
        if not distinct or example[0] >= DIFFERENT * distinct[-1][0]:
            distinct.append(example)
    if len(distinct) < 2:
        return
    times = np.array([example[0] for example in distinct])
    nearest = np.abs(np.log(typical_ns)[:, None] - np.log(times)[None, :]).argmin(axis=1)
    for index, (_, row, variant) in enumerate(distinct):
        chosen = nearest == index
        one = calls.iloc[row]
        place = f"{one['module']} {one['function']} {one['file']}:{one['line']}"
        median_us = float(np.median(typical_ns[chosen])) / 1e3
        yield Behaviour(variant, calls.index[chosen], median_us, place.strip())


def _typical_ns(calls: pd.DataFrame, memory: NDArray[np.int64]) -> NDArray[np.float64]:
    """Of each call, what those in its place take: of its scope and first memory, where that comes again, else scope."""
    first = pd.Series(memory[calls["first_storage"].to_numpy()], index=calls.index)
    raw_ns = calls["raw_ns"].astype(float)
    calm_ns = raw_ns.where(~calls["perturbed"] | calls["device_ns"].notna())
    by_memory = [calls["scope"], first]
    again = raw_ns.groupby(by_memory).transform("size") > 1
    candidates = (
        calm_ns.groupby(by_memory).transform("median").where(again),
        raw_ns.groupby(by_memory).transform("median").where(again),
        calm_ns.groupby(calls["scope"]).transform("median"),
        raw_ns,
    )
    typical = candidates[0]
    for other in candidates[1:]:
        typical = typical.fillna(other)
    return typical.clip(lower=1.0).to_numpy(dtype=np.float64)
