"""`--kind shapes`: time over the bytes that a call moves, or its operations, an operator a panel."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import TYPE_CHECKING

from opgrip.display.figures import add_legend, label_axis, literal, logarithmic, marked, new_figure
from opgrip.errors import UserError
from opgrip.replay.plots.plot import Plot, Request, plots

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from opgrip.replay.results.results import Result

MOST_PANELS = 9
"""Operators that are drawn, those with most time."""
AXES = {"bytes": ("bytes_moved", "bytes moved", "B"), "flops": ("flops", "operations", "flop")}
"""By the value of `--over`: the column, its name on the axis, and the unit."""


def draw(request: Request) -> Figure:
    """A point a case at its median, with its tenth and ninetieth percentile; a series a mode."""
    from opgrip.replay.plots.plotted_rows import longest, series_of

    column, name, unit = AXES[request.over or "bytes"]
    series = {name: [row for row in rows if getattr(row, column)] for name, rows in series_of(request.runs)}
    rows = [row for own in series.values() for row in own]
    if not rows:
        raise UserError(f"no row has a time and {column}", "choose other operators, or another --over")
    operators = longest(rows, MOST_PANELS)
    width = min(len(operators), 3)
    height = ceil(len(operators) / width)
    size = (1.4 + 2.3 * width, 1.2 + 1.9 * height) if len(operators) > 1 else (4.6, 3.6)
    figure, grid = new_figure(request.title, height, width, sharex=True, sharey=True, size=size)
    shown = [row for row in rows if row.op in operators]
    for axes, op in zip(grid, operators, strict=False):
        axes.set_title(literal(op, 34))
        for place, (label, own) in enumerate(series.items()):
            _draw_series(axes, place, label, [row for row in own if row.op == op], column)
    logarithmic(grid[0], "x", [float(getattr(row, column)) for row in shown])
    logarithmic(grid[0], "y", [time for row in shown for time in _band(row)])
    for axes in grid[len(operators) :]:
        axes.set_visible(False)
    for place, axes in enumerate(grid[: len(operators)]):
        is_lowest, is_first = place + width >= len(operators), place % width == 0
        label_axis(axes.xaxis, name if is_lowest else "", unit)
        label_axis(axes.yaxis, "time" if is_first else "", "s", 1e-6)
        axes.tick_params(labelbottom=is_lowest)
    add_legend(figure, grid[0])
    return figure


def _draw_series(axes: Axes, place: int, label: str, rows: Sequence[Result], column: str) -> None:
    """Also where a panel has none of it, so that the legend of the first has all series."""
    style = marked(place) | {"linestyle": "", "label": literal(label, 40), "alpha": 0.8}
    medians = [row.median_us or 0.0 for row in rows]
    bands = [_band(row) for row in rows]
    errors = (
        [median - low for median, (low, _) in zip(medians, bands, strict=True)],
        [high - median for median, (_, high) in zip(medians, bands, strict=True)],
    )
    axes.errorbar([getattr(row, column) for row in rows], medians, errors, elinewidth=0.8, **style)


def _band(row: Result) -> tuple[float, float]:
    """Its tenth and ninetieth percentile around its median, in us."""
    median = row.median_us or 0.0
    return min(row.p10_us or median, median), max(row.p90_us or median, median)


plots.register("shapes")(Plot("time over bytes or flops, an operator a panel", draw, over=tuple(AXES)))
