"""Ratios of rows to the row that they are compared with, and groups of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from opgrip.replay.operators.lookup import family_of
from opgrip.replay.results.results import OK, Result

OUTSIDE = "(outside)"
"""name of calls outside all modules"""
SITES: tuple[str, ...] = ("module", "phase", "line")
"""groups of calls; the calls of one row can be in several groups"""
GROUPS: dict[str, Callable[[Result], str]] = {
    "op": lambda row: row.op,
    "family": lambda row: family_of(row.op),
    "mode": lambda row: row.mode,
}
"""groups of rows, by name"""


def shares_by(row: Result, by: str) -> dict[str, float]:
    """Return the groups of a row's calls and the share of the calls in each; the shares sum to 1.

    Modules and lines of different traces are in different groups.

    by : a name in `GROUPS` or `SITES`
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


def base_place(place: int, rows: Sequence[Result], reference: str) -> int | None:
    """Return the index of the row of the same case that a row is compared with, or None.

    A row of another mode is compared with the row of the reference mode. Within the reference mode, a row with other
    values is compared with the row of the first values, else a row with other threads with the row of the first
    threads, else a row with another cache state with the row of the first.

    place : index of the row
    rows : all rows of a case, in the order of the request
    reference : mode that other modes are compared with
    """
    row = rows[place]
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
    wanted = row.values, row.threads, row.cache
    if row.mode == reference:
        if row.values != first.values:
            wanted = first.values, row.threads, row.cache
        elif row.threads != first.threads:
            wanted = row.values, first.threads, row.cache
        else:
            wanted = row.values, row.threads, first.cache
    own = (other for other in alike if other != place)
    return next((other for other in own if _way(rows[other]) == wanted), None)


def _way(row: Result) -> tuple[str, int | None, str | None]:
    return row.values, row.threads, row.cache


def with_ratios(rows: Sequence[Result], reference: str) -> list[Result]:
    """Return the rows of a case with `ratio`, their median divided by that of the row that they are compared with.

    A row that is not compared with another row keeps its ratio.
    """
    places = (base_place(place, rows, reference) for place in range(len(rows)))
    return [
        row if base is None else replace(row, ratio=ratio_over(row, rows[base]))
        for row, base in zip(rows, places, strict=True)
    ]


def ratio_over(row: Result, base: Result) -> float | None:
    """Return the median of a row divided by that of another, or None if one of them has no valid time."""
    if row.status != OK or base.status != OK or not row.median_us or not base.median_us:
        return None
    return row.median_us / base.median_us


def with_ratios_by_case(rows: Iterable[Result], reference: str) -> list[Result]:
    """Return the rows of several cases in order, adding ratios that are missing or from an older opgrip.

    Older versions stored the median of paired runs as `ratio`, and had no `ratio_p50`.
    """
    rows = list(rows)
    places: dict[tuple[object, ...], list[int]] = {}
    for place, row in enumerate(rows):
        run = row.case_of_trace, row.key, row.device, row.dtype
        places.setdefault(run, []).append(place)
    for of_case in places.values():
        for place, row in zip(of_case, with_ratios([rows[place] for place in of_case], reference), strict=True):
            is_old = rows[place].ratio_p90 is not None and rows[place].ratio_p50 is None
            if rows[place].ratio is None or is_old:
                rows[place] = row
    return rows


def reference_of(rows: Sequence[Result]) -> str:
    """Return the mode that the rows of a run are compared with, which is the first one that ran."""
    return rows[0].mode if rows else ""
