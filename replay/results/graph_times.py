"""Captured times of calls in launches of CUDA graphs, divided among the calls by the times of a replay.

A trace without records of a graph's kernels has only the time of each launch, and estimates the parts of its calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from opgrip.replay.results.columns import Columns, column
from opgrip.replay.results.results import RAN, Result

if TYPE_CHECKING:
    from opgrip.replay.cases.cases import Case
    from opgrip.traces import Trace

BY_REPLAY = "replayed times"


@dataclass(frozen=True, slots=True)
class GraphColumns(Columns):
    launches_divided_by: str | None = column(
        "`replayed times` if captured times of calls in launches of graphs are parts of the launches in proportion to "
        "the times of this replay",
        heading="launches divided by",
    )


def with_divided_launches(rows: Sequence[Result], cases: Sequence[Case], trace: Trace) -> list[Result]:
    """Divide the captured time of each graph's launches among its calls in proportion to their replayed times.

    A graph keeps its captured times if they are of kernels, or if not all of its calls were replayed.
    """
    signature_of = {case.number: case.trace_number for case in cases}
    factors = trace.source.changes_by(_times_ns(rows, signature_of), trace.signatures)
    by_case = {row.case: row for row in rows}
    total = sum(row.share for row in by_case.values())
    changed = sum(row.share * factors.get(signature_of[number], 1.0) for number, row in by_case.items())
    if not factors or not changed:
        return list(rows)
    scale = total / changed
    return [
        _divided(row, factors[number], scale)
        if (number := signature_of[row.case]) in factors
        else replace(row, share=row.share * scale)
        for row in rows
    ]


def _times_ns(rows: Sequence[Result], signature_of: Mapping[int, int]) -> dict[int, float]:
    totals: dict[int, float] = {}
    counts, timed_cases = Counter[int](), set[int]()
    for row in rows:
        # the first row of a case is the one that others are compared with
        if row.case not in timed_cases and row.status in RAN and row.median_us is not None and row.device != "cpu":
            timed_cases.add(row.case)
            number = signature_of[row.case]
            totals[number] = totals.get(number, 0.0) + row.median_us * 1e3 * row.count
            counts[number] += row.count
    return {number: totals[number] / count for number, count in counts.items() if count}


def _divided(row: Result, factor: float, scale: float) -> Result:
    return replace(
        row,
        share=row.share * factor * scale,
        captured_us=row.captured_us * factor,
        captured_total_us=row.captured_total_us * factor,
    ).adding(GraphColumns(BY_REPLAY))
