"""How much quicker rows are than those that they are compared with, over all cases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from opgrip.replay.measuring.results import OK, Result
from opgrip.traces.tables import TableColumn


@dataclass(frozen=True, slots=True)
class SpeedUp:
    """Rows beside those that they are compared with.

    Attributes
    ----------
    cases : that are ok and compared
    mean : geometric mean of the other's time over the row's, each case once
    low, high : 10th and 90th percentile of that over the cases; of a single case, over its runs
    weighted : the mean with each case as often as it was called
    gains, loses : cases that nine of ten runs say are quicker, or slower
    """

    cases: int
    mean: float
    low: float
    high: float
    weighted: float
    gains: int
    loses: int


def speed_up_of(rows: Sequence[Result]) -> SpeedUp | None:
    """Over rows with a ratio; None where there is none."""
    import numpy as np

    compared = [row for row in rows if row.status == OK and row.ratio]
    if not compared:
        return None
    logs = np.array([-np.log(row.ratio or 1.0) for row in compared])
    counts = np.array([row.count for row in compared])
    ratios = [row.ratio for row in compared]
    if len(compared) == 1:
        (row,) = compared
        ratios = [row.ratio_p10 or row.ratio, row.ratio_p90 or row.ratio]
    low, high = np.quantile([1 / ratio for ratio in ratios if ratio], (0.1, 0.9) if len(compared) > 1 else (0, 1))
    return SpeedUp(
        cases=len(compared),
        mean=float(np.exp(logs.mean())),
        low=float(low),
        high=float(high),
        weighted=float(np.exp(np.average(logs, weights=counts))),
        gains=sum((row.ratio_p90 or 1) < 1 for row in compared),
        loses=sum((row.ratio_p10 or 1) > 1 for row in compared),
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
        TableColumn("gain", cells("gains", "d"), rank=1),
        TableColumn("lose", cells("loses", "d"), rank=1),
    ]
