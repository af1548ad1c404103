"""Plots of times by operator, by mode, and over the runs of a store."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from math import fsum
from typing import TYPE_CHECKING

from opgrip.cli.command import counted
from opgrip.display.figures import add_legend, label_axis, literal, marked, new_figure
from opgrip.errors import UserError
from opgrip.replay.plots.plot import Plot, PlotRequest, PlottedRun, plots

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from opgrip.replay.results.results import Result


OPERATOR_GROUPS = ("op", "family", "module")
"""groupings of cases, default first"""
MOST_GROUPS = 20
"""most groups drawn, those with the longest time"""
LEAST_SHARE = 0.001
"""smallest share of all time at which a group is drawn"""
TOGETHER = 0.8
"""share of a group's height that its bars fill"""
CAPTURED = "captured"
"""name of the series of captured times"""


def draw_operators(request: PlotRequest) -> Figure:
    """Return a plot with one bar per group and series: total time by replayed medians, next to the captured time."""
    from opgrip.replay.results.ratios import shares_by

    by = request.by or OPERATOR_GROUPS[0]
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


def _series(request: PlotRequest) -> dict[str, list[tuple[Result, float]]]:
    """Return rows with the time of all their calls by series: captured times first, then each replayed series."""
    from opgrip.replay.plots.plot import series_of, time_of

    replayed = dict(series_of(request.runs))
    if not replayed:
        raise UserError("the results have no case with a time", "see their column error, or opreplay --strict")
    series = {name: [(row, time_of(row)) for row in _first_ways(rows)] for name, rows in replayed.items()}
    first = _first_ways(next(iter(replayed.values())))
    captured = [(row, max(row.count, 1) * row.captured_us) for row in first if row.captured_us]
    return {CAPTURED: captured, **series} if captured and CAPTURED not in series else series


def _first_ways(rows: list[Result]) -> list[Result]:
    """Return the first row of each case, because further variants such as thread counts do not add calls."""
    from opgrip.replay.results.results import WAY

    cases: dict[tuple[object, ...], Result] = {}
    for row in rows:
        cases.setdefault((row.case, *row.identity_without(*WAY)), row)
    return list(cases.values())


def _seconds(time_us: float) -> str:
    from matplotlib.ticker import EngFormatter

    return EngFormatter("s", places=1)(time_us * 1e-6)


plots.register("operators")(
    Plot("time of all calls by operator, captured and replayed", draw_operators, by=OPERATOR_GROUPS)
)


MODE_GROUPS = ("family", "op")
"""groupings of cases, default first"""

LABELS = ((3.0, (1.0, 1.2, 1.5, 2.0, 3.0, 5.0, 7.0)), (12.0, (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)), (300.0, (1.0, 2.0, 5.0)))
"""(ratio, multiples): axes whose ends have less than this ratio label these multiples of powers of ten"""


def draw_modes(request: PlotRequest) -> Figure:
    """Return a plot of the speed-up of each group and mode: geometric mean, with a bar over the middle 80 % of
    cases.
    """
    from opgrip.replay.plots.plot import time_of

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
    by = request.by or MODE_GROUPS[0]
    axes.set_ylabel(f"{'operator' if by == 'op' else by} (cases)")
    add_legend(figure, axes)
    return figure


def _rows_by_group(request: PlotRequest) -> tuple[dict[str, dict[str, list[Result]]], str]:
    """Return the rows with a speed-up by series and group, and the name of the reference mode."""
    from opgrip.replay.plots.plot import timed
    from opgrip.replay.results.ratios import GROUPS, reference_of, with_ratios_by_case

    group_of = GROUPS[request.by or MODE_GROUPS[0]]
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
    """Set a logarithmic axis with plain numbers, so that 2 and 1/2 have the same distance from 1."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    axes.set_xscale("log")
    axes.autoscale(axis="x")
    low, high = axes.get_xlim()
    multiples = next((parts for most, parts in LABELS if high / low < most), (1.0,))
    axes.xaxis.set_major_locator(LogLocator(subs=multiples, numticks=12))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


plots.register("modes")(Plot("speed-up of each mode over the first", draw_modes, by=MODE_GROUPS))


def draw_history(request: PlotRequest) -> Figure:
    """Return a plot with one line per mode over the runs, of the cases timed in all runs, with a band from p10 to
    p90.
    """
    from opgrip.replay.plots.plot import timed

    runs = sorted(((_moment(name, run), run) for name, run in request.runs.items()), key=lambda pair: pair[0])
    moments = [moment for moment, _ in runs]
    by_mode: dict[str, list[dict[object, Result]]] = {}
    for mode in dict.fromkeys(row.mode for _, run in runs for row in timed(run.rows)):
        by_mode[mode] = [{_identity(row): row for row in timed(run.rows) if row.mode == mode} for _, run in runs]
    figure, (axes,) = new_figure(request.title)
    most = 0
    for place, (mode, rows_of_runs) in enumerate(by_mode.items()):
        common = set(rows_of_runs[0]).intersection(*rows_of_runs)
        if not common:
            continue
        most = max(most, len(common))
        rows = [[own[identity] for identity in own if identity in common] for own in rows_of_runs]
        style = marked(place)
        low, middle, high = ([_total(own, name, common) for own in rows] for name in ("p10_us", "median_us", "p90_us"))
        axes.fill_between(moments, low, high, color=style["color"], alpha=0.15, linewidth=0)  # type: ignore[arg-type]
        axes.plot(moments, middle, label=f"{literal(mode)} ({counted(len(common), 'case')})", **style)  # type: ignore[arg-type]
    if not most:
        raise UserError("no case was timed in all of these runs", "choose runs of one trace, or other operators")
    _label(figure, "median of a call" if most == 1 else "time of all calls, by medians")
    add_legend(figure, axes)
    return figure


def _identity(row: Result) -> tuple[object, ...]:
    """Return the identity of a row including its device, so that devices are not joined into one line."""
    return (row.device, *row.identity)


def _moment(name: str, run: PlottedRun) -> datetime:
    """Return the time at which a run was made, in UTC."""
    try:
        moment = datetime.fromisoformat(str(run.header["time"]))
    except (KeyError, ValueError) as error:
        raise UserError(f"{name} does not say when it was made", "take runs that opreplay wrote") from error
    return moment.astimezone(timezone.utc) if moment.tzinfo else moment.replace(tzinfo=timezone.utc)


def _total(rows: list[Result], name: str, common: set[object]) -> float:
    """Return the time of one call if there is a single case, otherwise the time of all calls, in us."""
    if len(common) == 1:
        return float(getattr(rows[0], name) or rows[0].median_us or 0.0)
    return fsum(max(row.count, 1) * (getattr(row, name) or row.median_us or 0.0) for row in rows)


def _label(figure: Figure, name: str) -> None:
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

    (axes,) = figure.axes
    locator = AutoDateLocator(tz=timezone.utc, maxticks=8)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator, tz=timezone.utc))
    label_axis(axes.yaxis, name, "s", 1e-6)
    axes.set_xlabel("time of the run (UTC)")
    axes.set_ylim(bottom=0)


plots.register("history")(Plot("time over several runs of the store", draw_history, least=2))
