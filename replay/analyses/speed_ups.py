"""Speed-ups between modes, and between values of an option such as --values, --threads or --cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import IO

from opgrip.cli.command import counted
from opgrip.cli.options import OUTPUT, option, titled
from opgrip.cli.terminal import print_line
from opgrip.display.tables import TableColumn, print_table
from opgrip.errors import UserError
from opgrip.replay.analyses import Analysis, AnalysisSession, UnaskedAnalysis, analyses
from opgrip.replay.modes import CANDIDATE
from opgrip.replay.results.results import CONTENDED, FAILED, OK, TIMEOUT, UNSUPPORTED, WRONG, Result

FASTER_MEANS = (
    "speed-up: geometric mean over the cases; by calls: the same mean, weighted by number of calls; "
    "faster, slower: number of cases in which nine of ten paired runs are faster or slower"
)
FIRST_MEANS = "first calls s: total time in seconds of the first call of each case, with compiling and loading"


@dataclass(frozen=True, slots=True)
class SpeedUp:
    """The speed-up of a group of rows, each over the row with which it is compared.

    mean : geometric mean over the cases, each counted once
    weighted : geometric mean over the cases, weighted by their number of calls
    """

    cases: int
    mean: float
    low: float
    high: float
    weighted: float
    faster: int
    slower: int


def speed_up_of(rows: Sequence[Result]) -> SpeedUp | None:
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


def _of_speed_up(heading: str, name: str, form: str, rank: int = 0) -> TableColumn:
    return TableColumn(heading, lambda row: None if row.speed_up is None else getattr(row.speed_up, name), form, rank)


# columns of rows that have a `speed_up`, which may be None
SPEED_UP_COLUMNS = (
    _of_speed_up("speed-up", "mean", ".2f"),
    _of_speed_up("p10", "low", ".2f", rank=1),
    _of_speed_up("p90", "high", ".2f", rank=1),
    _of_speed_up("by calls", "weighted", ".2f", rank=2),
    _of_speed_up("faster", "faster", "d", rank=1),
    _of_speed_up("slower", "slower", "d", rank=1),
)


@dataclass(frozen=True, slots=True)
class SweepPoint:
    name: str
    speed_up: SpeedUp | None


DIMENSIONS = ("values", "threads", "cache")  # columns that can have several values in one run


@analyses.register("points")
class PointsAnalysis(UnaskedAnalysis):
    order = 45

    def print(self, rows: Sequence[Result], file: IO[str]) -> None:
        print_points(rows, self.session.workload.request.modes.reference, file)


def print_points(rows: Sequence[Result], reference: str, file: IO[str]) -> None:
    own = [row for row in rows if row.mode == reference and row.status == OK]
    for name in DIMENSIONS:
        point_of = attrgetter(name)
        points = list(dict.fromkeys(map(point_of, own)))
        others = attrgetter(*(other for other in DIMENSIONS if other != name))
        alike = [row for row in own if others(row) == others(own[0])]
        compared = [
            SweepPoint(str(point), speed_up_of([row for row in alike if point_of(row) == point]))
            for point in points[1:]
        ]
        if any(item.speed_up for item in compared):
            columns = [TableColumn(name, "name"), _of_speed_up("cases", "cases", ",d"), *SPEED_UP_COLUMNS]
            print_table(columns, compared, file, f"compared with {name} {points[0]}")
            print_line(FASTER_MEANS, file)


STATUSES = (OK, WRONG, UNSUPPORTED, FAILED, TIMEOUT, CONTENDED)


@analyses.register("modes")
class ModesAnalysis(UnaskedAnalysis):
    order = 40

    def print(self, rows: Sequence[Result], file: IO[str]) -> None:
        print_modes(rows, self.session.workload.request.modes.reference, file)


@dataclass(frozen=True, slots=True)
class ModeSummary:
    mode: str
    statuses: Counter[str]
    speed_up: SpeedUp | None
    first_s: float


def summarize_modes(results: Sequence[Result], reference: str) -> list[ModeSummary]:
    rows_by_mode: dict[str, list[Result]] = {}
    for row in results:
        rows_by_mode.setdefault(row.mode, []).append(row)
    rows_by_mode.pop(reference, None)
    # candidates get verdicts instead
    rows_by_mode.pop(CANDIDATE, None)
    return [
        ModeSummary(
            mode, Counter(row.status for row in rows), speed_up_of(rows), sum(row.first_ms or 0.0 for row in rows) / 1e3
        )
        for mode, rows in rows_by_mode.items()
    ]


def print_modes(results: Sequence[Result], reference: str, file: IO[str]) -> None:
    summaries = summarize_modes(results, reference)
    if not summaries:
        return
    columns = [
        TableColumn("mode", "mode"),
        *(_status_column(status, summaries) for status in STATUSES),
        *SPEED_UP_COLUMNS,
        TableColumn("first calls s", "first_s", ",.1f", rank=3),
    ]
    print_table(columns, summaries, file, f"compared with {reference}")
    if any(item.speed_up for item in summaries):
        print_line(FASTER_MEANS, file)
    print_line(FIRST_MEANS, file)
    slowed = sum(row.is_slowed and row.status == OK for row in results)
    if slowed:
        of_all = counted(len(results), "row")
        print_line(
            f"{slowed} of {of_all} were timed while the processor was slowed down, so their ratios are doubtful", file
        )


def _status_column(status: str, summaries: Sequence[ModeSummary]) -> TableColumn:
    # columns of statuses that no row has are the first to be dropped from a narrow table
    rank = 0 if any(item.statuses[status] for item in summaries) else 4
    return TableColumn(status, lambda item: item.statuses[status], "d", rank)


WORTH = 1.05  # minimum additional speed-up for which a larger value is worth using


@titled("execution")
@dataclass(frozen=True, slots=True)
class SweepOptions:
    sweep: bool = option(
        False,
        "print how times scale over several values of --threads, --batch-scale or --streams",
        only=("single cases", "one trace"),
        role=OUTPUT,
        common=True,
    )


@analyses.register("sweep")
class SweepAnalysis(Analysis):
    options = SweepOptions
    order = 50
    prints_partial = True

    def __init__(self, options: SweepOptions, session: AnalysisSession) -> None:
        super().__init__(options, session)
        if not session.workload.request.points.is_sweep:
            raise UserError(
                "--sweep needs an option with several values",
                "add --threads 1,2,4, or several values of --batch-scale or --streams",
            )

    @classmethod
    def is_requested(cls, options: SweepOptions) -> bool:
        return options.sweep

    def print(self, rows: Sequence[Result], file: IO[str]) -> None:
        print_sweep(rows, file)


@dataclass(frozen=True, slots=True)
class Scaling:
    """How an operator's throughput changes with one option, over all cases that are ok at all values.

    gains : throughput at each value, relative to the first value
    """

    operator: str
    mode: str
    points: tuple[int, ...]
    gains: tuple[float, ...]
    turning: int


SWEPT = {"threads": "threads", "batch": "batch_scale", "streams": "streams"}  # columns by name of the dimension


def scalings(results: Sequence[Result], dimension: str) -> list[Scaling]:
    point_of = attrgetter(SWEPT[dimension])
    points: tuple[int, ...] = tuple(dict.fromkeys(point for row in results if (point := point_of(row)) is not None))
    if len(points) < 2:
        return []
    others = attrgetter(*(column for name, column in SWEPT.items() if name != dimension))
    rows = [row for row in results if others(row) == others(results[0])]
    scalings_by_cost: list[tuple[float, Scaling]] = []
    for operator, mode in dict.fromkeys((_name(row), row.mode) for row in rows):
        own = [row for row in rows if (_name(row), row.mode) == (operator, mode)]
        costs = _costs(own, dimension, points)
        if costs is not None:
            gains = tuple(costs[0] / cost for cost in costs)
            scalings_by_cost.append((costs[0], Scaling(operator, mode, points, gains, _turning(points, gains))))
    return [scaling for _, scaling in sorted(scalings_by_cost, key=lambda item: -item[0])]


def print_sweep(results: Sequence[Result], file: IO[str]) -> None:
    for dimension in SWEPT:
        curves = scalings(results, dimension)
        if not curves:
            continue
        title = f"speed-up over {dimension} {curves[0].points[0]}: ratio of the medians of all calls for equal work"
        has_modes = len({item.mode for item in curves}) > 1
        columns = [TableColumn("operator", "operator", least=20), *([TableColumn("mode", "mode")] if has_modes else [])]
        columns += [
            TableColumn(str(point), partial(lambda index, curve: curve.gains[index], index), ".2f")
            for index, point in enumerate(curves[0].points)
        ]
        columns.append(TableColumn("up to", "turning", "d", rank=1))
        print_table(columns, curves, file, title)


def _name(row: Result) -> str:
    return f"{row.op} {row.direction}" if row.direction != "forward" else row.op


def _costs(rows: Sequence[Result], dimension: str, points: Sequence[int]) -> list[float] | None:
    by_case: dict[object, dict[int, Result]] = {}
    for row in rows:
        point = getattr(row, SWEPT[dimension])
        if row.status == OK and row.median_us and point is not None:
            by_case.setdefault((row.case_of_trace, row.values, row.cache), {})[point] = row
    whole = [own for own in by_case.values() if len(own) == len(points)]
    return [sum(_cost(own[points[0]], own[point], dimension) for own in whole) for point in points] if whole else None


def _cost(first: Result, row: Result, dimension: str) -> float:
    if dimension == "streams":
        # the cost of concurrent runs is the time at the first value divided by their overlap
        return row.count * (first.median_us or 0.0) / (row.overlap or 1.0)
    return row.count * (row.median_us or 0.0) / (row.batch_scale if dimension == "batch" else 1)


def _turning(points: Sequence[int], gains: Sequence[float]) -> int:
    turning, best = points[0], gains[0]
    for point, gain in zip(points[1:], gains[1:], strict=True):
        if gain >= best * WORTH:
            turning, best = point, gain
    return turning
