"""`--kind operators`: the time of all calls, by operator."""

from __future__ import annotations

from math import fsum
from typing import TYPE_CHECKING

from opgrip.display.figures import add_legend, label_axis, literal, marked, new_figure
from opgrip.errors import UserError
from opgrip.replay.plots.plot import Plot, Request, plots

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from opgrip.replay.results.results import Result

BY = ("op", "family", "module")
"""What cases can be grouped by; the first, where nothing is asked for."""
MOST_GROUPS = 20
"""Groups that are drawn, those with most time."""
LEAST_SHARE = 0.001
"""Of all time, what a group takes at least that is drawn."""
TOGETHER = 0.8
"""Of the height of a group, what its bars take."""
CAPTURED = "captured"
"""The series of the times in the program."""


def draw(request: Request) -> Figure:
    """A bar a group and series: the time of its calls by their replayed medians, beside that in the program."""
    from opgrip.replay.results.ratios import shares_by

    by = request.by or BY[0]
    series = _series(request)
    totals: dict[str, dict[str, float]] = {}
    for name, times in series.items():
        for row, time_us in times:
            for group, share in shares_by(row, by).items():
                totals.setdefault(group, dict.fromkeys(series, 0.0))[name] += share * time_us
    longest = {group: max(times.values()) for group, times in totals.items()}
    least = LEAST_SHARE * fsum(longest.values())
    groups = sorted((group for group in longest if longest[group] >= least), key=lambda group: -longest[group])
    del groups[MOST_GROUPS:]
    figure, (axes,) = new_figure(request.title, size=(6.6, 1.4 + 0.24 * len(groups) * max(1.0, len(series) / 3)))
    thickness = TOGETHER / len(series)
    for place, name in enumerate(series):
        offset = TOGETHER * ((place + 0.5) / len(series) - 0.5)
        widths = [totals[group][name] for group in groups]
        color = "#bbbbbb" if name == CAPTURED else marked(place)["color"]
        heights = [number + offset for number in range(len(groups))]
        label = f"{literal(name, 28)}, {_seconds(fsum(times[name] for times in totals.values()))}"
        axes.barh(heights, widths, thickness, color=color, label=label)
    axes.set_yticks(range(len(groups)), [literal(group, 40) for group in groups])
    axes.set_ylim(len(groups) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    label_axis(axes.xaxis, "time of all calls", "s", 1e-6)
    if len(groups) < len(totals):
        axes.set_ylabel(f"{len(totals) - len(groups):,} shorter ones are left out")
    add_legend(figure, axes)
    return figure


def _series(request: Request) -> dict[str, list[tuple[Result, float]]]:
    """By name, rows with the time of all their calls: those in the program of the first series, then of each series."""
    from opgrip.replay.plots.plotted_rows import series_of, time_of

    replayed = dict(series_of(request.runs))
    if not replayed:
        raise UserError("the results have no case with a time", "see their column error, or opreplay --strict")
    series = {name: [(row, time_of(row)) for row in _first_ways(rows)] for name, rows in replayed.items()}
    first = _first_ways(next(iter(replayed.values())))
    captured = [(row, max(row.count, 1) * row.captured_us) for row in first if row.captured_us]
    return {CAPTURED: captured, **series} if captured and CAPTURED not in series else series


def _first_ways(rows: list[Result]) -> list[Result]:
    """Of the rows of a mode each case once, as it was run first: other threads or values are not more calls."""
    from opgrip.replay.results.results import WAY

    cases: dict[tuple[object, ...], Result] = {}
    for row in rows:
        cases.setdefault((row.case, *row.identity_without(*WAY)), row)
    return list(cases.values())


def _seconds(time_us: float) -> str:
    from matplotlib.ticker import EngFormatter

    return EngFormatter("s", places=1)(time_us * 1e-6)


plots.register("operators")(Plot("time of all calls by operator, captured and replayed", draw, by=BY))
