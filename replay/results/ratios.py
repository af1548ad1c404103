"""Ratios of rows to a reference row, shares by group, captured times of calls in graphs, and merging of repeats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from opgrip.replay.operators.lookup import family_of
from opgrip.replay.results.columns import Columns, column
from opgrip.replay.results.results import OK, RAN, Result, Row

if TYPE_CHECKING:
    from opgrip.replay.cases.cases import Case
    from opgrip.traces import Trace

OUTSIDE = "(outside)"  # name of calls outside all modules
# groups of rows, by name
GROUPS: dict[str, Callable[[Result], str]] = {
    "op": lambda row: row.op,
    "family": lambda row: family_of(row.op),
    "mode": lambda row: row.mode,
}


def shares_by(row: Result, by: str) -> dict[str, float]:
    """Return the share of a row's calls in each group, by group name; the shares add up to 1.

    by : `op`, `family`, `mode`, `phase`, `module` or `line`
    """
    if by in GROUPS:
        return {GROUPS[by](row): 1.0}
    sites = row.sites
    calls = sum(site.count for site in sites)
    before = f"{row.trace}: " if row.trace and by != "phase" else ""
    shares: dict[str, float] = {}
    for site in sites:
        name = f"{before}{getattr(site, by) or OUTSIDE}"
        shares[name] = shares.get(name, 0.0) + site.count / calls
    return shares


def base_index(index: int, rows: Sequence[Result | Row], reference: str) -> int | None:
    """Return the index of the row with which a row of the same case is compared, or None if there is none."""
    row = rows[index]
    alike = [
        other
        for other, item in enumerate(rows)
        if (item.mode, item.direction, item.batch_scale, item.streams) == (reference, row.direction, row.batch_scale, 1)
        # rows that were not timed have no method
        and item.method in (None, row.method)
    ]
    if not alike or row.streams != 1:
        return None
    first = rows[alike[0]]
    base_key = row.values, row.threads, row.cache
    if row.mode == reference:
        if row.values != first.values:
            base_key = first.values, row.threads, row.cache
        elif row.threads != first.threads:
            base_key = row.values, first.threads, row.cache
        else:
            base_key = row.values, row.threads, first.cache
    own = ((other, rows[other]) for other in alike if other != index)
    return next((other for other, item in own if (item.values, item.threads, item.cache) == base_key), None)


def with_ratios(rows: Sequence[Result], reference: str) -> list[Result]:
    """Return the rows of a case with `ratio` filled in; a row that is compared with no other row keeps its ratio."""
    indices = (base_index(index, rows, reference) for index in range(len(rows)))
    return [
        row if base is None else replace(row, ratio=ratio_over(row, rows[base]))
        for row, base in zip(rows, indices, strict=True)
    ]


def ratio_over(row: Result | Row, base: Result | Row) -> float | None:
    if row.status != OK or base.status != OK or not row.median_us or not base.median_us:
        return None
    return float(row.median_us / base.median_us)


def with_ratios_by_case(rows: Iterable[Result], reference: str) -> list[Result]:
    rows = list(rows)
    indices: dict[tuple[object, ...], list[int]] = {}
    for index, row in enumerate(rows):
        run = row.case_of_trace, row.key, row.device, row.dtype
        indices.setdefault(run, []).append(index)
    for of_case in indices.values():
        for index, row in zip(of_case, with_ratios([rows[index] for index in of_case], reference), strict=True):
            if rows[index].ratio is None:
                rows[index] = row
    return rows


def reference_of(rows: Sequence[Result]) -> str:
    return rows[0].mode if rows else ""


@dataclass(frozen=True, slots=True)
class ClusterColumns(Columns):
    place: str | None = column("module, function and line of a typical call of the row")
    behaviour_shares: list[float] | None = column(
        "without `--split`: share of the calls in each timing cluster, a group of calls with similar times, "
        "largest first",
        several=True,
    )
    behaviours_captured_us: list[float] | None = column(
        "median captured time of the calls in each timing cluster", "us", several=True
    )
    behaviours_us: list[float] | None = column("median time of the runs for each timing cluster", "us", several=True)


BY_REPLAY = "replayed times"


@dataclass(frozen=True, slots=True)
class GraphColumns(Columns):
    launches_divided_by: str | None = column(
        "`replayed times` if the captured times are parts of the times of graph launches, which were divided among "
        "their calls in proportion to the times of this replay",
        heading="launches divided by",
    )


def with_divided_launches(rows: Sequence[Result], cases: Sequence[Case], trace: Trace) -> list[Result]:
    signature_of = {case.number: case.trace_number for case in cases}
    factors = trace.source.changes_by(_times_ns(rows, signature_of), trace.signatures)
    by_case = {row.case: row for row in rows}
    total = sum(row.share or 0.0 for row in by_case.values())
    changed = sum((row.share or 0.0) * factors.get(signature_of[number], 1.0) for number, row in by_case.items())
    if not factors or not changed:
        return list(rows)
    scale = total / changed
    return [
        _divided(row, factors[number], scale)
        if (number := signature_of[row.case]) in factors
        else replace(row, share=(row.share or 0.0) * scale)
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
        share=(row.share or 0.0) * factor * scale,
        captured_us=(row.captured_us or 0.0) * factor,
        captured_total_us=(row.captured_total_us or 0.0) * factor,
    ).adding(GraphColumns(BY_REPLAY))
