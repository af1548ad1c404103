"""Plots of how times grow: over threads, batch or streams, over bytes or operations, and the roofline."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, fsum
from typing import TYPE_CHECKING, Any

from opgrip.display.figures import add_legend, label_axis, literal, logarithmic, marked, new_figure
from opgrip.errors import UserError
from opgrip.replay.plots.plot import Plot, PlotRequest, plots

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from opgrip.replay.results.results import Result


VARIED = {"threads": "threads", "batch_scale": "batch, times the recorded one", "streams": "cases at once"}
"""axis labels of the columns over which times can scale"""
IDEALS = {"threads": -1.0, "batch_scale": 1.0}
"""exponent of ideal scaling: time falls with the number of threads and grows with the batch"""


def draw_scaling(request: PlotRequest) -> Figure:
    """Return a plot with one line per mode: total time, with a band from the 10th to the 90th percentile of cases."""
    from opgrip.replay.plots.plot import series_of

    series = dict(series_of(request.runs))
    column = request.over or _varied([row for rows in series.values() for row in rows])
    figure, (axes,) = new_figure(request.title, size=(4.6, 3.6))
    values: set[int] = set()
    for place, (name, rows) in enumerate(series.items()):
        values.update(_draw_scaling_series(axes, place, name, rows, column))
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
    """Return the only column in which the rows differ; raise `UserError` if there is none or several."""
    names = [name for name in VARIED if len({getattr(row, name) for row in rows} - {None}) > 1]
    if not names:
        raise UserError("the rows have one number of threads, one batch and one stream", "replay with --threads 1,2,4")
    if len(names) > 1:
        raise UserError(f"the rows differ in {' and '.join(names)}", "say which is drawn, such as --over " + names[0])
    return names[0]


def _flag(column: str) -> str:
    return f"--{column.replace('_', '-')} 1,2,4"


def _draw_scaling_series(axes: Axes, place: int, name: str, rows: list[Result], column: str) -> list[int]:
    """Draw the cases that were timed at all values of the column, and return these values."""
    import numpy as np

    from opgrip.replay.plots.plot import time_of

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
    axes.set_xlabel(VARIED[column])
    axes.set_ylabel(f"time (relative to {ticks[0]:,})")


plots.register("scaling")(Plot("time over threads, batch_scale or streams", draw_scaling, over=tuple(VARIED)))


MOST_PANELS = 9
"""most operators drawn, those with the longest total time"""
WORK = {"bytes": ("bytes_moved", "bytes moved", "B"), "flops": ("flops", "operations", "flop")}
"""column, axis label and unit, by value of `--over`"""


def draw_shapes(request: PlotRequest) -> Figure:
    """Return a plot with one point per case at its median, bars from 10th to 90th percentile, and one series per
    mode.
    """
    from opgrip.replay.plots.plot import longest, series_of

    column, name, unit = WORK[request.over or "bytes"]
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
            _draw_points(axes, place, label, [row for row in own if row.op == op], column)
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


def _draw_points(axes: Axes, place: int, label: str, rows: Sequence[Result], column: str) -> None:
    """Draw the points of a series, even if empty, because the legend of the first panel must list all series."""
    style = marked(place) | {"linestyle": "", "label": literal(label, 40), "alpha": 0.8}
    medians = [row.median_us or 0.0 for row in rows]
    bands = [_band(row) for row in rows]
    errors = (
        [median - low for median, (low, _) in zip(medians, bands, strict=True)],
        [high - median for median, (_, high) in zip(medians, bands, strict=True)],
    )
    axes.errorbar([getattr(row, column) for row in rows], medians, errors, elinewidth=0.8, **style)


def _band(row: Result) -> tuple[float, float]:
    """Return the 10th and 90th percentile, widened to include the median, in us."""
    median = row.median_us or 0.0
    return min(row.p10_us or median, median), max(row.p90_us or median, median)


plots.register("shapes")(Plot("time over bytes or flops, an operator a panel", draw_shapes, over=tuple(WORK)))


def draw_roofline(request: PlotRequest) -> Figure:
    """Return the roofline that `opreplay --roofline -o x.svg` draws; the results must contain the machine's peaks."""
    from opgrip.replay.analyses.roofline import drawing
    from opgrip.traces.analysis.machine_ceilings import from_json

    (run,) = request.runs.values()
    if "ceilings" not in run.header:
        raise UserError("the results do not hold the machine's limits", "replay with --roofline")
    try:
        ceilings, threads = from_json(run.header["ceilings"]), int(run.header.get("threads", 1))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError("the machine's limits in the results are damaged", "replay with --roofline") from error
    return drawing.draw(run.rows, ceilings, threads, request.title)


plots.register("roofline")(Plot("calls under the machine's ceilings", draw_roofline, most=1))
