"""Rows of results as pictures take them: those that were timed, in series and groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opgrip.replay.plots.plot import Run
    from opgrip.replay.results.results import Result


def timed(rows: Sequence[Result]) -> list[Result]:
    """Those with a time that may be believed."""
    from opgrip.replay.results.results import OK

    return [row for row in rows if row.status == OK and row.median_us]


def time_of(row: Result) -> float:
    """Of all its calls, in us."""
    return max(row.count, 1) * (row.median_us or 0.0)


def series_of(runs: Mapping[str, Run]) -> Iterator[tuple[str, list[Result]]]:
    """The timed rows of each mode of each run, with a name; the run is in it where there are several."""
    for name, run in runs.items():
        rows = timed(run.rows)
        for mode in dict.fromkeys(row.mode for row in rows):
            yield mode if len(runs) == 1 else f"{name}: {mode}", [row for row in rows if row.mode == mode]


def longest(rows: Sequence[Result], most: int) -> list[str]:
    """The operators with most time, from the first."""
    totals: dict[str, float] = {}
    for row in rows:
        totals[row.op] = totals.get(row.op, 0.0) + time_of(row)
    return sorted(totals, key=lambda op: -totals[op])[:most]
