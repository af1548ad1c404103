"""How operators' times scale with what they are run with: threads, the batch, cases at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO

from opgrip.cli.options import OUTPUT, option, titled
from opgrip.display.tables import TableColumn, print_table
from opgrip.errors import UserError
from opgrip.replay.analyses.analysis import Analysis, Session, analyses
from opgrip.replay.results.results import OK, Result

WORTH = 1.05
"""A step is worth while where it makes an operator so many times quicker."""


@titled("how they are run")
@dataclass(frozen=True, slots=True)
class SweepOptions:
    """Whether the points of a sweep are held against each other."""

    sweep: bool = option(
        False,
        "print how times scale with --threads and the like",
        only=("single cases", "one trace"),
        role=OUTPUT,
    )


@analyses.register("sweep")
class SweepAnalysis(Analysis):
    """A table for each dimension that has several points."""

    options = SweepOptions
    place = 50
    prints_partial = True

    def __init__(self, options: SweepOptions, session: Session) -> None:
        super().__init__(options, session)
        if not session.job.plan.points.is_sweep:
            raise UserError("--sweep has one point only", "give several: --threads 1,2,4, --batch-scale or --streams")

    @classmethod
    def is_requested(cls, options: SweepOptions) -> bool:
        """Where `--sweep` is given."""
        return options.sweep

    def print(self, rows: Sequence[Result], file: IO[str]) -> None:
        """Print the tables."""
        print_sweep(rows, file)


@dataclass(frozen=True, slots=True)
class Scaling:
    """An operator over the points of one dimension, the others being at their first.

    Attributes
    ----------
    operator, mode : of the rows; all cases of the operator that are ok at all points, each as often as it was called
    points : of the dimension, as they were asked for
    gains : work in a time over that of the first point: 1 there, and the number of threads at best
    turning : the last point that is worth while
    """

    operator: str
    mode: str
    points: tuple[int, ...]
    gains: tuple[float, ...]
    turning: int


DIMENSIONS: dict[str, Callable[[Result], int | None]] = {
    "threads": lambda row: row.threads,
    "batch": lambda row: row.batch_scale,
    "streams": lambda row: row.streams,
}


def scalings(results: Sequence[Result], dimension: str) -> list[Scaling]:
    """One for each operator and mode, by falling share of time at the first point; none where that is the only one."""
    point_of = DIMENSIONS[dimension]
    points = tuple(dict.fromkeys(point for row in results if (point := point_of(row)) is not None))
    if len(points) < 2:
        return []
    others = [name for name in DIMENSIONS if name != dimension]
    firsts = {name: DIMENSIONS[name](results[0]) for name in others}
    rows = [row for row in results if all(DIMENSIONS[name](row) == firsts[name] for name in others)]
    scalings_by_cost: list[tuple[float, Scaling]] = []
    for operator, mode in dict.fromkeys((_name(row), row.mode) for row in rows):
        own = [row for row in rows if (_name(row), row.mode) == (operator, mode)]
        costs = _costs(own, dimension, points)
        if costs is not None:
            gains = tuple(costs[0] / cost for cost in costs)
            scalings_by_cost.append((costs[0], Scaling(operator, mode, points, gains, _turning(points, gains))))
    return [scaling for _, scaling in sorted(scalings_by_cost, key=lambda item: -item[0])]


def print_sweep(results: Sequence[Result], file: IO[str]) -> None:
    """Print a table for each dimension that has several points."""
    for dimension in DIMENSIONS:
        curves = scalings(results, dimension)
        if not curves:
            continue
        title = f"speed-up by {dimension} over {curves[0].points[0]}, of all calls: medians for equal work, divided"
        columns = [TableColumn("operator", [item.operator for item in curves], is_number=False, least=20)]
        if len({item.mode for item in curves}) > 1:
            columns.append(TableColumn("mode", [item.mode for item in curves], is_number=False))
        columns += [
            TableColumn(str(point), [f"{item.gains[place]:.2f}" for item in curves])
            for place, point in enumerate(curves[0].points)
        ]
        columns.append(TableColumn("up to", [str(item.turning) for item in curves], rank=1))
        print_table(columns, file, title)


def _name(row: Result) -> str:
    return f"{row.op} {row.direction}" if row.direction != "forward" else row.op


def _costs(rows: Sequence[Result], dimension: str, points: Sequence[int]) -> list[float] | None:
    """Time for the same work at each point, in us; None where no case is ok at all of them."""
    point_of = DIMENSIONS[dimension]
    by_case: dict[tuple[int, str, str | None], dict[int, float]] = {}
    for row in rows:
        point = point_of(row)
        if row.status == OK and row.median_us and point is not None:
            key = (row.case, row.values, row.cache)
            work = {"batch": row.batch_scale, "streams": row.overlap or 1.0}.get(dimension, 1)
            time = row.median_us
            if dimension == "streams":
                # what it takes of the time of all that run at once
                time = by_case.get(key, {}).get(points[0], row.median_us)
            by_case.setdefault(key, {})[point] = row.count * time / work
    whole = [times for times in by_case.values() if len(times) == len(points)]
    return [sum(times[point] for times in whole) for point in points] if whole else None


def _turning(points: Sequence[int], gains: Sequence[float]) -> int:
    turning, best = points[0], gains[0]
    for point, gain in zip(points[1:], gains[1:], strict=True):
        if gain >= best * WORTH:
            turning, best = point, gain
    return turning
