"""Ratios of rows to a reference row, shares in groups, times of timing clusters, and one row for several repeats."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import numpy as np

from opgrip.replay.operators.lookup import family_of
from opgrip.replay.results.columns import Columns, column
from opgrip.replay.results.paired_ratio import with_joined_pairs
from opgrip.replay.results.results import NOISY, OK, RAN, WRONG, Result, rate_of
from opgrip.replay.timing.samples import FEWEST_FOR_PERCENTILES, Samples, effective_runs, quantile

if TYPE_CHECKING:
    from opgrip.replay.cases.cases import Case

OUTSIDE = "(outside)"  # name of calls outside all modules
# groups of rows, by name
GROUPS: dict[str, Callable[[Result], str]] = {
    "op": lambda row: row.op,
    "family": lambda row: family_of(row.op),
    "mode": lambda row: row.mode,
}


def shares_by(row: Result, by: str) -> dict[str, float]:
    """Return the share of a row's calls in each group, by group name; the shares add up to 1.

    by : a name in `GROUPS`, or `module`, `phase` or `line` to group by call site, separately for each trace
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
    """Return the index of the row of the same case with which a row is compared, or None if there is none.

    A row of another mode is compared with the row of the reference mode. Within the reference mode, a row with other
    values is compared with the row of the first values; otherwise a row with another number of threads with the row of
    the first number; otherwise a row with another cache state with the row of the first state.

    rows : all rows of a case, in the order of the request
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
    base_key = row.values, row.threads, row.cache
    if row.mode == reference:
        if row.values != first.values:
            base_key = first.values, row.threads, row.cache
        elif row.threads != first.threads:
            base_key = row.values, first.threads, row.cache
        else:
            base_key = row.values, row.threads, first.cache
    own = (other for other in alike if other != place)
    return next((other for other in own if _variant_key(rows[other]) == base_key), None)


def _variant_key(row: Result) -> tuple[str, int | None, str | None]:
    return row.values, row.threads, row.cache


def with_ratios(rows: Sequence[Result], reference: str) -> list[Result]:
    """Fill in `ratio` of the rows of a case; a row that is compared with no other row keeps its ratio."""
    places = (base_place(place, rows, reference) for place in range(len(rows)))
    return [
        row if base is None else replace(row, ratio=ratio_over(row, rows[base]))
        for row, base in zip(rows, places, strict=True)
    ]


def ratio_over(row: Result, base: Result) -> float | None:
    """Return the ratio of two rows' medians, or None if one of them has no valid time."""
    if row.status != OK or base.status != OK or not row.median_us or not base.median_us:
        return None
    return row.median_us / base.median_us


def with_ratios_by_case(rows: Iterable[Result], reference: str) -> list[Result]:
    """Return the rows of several cases in unchanged order, with missing ratios filled in.

    Ratios of older versions, which stored the median ratio of paired runs as `ratio` and had no `ratio_p50`, are
    replaced.
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


def shares_of(case: Case) -> list[float]:
    """Return the share of a case's calls that each of its input sets represents; empty if unknown."""
    if len(case.timing_clusters) != 1 + len(case.input_sets):
        return []
    counts = [len(item.calls) for item in case.timing_clusters]
    return [number / sum(counts) for number in counts]


def with_timing_clusters(result: Result, case: Case, samples: Samples) -> Result:
    """Return a row with the call site of the case's only timing cluster, or with the times of its clusters."""
    if len(case.timing_clusters) == 1:
        return result.adding(ClusterColumns(place=case.timing_clusters[0].place))
    shares = shares_of(case)
    medians = [samples.median_us_of(index) for index in range(len(shares))]
    cluster_medians_us = [median for median in medians if median is not None]
    if not shares or len(cluster_medians_us) < len(medians):
        return result
    captured = [item.captured_us for item in case.timing_clusters]
    return result.adding(
        ClusterColumns(behaviour_shares=shares, behaviours_captured_us=captured, behaviours_us=cluster_medians_us)
    )


def join_repeats(rows: Sequence[Result]) -> Result:
    """Return one row that combines the repeats of a case in one mode.

    Each repeat has the same weight, regardless of its number of runs. Repeats that other processes disturbed count only
    if all were disturbed. If repeats failed or are wrong, the worst of their rows is returned. `ratio` stays empty.
    """
    bad = max((row for row in rows if row.status not in RAN), key=_severity, default=None)
    if bad is not None or len(rows) == 1:
        return bad or rows[0]
    errors: dict[str, Any] = {name: _largest(getattr(row, name) for row in rows) for name in ("max_abs", "max_rel")}
    rows = [row for row in rows if row.status == OK] or rows
    first, times = rows[0], [time for row in rows for time in row.times_us or ()]
    if not times:
        return replace(first, **errors)
    repeats = [count for row in rows for count in row.repeats or [len(row.times_us or ())]]
    weights = [weight * len(row.repeats or (1,)) / len(repeats) for row in rows for weight in weights_of(row)]
    p10, low, middle, high, p90 = (quantile(times, weights, share) for share in (0.1, 0.25, 0.5, 0.75, 0.9))
    spread, runs = (high - low) / middle if middle else None, effective_runs(weights)
    ratios: dict[str, Any] = {
        name: median(figures)
        if (figures := [value for row in rows if (value := getattr(row, name)) is not None])
        else None
        for name in ("ratio_p10", "ratio_p50", "ratio_p90")
    }
    known_rates = [row.memory_gb_per_s for row in rows if row.memory_gb_per_s]
    joined = replace(
        first,
        median_us=middle,
        p10_us=p10 if runs >= FEWEST_FOR_PERCENTILES else None,
        p90_us=p90 if runs >= FEWEST_FOR_PERCENTILES else None,
        mean_us=float(np.average(times, weights=weights)),
        samples=len(times),
        runs=runs,
        spread=spread,
        noisy=None if spread is None else spread > NOISY,
        dropped=sum(row.dropped for row in rows),
        slowed=fmean(row.slowed or 0.0 for row in rows),
        memory_gb_per_s=fmean(known_rates) if known_rates else None,
        gflop_per_s=rate_of(first.flops, middle) if first.status == OK else None,
        gb_per_s=rate_of(first.bytes_moved, middle) if first.status == OK else None,
        times_us=times,
        weights=weights,
        repeats=repeats,
        ratio=None,
        **ratios,
        **errors,
    )
    return with_joined_pairs(joined, rows)


def _severity(row: Result) -> tuple[bool, float]:
    return row.status == WRONG, row.max_abs or 0.0


def _largest(errors: Iterable[float | None]) -> float | None:
    return max((error for error in errors if error is not None), default=None)


def weights_of(row: Result) -> list[float]:
    """Return the weight of each timed run of a row; the weights sum to 1."""
    count = len(row.times_us or ())
    weights = row.weights or []
    # files may contain invalid weights
    if len(weights) != count or min(weights, default=0.0) < 0 or not sum(weights) > 0:
        weights = [1.0] * count
    total = sum(weights)
    return [weight / total for weight in weights]


def repeats_of(row: Result) -> Iterator[tuple[Sequence[float], Sequence[float]]]:
    """Yield, for each repeat of a timed row, the times of its runs in us and their weights."""
    times, weights = row.times_us or [], weights_of(row)
    counts = row.repeats or []
    if sum(counts) != len(times) or min(counts, default=0) < 0:
        counts = [len(times)]
    place = 0
    for count in counts:
        if sum(weights[place : place + count]) > 0:
            yield times[place : place + count], weights[place : place + count]
        place += count
