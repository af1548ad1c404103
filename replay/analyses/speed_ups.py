"""How much quicker rows are than those that they are compared with, over all cases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from opgrip.display.tables import TableColumn
from opgrip.replay.results.results import OK, Result

FASTER_MEANS = "speed-up: geometric mean over the cases; faster, slower: cases in which nine of ten paired runs are"
"""What the columns of `speed_up_columns` mean."""


@dataclass(frozen=True, slots=True)
class SpeedUp:
    """How much faster rows are than the rows that they are compared with.

    Attributes
    ----------
    cases : ok rows that have a ratio
    mean : geometric mean of their speed-ups, each case once
    low, high : 10th and 90th percentile of the speed-ups over the cases; of a single case, over its paired runs
    weighted : the mean with each case as often as it was called
    faster, slower : cases whose median and at least nine of ten paired runs are faster, or slower
    """

    cases: int
    mean: float
    low: float
    high: float
    weighted: float
    faster: int
    slower: int


def speed_up_of(rows: Sequence[Result]) -> SpeedUp | None:
    """Return the speed-up over rows with a ratio; None if there are none."""
    import numpy as np

    compared = [row for row in rows if row.status == OK and row.speed_up]
    if not compared:
        return None
    logs = np.log([row.speed_up or 1.0 for row in compared])
    counts = np.array([max(row.count, 1) for row in compared])
    low, high = np.exp(np.quantile(logs, (0.1, 0.9)))
    if len(compared) == 1:
        (row,) = compared
        low, high = sorted(1 / (ratio or row.ratio or 1.0) for ratio in (row.ratio_p10, row.ratio_p90))
    return SpeedUp(
        cases=len(compared),
        mean=float(np.exp(logs.mean())),
        low=float(low),
        high=float(high),
        weighted=float(np.exp(np.average(logs, weights=counts))),
        faster=sum(max(row.ratio or 1, row.ratio_p90 or 1) < 1 for row in compared),
        slower=sum(min(row.ratio or 1, row.ratio_p10 or 1) > 1 for row in compared),
    )


def speed_up_columns(speed_ups: Sequence[SpeedUp | None]) -> list[TableColumn]:
    """Columns of a table with a row for each."""

    def cells(name: str, form: str) -> list[str]:
        return ["-" if item is None else format(getattr(item, name), form) for item in speed_ups]

    return [
        TableColumn("speed-up", cells("mean", ".2f")),
        TableColumn("p10", cells("low", ".2f"), rank=1),
        TableColumn("p90", cells("high", ".2f"), rank=1),
        TableColumn("by calls", cells("weighted", ".2f"), rank=2),
        TableColumn("faster", cells("faster", "d"), rank=1),
        TableColumn("slower", cells("slower", "d"), rank=1),
    ]
