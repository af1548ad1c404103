"""`--kind modes`: how many times as fast as the first mode each other one is."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum
from typing import TYPE_CHECKING

from opgrip.display.figures import add_legend, literal, marked, new_figure
from opgrip.errors import UserError
from opgrip.replay.plots.plot import Plot, Request, plots

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from opgrip.replay.results.results import Result


BY = ("family", "op")
"""What cases can be grouped by; the first, where nothing is asked for."""
MOST_GROUPS = 20
"""Groups that are drawn, those with most time."""
TOGETHER = 0.8
"""Of the height of a group, what its modes take."""

LABELS = ((3.0, (1.0, 1.2, 1.5, 2.0, 3.0, 5.0, 7.0)), (12.0, (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)), (300.0, (1.0, 2.0, 5.0)))
"""On axes whose ends have less than this ratio, the multiples of powers of ten that have labels."""


def draw(request: Request) -> Figure:
    """Draw the speed-up of each group and mode as `speed_up_of` has it: geometric mean, and most of its cases."""
    from opgrip.replay.plots.plotted_rows import time_of

    series, reference = _rows_by_group(request)
    totals: dict[str, float] = {}
    for rows_by_group in series.values():
        for group, rows in rows_by_group.items():
            totals[group] = max(totals.get(group, 0.0), fsum(map(time_of, rows)))
    groups = sorted(totals, key=lambda group: -totals[group])[:MOST_GROUPS]
    figure, (axes,) = new_figure(request.title, size=(6.6, 1.4 + 0.3 * len(groups)))
    for place, (name, rows_by_group) in enumerate(series.items()):
        offset = TOGETHER * ((place + 0.5) / len(series) - 0.5)
        _draw_series(axes, place, name, offset, [rows_by_group.get(group, []) for group in groups])
    counts = [max(len(of_group.get(group, ())) for of_group in series.values()) for group in groups]
    labels = [f"{literal(group, 40)} ({count})" for group, count in zip(groups, counts, strict=True)]
    axes.set_yticks(range(len(groups)), labels)
    axes.set_ylim(len(groups) - 0.5, -0.5)
    axes.axvline(1.0, color="#222222", linewidth=0.8)
    _scale(axes)
    axes.set_xlabel(f"speed-up over {literal(reference)} (geometric mean of cases); bar: middle 80 % of cases")
    by = request.by or BY[0]
    axes.set_ylabel(f"{'operator' if by == 'op' else by} (cases)")
    add_legend(figure, axes)
    return figure


def _rows_by_group(request: Request) -> tuple[dict[str, dict[str, list[Result]]], str]:
    """Return the rows that have a speed-up by series and group, and the name of the reference mode."""
    from opgrip.replay.plots.plotted_rows import timed
    from opgrip.replay.results.ratios import GROUPS, reference_of, with_ratios_by_case

    group_of = GROUPS[request.by or BY[0]]
    series: dict[str, dict[str, list[Result]]] = {}
    references = {}
    for name, run in request.runs.items():
        reference = reference_of(run.rows)
        rows = timed(with_ratios_by_case(run.rows, reference))
        references[reference] = True
        cases = sum(row.mode == reference for row in rows)
        for mode in dict.fromkeys(row.mode for row in rows if row.mode != reference):
            own: dict[str, list[Result]] = {}
            for row in rows:
                if row.mode == mode and row.speed_up is not None:
                    own.setdefault(group_of(row), []).append(row)
            if own:
                share = f"{sum(map(len, own.values()))} of {cases} cases"
                series[f"{mode if len(request.runs) == 1 else f'{name}: {mode}'} ({share})"] = own
    if not series:
        raise UserError("the results have no case with times under two modes", "replay with --mode, such as --mode jit")
    return series, " or ".join(references)


def _draw_series(axes: Axes, place: int, name: str, offset: float, groups: Sequence[Sequence[Result]]) -> None:
    from opgrip.replay.analyses.speed_ups import speed_up_of

    drawn = [(number + offset, found) for number, rows in enumerate(groups) if (found := speed_up_of(rows))]
    heights = [height for height, _ in drawn]
    style = marked(place)
    lows, highs = ([getattr(found, side) for _, found in drawn] for side in ("low", "high"))
    axes.hlines(heights, lows, highs, color=style["color"], lw=1.0)
    axes.plot([found.mean for _, found in drawn], heights, linestyle="", label=literal(name), **style)


def _scale(axes: Axes) -> None:
    """Logarithmic, so that twice as fast is as far from 1 as half as fast, with plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    axes.set_xscale("log")
    axes.autoscale(axis="x")
    low, high = axes.get_xlim()
    multiples = next((parts for most, parts in LABELS if high / low < most), (1.0,))
    axes.xaxis.set_major_locator(LogLocator(subs=multiples, numticks=12))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


plots.register("modes")(Plot("speed-up of each mode over the first", draw, by=BY))
