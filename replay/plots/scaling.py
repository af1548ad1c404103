"""`--kind scaling`: time over threads, batch or streams, relative to the first of them."""

from __future__ import annotations

from math import fsum
from typing import TYPE_CHECKING, Any

from opgrip.display.figures import add_legend, literal, marked, new_figure
from opgrip.errors import UserError
from opgrip.replay.plots.plot import Plot, Request, plots

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from opgrip.replay.results.results import Result

AXES = {"threads": "threads", "batch_scale": "batch, times the recorded one", "streams": "cases at once"}
"""Columns that rows are varied by, and what they are called on an axis."""
IDEALS = {"threads": -1.0, "batch_scale": 1.0}
"""The power of the column that a time would have if the work were shared out, or were more, in proportion."""


def draw(request: Request) -> Figure:
    """A line a mode: the time of all calls, with the tenth to ninetieth percentile of its cases as a band."""
    from opgrip.replay.plots.plotted_rows import series_of

    series = dict(series_of(request.runs))
    column = request.over or _varied([row for rows in series.values() for row in rows])
    figure, (axes,) = new_figure(request.title, size=(4.6, 3.6))
    values: set[int] = set()
    for place, (name, rows) in enumerate(series.items()):
        values.update(_draw_series(axes, place, name, rows, column))
    if not values:
        raise UserError(f"no case was timed at two values of {column}", f"replay with {_flag(column)}")
    ticks = sorted(values)
    if column in IDEALS:
        ideal = [(value / ticks[0]) ** IDEALS[column] for value in ticks]
        axes.plot(ticks, ideal, color="#222222", linestyle=":", label="in proportion")
    _label(axes, column, ticks)
    add_legend(figure, axes, 2)
    return figure


def _varied(rows: list[Result]) -> str:
    """The column that the rows differ in."""
    names = [name for name in AXES if len({getattr(row, name) for row in rows} - {None}) > 1]
    if not names:
        raise UserError("the rows have one number of threads, one batch and one stream", "replay with --threads 1,2,4")
    if len(names) > 1:
        raise UserError(f"the rows differ in {' and '.join(names)}", "say which is drawn, such as --over " + names[0])
    return names[0]


def _flag(column: str) -> str:
    return f"--{column.replace('_', '-')} 1,2,4"


def _draw_series(axes: Axes, place: int, name: str, rows: list[Result], column: str) -> list[int]:
    """Draw the cases that were timed at all values; the values."""
    import numpy as np

    from opgrip.replay.plots.plotted_rows import time_of

    by_case: dict[Any, dict[int, float]] = {}
    for row in rows:
        value = getattr(row, column)
        if value is not None:
            by_case.setdefault(row.identity_without("mode", column), {})[int(value)] = time_of(row)
    values = sorted({value for times in by_case.values() for value in times})
    whole = [times for times in by_case.values() if len(times) == len(values)]
    if len(values) < 2 or not whole:
        return []
    first = values[0]
    total = [fsum(times[value] for times in whole) for value in values]
    ratios = np.array([[times[value] / times[first] for value in values] for times in whole])
    style = marked(place)
    axes.fill_between(values, *np.quantile(ratios, (0.1, 0.9), axis=0), color=style["color"], alpha=0.15, linewidth=0)
    label = f"{literal(name, 40)} ({len(whole)} of {len(by_case)} cases)"
    axes.plot(values, [time / total[0] for time in total], label=label, **style)
    return values


def _label(axes: Axes, column: str, ticks: list[int]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(ticks, [f"{value:,}" for value in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    low, high = axes.get_ylim()
    subs = (1.0, 2**0.5) if high / low < 4 else (1.0,)
    axes.yaxis.set_major_locator(LogLocator(base=2, subs=subs, numticks=12))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    axes.set_xlabel(AXES[column])
    axes.set_ylabel(f"time (relative to {ticks[0]:,})")


plots.register("scaling")(Plot("time over threads, batch_scale or streams", draw, over=tuple(AXES)))
