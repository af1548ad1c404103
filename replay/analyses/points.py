"""What each of several --values, --threads and --cache comes to beside the first, over all cases."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import IO

from opgrip.cli.terminal import print_line
from opgrip.display.tables import TableColumn, print_table
from opgrip.replay.analyses.analysis import UnaskedAnalysis, analyses
from opgrip.replay.analyses.speed_ups import FASTER_MEANS, speed_up_columns, speed_up_of
from opgrip.replay.results.results import OK, Result

DIMENSIONS: Mapping[str, Callable[[Result], object]] = {
    "values": lambda row: row.values,
    "threads": lambda row: row.threads,
    "cache": lambda row: row.cache,
}
"""What cases are run with, each by the name of its column."""


@analyses.register("points")
class PointsAnalysis(UnaskedAnalysis):
    """A line for each point beside the first."""

    place = 45

    def print(self, rows: Sequence[Result], file: IO[str]) -> None:
        """Print the lines."""
        print_points(rows, self.session.job.plan.modes.reference, file)


def print_points(rows: Sequence[Result], reference: str, file: IO[str]) -> None:
    """Print a table for each dimension with several points, the others being at their first.

    Parameters
    ----------
    reference : the mode whose rows are compared with those of its own first point
    """
    own = [row for row in rows if row.mode == reference and row.status == OK]
    for name, point_of in DIMENSIONS.items():
        points = list(dict.fromkeys(map(point_of, own)))
        others = [other for label, other in DIMENSIONS.items() if label != name]
        alike = [row for row in own if all(other(row) == other(own[0]) for other in others)]
        speed_ups = [speed_up_of([row for row in alike if point_of(row) == point]) for point in points[1:]]
        if any(speed_ups):
            cases = ["-" if item is None else f"{item.cases:,}" for item in speed_ups]
            labels = TableColumn(name, list(map(str, points[1:])), is_number=False)
            title = f"beside {name} {points[0]}"
            print_table([labels, TableColumn("cases", cases), *speed_up_columns(speed_ups)], file, title)
            print_line(FASTER_MEANS, file)
