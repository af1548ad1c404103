"""`--kind modes`: how many times as fast as the first mode each other one is."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum
from typing import TYPE_CHECKING

from opgrip.replay.plots.plot import Plot, Request, Run, plots
from opgrip.traces.errors import UserError
from opgrip.traces.figures import add_legend, literal, marked, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


BY = ("family", "op")
"""What cases can be grouped by; the first, where nothing is asked for."""
MOST_GROUPS = 20
"""Groups that are drawn, those with most time."""
TOGETHER = 0.8
"""Of the height of a group, what its modes take."""

LABELS = ((3.0, (1.0, 1.2, 1.5, 2.0, 3.0, 5.0, 7.0)), (12.0, (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)), (300.0, (1.0, 2.0, 5.0)))
"""On axes whose ends have less than this ratio, the multiples of powers of ten that have labels."""

Speedup = tuple[float, float]
"""Of a case: the time of its calls under the reference mode, and under the other."""


def draw(request: Request) -> Figure:
    """A mark a group and mode at the speed-up of all calls, with the tenth to ninetieth percentile of its cases."""
    series, reference = _speedups(request)
    totals: dict[str, float] = {}
    for pairs_by_group in series.values():
        for group, pairs in pairs_by_group.items():
            totals[group] = max(totals.get(group, 0.0), fsum(base for base, _ in pairs))
    groups = sorted(totals, key=lambda group: -totals[group])[:MOST_GROUPS]
    figure, (axes,) = new_figure(request.title, size=(6.6, 1.4 + 0.3 * len(groups)))
    for place, (name, pairs_by_group) in enumerate(series.items()):
        offset = TOGETHER * ((place + 0.5) / len(series) - 0.5)
        _draw_series(axes, place, name, offset, [pairs_by_group.get(group, []) for group in groups])
    counts = [max(len(of_group.get(group, ())) for of_group in series.values()) for group in groups]
    labels = [f"{literal(group, 40)} ({count})" for group, count in zip(groups, counts, strict=True)]
    axes.set_yticks(range(len(groups)), labels)
    axes.set_ylim(len(groups) - 0.5, -0.5)
    axes.axvline(1.0, color="#222222", linewidth=0.8)
    _scale(axes)
    axes.set_xlabel(f"speed-up over {literal(reference)} (times); bar: middle 80 % of cases")
    by = request.by or BY[0]
    axes.set_ylabel(f"{'operator' if by == 'op' else by} (cases)")
    add_legend(figure, axes)
    return figure


def _speedups(request: Request) -> tuple[dict[str, dict[str, list[Speedup]]], str]:
    """The cases' times by series and group, and the name of the reference mode."""
    from opgrip.replay.measuring.groups import GROUPS
    from opgrip.replay.plots.rows import time_of, timed

    by = request.by or BY[0]
    series: dict[str, dict[str, list[Speedup]]] = {}
    references = {}
    for name, run in request.runs.items():
        rows = timed(run.rows)
        reference = _reference(run)
        references[reference] = True
        base = {row.identity_without("mode"): row for row in rows if row.mode == reference}
        for mode in dict.fromkeys(row.mode for row in rows if row.mode != reference):
            own: dict[str, list[Speedup]] = {}
            for row in rows:
                other = base.get(row.identity_without("mode"))
                if row.mode == mode and other is not None:
                    own.setdefault(GROUPS[by](row), []).append((time_of(other), time_of(row)))
            if own:
                share = f"{sum(map(len, own.values()))} of {len(base)} cases"
                series[f"{mode if len(request.runs) == 1 else f'{name}: {mode}'} ({share})"] = own
    if not series:
        raise UserError("the results have no case with times under two modes", "replay with --mode, such as --mode jit")
    return series, " or ".join(references)


def _reference(run: Run) -> str:
    """The mode of the first row."""
    return next((row.mode for row in run.rows), "")


def _draw_series(axes: Axes, place: int, name: str, offset: float, groups: Sequence[Sequence[Speedup]]) -> None:
    import numpy as np

    drawn = [(number + offset, pairs) for number, pairs in enumerate(groups) if pairs]
    heights = [height for height, _ in drawn]
    middles = [fsum(base for base, _ in pairs) / fsum(own for _, own in pairs) for _, pairs in drawn]
    style = marked(place)
    quantiles = [np.quantile([base / own for base, own in pairs], (0.1, 0.9)) for _, pairs in drawn]
    axes.hlines(heights, [low for low, _ in quantiles], [high for _, high in quantiles], color=style["color"], lw=1.0)
    axes.plot(middles, heights, linestyle="", label=literal(name), **style)


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
