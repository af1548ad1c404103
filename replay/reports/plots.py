"""Plots of results: their kinds, each with the function that draws it, and the choices that a user makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from fnmatch import fnmatchcase
from math import ceil, fsum
from typing import TYPE_CHECKING, Any, Protocol

from opgrip.cli.command import counted
from opgrip.cli.plugins import Registry
from opgrip.display.figures import add_legend, label_axis, literal, logarithmic, marked, new_figure
from opgrip.errors import UserError
from opgrip.replay.results.results import OK, VARIANT_COLUMNS, Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.ticker import Locator


class PlottedRun(Protocol):
    @property
    def rows(self) -> Sequence[Result]: ...

    @property
    def header(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True, slots=True)
class PlotRequest:
    runs: Mapping[str, PlottedRun]
    title: str = ""
    by: str | None = None
    over: str | None = None


Draw = Callable[[PlotRequest], "Figure"]


@dataclass(frozen=True, slots=True)
class Plot:
    """A kind of plot.

    by, over : accepted values of `--by`, the default first, and of `--over`
    """

    summary: str
    draw: Draw
    by: tuple[str, ...] = ()
    over: tuple[str, ...] = ()
    least: int = 1
    most: int | None = None


plots: Registry[Plot] = Registry(None, "opgrip.plots")  # plot kinds by name


def timed(rows: Sequence[Result]) -> list[Result]:
    return [row for row in rows if row.status == OK and row.median_us]


def time_of(row: Result) -> float:
    return max(row.count, 1) * (row.median_us or 0.0)


def series_of(runs: Mapping[str, PlottedRun]) -> Iterator[tuple[str, list[Result]]]:
    """Yield (name, timed rows) for each mode of each run; with several runs, the run's name precedes the mode's."""
    for name, run in runs.items():
        rows = timed(run.rows)
        for mode in dict.fromkeys(row.mode for row in rows):
            yield mode if len(runs) == 1 else f"{name}: {mode}", [row for row in rows if row.mode == mode]


def longest(rows: Sequence[Result], most: int) -> list[str]:
    totals: dict[str, float] = {}
    for row in rows:
        totals[row.op] = totals.get(row.op, 0.0) + time_of(row)
    return sorted(totals, key=lambda op: -totals[op])[:most]


FITTING = ("modes", "scaling", "operators")  # kinds of plots that `draw_fitting` tries, in this order


@dataclass(frozen=True, slots=True)
class PlotChoices:
    """A user's choices for a plot; None means the default.

    case : text with which the keys of the cases to draw begin
    """

    op: str | None = None
    case: str | None = None
    by: str | None = None
    over: str | None = None
    title: str | None = None


@dataclass(frozen=True, slots=True)
class SelectedRun:
    rows: Sequence[Result]
    header: Mapping[str, Any]


def check_choices(kind: str, number: int, choices: PlotChoices) -> None:
    plot = _plot_of(kind)
    if number < plot.least:
        raise UserError(f"--kind {kind} needs several runs", f"name {plot.least} or more")
    if plot.most is not None and number > plot.most:
        raise UserError(f"--kind {kind} draws {counted(plot.most, 'run')}, not {number}", "draw one at a time")
    for flag, word, words in (("--by", choices.by, plot.by), ("--over", choices.over, plot.over)):
        if word is not None and word not in words:
            hint = f"choose {' or '.join(words)}" if words else "leave it out"
            raise UserError(f"--kind {kind} does not take {flag} {word}", hint)


def request_for(kind: str, runs: Mapping[str, PlottedRun], choices: PlotChoices) -> PlotRequest:
    check_choices(kind, len(runs), choices)
    op, case = choices.op or "*", choices.case or ""
    selected = {
        name: SelectedRun([row for row in run.rows if fnmatchcase(row.op, op) and row.key.startswith(case)], run.header)
        for name, run in runs.items()
    }
    if not any(run.rows for run in selected.values()):
        raise UserError("no row is selected", "choose another --op or --case")
    title = choices.title if choices.title is not None else _title(kind, runs)
    return PlotRequest(selected, title, choices.by, choices.over)


def draw_runs(kind: str, runs: Mapping[str, PlottedRun], choices: PlotChoices) -> Figure:
    return _plot_of(kind).draw(request_for(kind, runs, choices))


def draw_fitting(runs: Mapping[str, PlottedRun], choices: PlotChoices) -> Figure:
    *special, usual = FITTING
    for kind in special:
        with suppress(UserError):
            return draw_runs(kind, runs, choices)
    return draw_runs(usual, runs, choices)


def _plot_of(kind: str) -> Plot:
    plot = plots.get(kind)
    if plot is None:
        raise UserError(f"unknown --kind {kind}", f"choose {', '.join(plots.names())}")
    return plot


def _title(kind: str, runs: Mapping[str, PlottedRun]) -> str:
    headers = [run.header for run in runs.values()]
    traces = dict.fromkeys(str(header.get("trace", "")) for header in headers)
    if kind == "roofline":
        return ", ".join(filter(None, traces))
    machines = dict.fromkeys(_machine(header) for header in headers)
    versions = dict.fromkeys(f"torch {header['torch']}" for header in headers if "torch" in header)
    return "; ".join(filter(None, [", ".join(filter(None, part)) for part in (traces, machines, versions)]))


def _machine(header: Mapping[str, Any]) -> str:
    environment = header.get("environment")
    processor = environment.get("processor") if isinstance(environment, dict) else None
    device = str(header.get("device", ""))
    return str(processor or device) if device.partition(":")[0] in ("", "cpu") else device


OPERATOR_GROUPS = ("op", "family", "module")  # groupings of cases, default first
MOST_GROUPS = 20  # maximum number of groups that are drawn, those with the longest time first
LEAST_SHARE = 0.001  # smallest share of the total time at which a group is drawn
TOGETHER = 0.8  # share of the height of a group that its bars take together
CAPTURED = "captured"  # name of the series of captured times


def draw_operators(request: PlotRequest) -> Figure:
    from matplotlib.ticker import EngFormatter

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
    for index, name in enumerate(series):
        offset = TOGETHER * ((index + 0.5) / len(series) - 0.5)
        widths = [totals[group][name] for group in groups]
        color = "#bbbbbb" if name == CAPTURED else marked(index)["color"]
        heights = [number + offset for number in range(len(groups))]
        total_us = fsum(times[name] for times in totals.values())
        label = f"{literal(name, 28)}, {EngFormatter('s', places=1)(total_us * 1e-6)}"
        axes.barh(heights, widths, thickness, color=color, label=label)
    axes.set_yticks(range(len(groups)), [literal(group, 40) for group in groups])
    axes.set_ylim(len(groups) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    label_axis(axes.xaxis, "time of all calls", "s", 1e-6)
    if len(groups) < len(totals):
        axes.set_ylabel(f"{len(totals) - len(groups):,} groups with less time are left out")
    add_legend(figure, axes)
    return figure


def _series(request: PlotRequest) -> dict[str, list[tuple[Result, float]]]:
    replayed = dict(series_of(request.runs))
    if not replayed:
        raise UserError("the results have no case with a time", "see the column error, or use opreplay --strict")
    series = {name: [(row, time_of(row)) for row in _first_ways(rows)] for name, rows in replayed.items()}
    first = _first_ways(next(iter(replayed.values())))
    captured = [(row, max(row.count, 1) * row.captured_us) for row in first if row.captured_us]
    return {CAPTURED: captured, **series} if captured and CAPTURED not in series else series


def _first_ways(rows: list[Result]) -> list[Result]:
    cases: dict[tuple[object, ...], Result] = {}
    for row in rows:
        cases.setdefault((row.case, *row.identity_without(*VARIANT_COLUMNS)), row)
    return list(cases.values())


MODE_GROUPS = ("family", "op")  # groupings of cases, default first

# pairs of a ratio and multiples of powers of ten; an axis whose ends have a smaller ratio is labelled at these
# multiples
LABELS = ((3.0, (1.0, 1.2, 1.5, 2.0, 3.0, 5.0, 7.0)), (12.0, (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)), (300.0, (1.0, 2.0, 5.0)))


def draw_modes(request: PlotRequest) -> Figure:
    """Draw each mode's speed-up by group of cases: the geometric mean, and a bar over the middle 80 % of cases."""
    series, reference = _rows_by_group(request)
    totals: dict[str, float] = {}
    for rows_by_group in series.values():
        for group, rows in rows_by_group.items():
            totals[group] = max(totals.get(group, 0.0), fsum(map(time_of, rows)))
    groups = sorted(totals, key=lambda group: -totals[group])[:MOST_GROUPS]
    figure, (axes,) = new_figure(request.title, size=(6.6, 1.4 + 0.3 * len(groups)))
    for index, (name, rows_by_group) in enumerate(series.items()):
        offset = TOGETHER * ((index + 0.5) / len(series) - 0.5)
        _draw_series(axes, index, name, offset, [rows_by_group.get(group, []) for group in groups])
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
        raise UserError("no case of the results was timed in two modes", "replay with --mode, such as --mode jit")
    return series, " or ".join(references)


def _draw_series(axes: Axes, index: int, name: str, offset: float, groups: Sequence[Sequence[Result]]) -> None:
    from opgrip.replay.analyses.speed_ups import speed_up_of

    drawn = [(number + offset, speed_up) for number, rows in enumerate(groups) if (speed_up := speed_up_of(rows))]
    heights = [height for height, _ in drawn]
    style = marked(index)
    lows, highs = ([getattr(speed_up, side) for _, speed_up in drawn] for side in ("low", "high"))
    axes.hlines(heights, lows, highs, color=style["color"], lw=1.0)
    axes.plot([speed_up.mean for _, speed_up in drawn], heights, linestyle="", label=literal(name), **style)


def _scale(axes: Axes) -> None:
    from matplotlib.ticker import LogLocator

    axes.set_xscale("log")
    axes.autoscale(axis="x")
    low, high = axes.get_xlim()
    multiples = next((parts for most, parts in LABELS if high / low < most), (1.0,))
    _label_major(axes.xaxis, LogLocator(subs=multiples, numticks=12), "g")


def _label_major(axis: Axis, locator: Locator, form: str) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    axis.set_major_locator(locator)
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:{form}}"))


def draw_history(request: PlotRequest) -> Figure:
    """Draw how the time of the cases changes from run to run: for each mode, a line of medians and a band from p10 to
    p90.
    """
    runs = sorted(((_moment(name, run), run) for name, run in request.runs.items()), key=lambda pair: pair[0])
    moments = [moment for moment, _ in runs]
    by_mode: dict[str, list[dict[object, Result]]] = {}
    for mode in dict.fromkeys(row.mode for _, run in runs for row in timed(run.rows)):
        # different devices get separate lines
        by_mode[mode] = [
            {(row.device, *row.identity_without()): row for row in timed(run.rows) if row.mode == mode}
            for _, run in runs
        ]
    figure, (axes,) = new_figure(request.title)
    most = 0
    for index, (mode, rows_of_runs) in enumerate(by_mode.items()):
        common = set(rows_of_runs[0]).intersection(*rows_of_runs)
        if not common:
            continue
        most = max(most, len(common))
        rows = [[own[identity] for identity in own if identity in common] for own in rows_of_runs]
        style = marked(index)
        low, middle, high = ([_total(own, name, common) for own in rows] for name in ("p10_us", "median_us", "p90_us"))
        axes.fill_between(moments, low, high, color=style["color"], alpha=0.15, linewidth=0)  # type: ignore[arg-type]
        axes.plot(moments, middle, label=f"{literal(mode)} ({counted(len(common), 'case')})", **style)  # type: ignore[arg-type]
    if not most:
        raise UserError("no case was timed in all of these runs", "choose runs of one trace, or other operators")
    _label_history(figure, "median of a call" if most == 1 else "time of all calls, by medians")
    add_legend(figure, axes)
    return figure


def _moment(name: str, run: PlottedRun) -> datetime:
    try:
        moment = datetime.fromisoformat(str(run.header["time"]))
    except (KeyError, ValueError) as error:
        raise UserError(f"{name} does not contain the date of its run", "use results that opreplay wrote") from error
    return moment.astimezone(timezone.utc) if moment.tzinfo else moment.replace(tzinfo=timezone.utc)


def _total(rows: list[Result], name: str, common: set[object]) -> float:
    if len(common) == 1:
        return float(getattr(rows[0], name) or rows[0].median_us or 0.0)
    return fsum(max(row.count, 1) * (getattr(row, name) or row.median_us or 0.0) for row in rows)


def _label_history(figure: Figure, name: str) -> None:
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

    (axes,) = figure.axes
    locator = AutoDateLocator(tz=timezone.utc, maxticks=8)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator, tz=timezone.utc))
    label_axis(axes.yaxis, name, "s", 1e-6)
    axes.set_xlabel("time of the run (UTC)")
    axes.set_ylim(bottom=0)


# axis labels for the columns over which times can scale
VARIED = {"threads": "threads", "batch_scale": "batch size / recorded one", "streams": "cases at once"}
# exponent of ideal scaling: time is inversely proportional to the number of threads, and proportional to the batch size
IDEALS = {"threads": -1.0, "batch_scale": 1.0}


def draw_scaling(request: PlotRequest) -> Figure:
    series = dict(series_of(request.runs))
    column = request.over or _varied([row for rows in series.values() for row in rows])
    figure, (axes,) = new_figure(request.title, size=(4.6, 3.6))
    values: set[int] = set()
    for index, (name, rows) in enumerate(series.items()):
        values.update(_draw_scaling_series(axes, index, name, rows, column))
    if not values:
        hint = f"replay with --{column.replace('_', '-')} 1,2,4"
        raise UserError(f"no case was timed at two values of {column}", hint)
    ticks = sorted(values)
    if column in IDEALS:
        ideal = [(value / ticks[0]) ** IDEALS[column] for value in ticks]
        axes.plot(ticks, ideal, color="#222222", linestyle=":", label="in proportion")
    _label_scaling(axes, column, ticks)
    add_legend(figure, axes, 2)
    return figure


def _varied(rows: list[Result]) -> str:
    names = [name for name in VARIED if len({getattr(row, name) for row in rows} - {None}) > 1]
    if not names:
        raise UserError("all rows have the same threads, batch scale and streams", "replay with --threads 1,2,4")
    if len(names) > 1:
        raise UserError(f"the rows differ in {' and '.join(names)}", "choose the x axis, such as --over " + names[0])
    return names[0]


def _draw_scaling_series(axes: Axes, index: int, name: str, rows: list[Result], column: str) -> list[int]:
    import numpy as np

    by_case: dict[Any, dict[int, float]] = {}
    for row in rows:
        value = getattr(row, column)
        if value is not None:
            what, *settings = row.identity_without("mode", column)
            # a larger batch changes the shapes, and thus the identity
            key = (row.case_of_trace if column == "batch_scale" else what, *settings)
            by_case.setdefault(key, {})[int(value)] = time_of(row)
    values = sorted({value for times in by_case.values() for value in times})
    whole = [times for times in by_case.values() if len(times) == len(values)]
    if len(values) < 2 or not whole:
        return []
    first = values[0]
    total = [fsum(times[value] for times in whole) for value in values]
    ratios = np.array([[times[value] / times[first] for value in values] for times in whole])
    style = marked(index)
    axes.fill_between(values, *np.quantile(ratios, (0.1, 0.9), axis=0), color=style["color"], alpha=0.15, linewidth=0)
    label = f"{literal(name, 40)} ({len(whole)} of {len(by_case)} cases)"
    axes.plot(values, [time / total[0] for time in total], label=label, **style)
    return values


def _label_scaling(axes: Axes, column: str, ticks: list[int]) -> None:
    from matplotlib.ticker import FixedLocator, LogLocator

    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    _label_major(axes.xaxis, FixedLocator(ticks), ",g")
    low, high = axes.get_ylim()
    subs = (1.0, 2**0.5) if high / low < 4 else (1.0,)
    _label_major(axes.yaxis, LogLocator(base=2, subs=subs, numticks=12), ".3g")
    axes.set_xlabel(VARIED[column])
    axes.set_ylabel(f"time (relative to {ticks[0]:,})")


MOST_PANELS = 9  # maximum number of operators that are drawn, those with the longest total time first
# column, axis label and unit, by value of `--over`
WORK = {
    "bytes": ("bytes_moved", "bytes moved", "B"),
    "flops": ("flops", "operations", "flop"),
    # samples have neither
    "bytes_in": ("bytes_in", "size of the arguments", "B"),
}


def draw_shapes(request: PlotRequest) -> Figure:
    """Draw each case's median time over its bytes or operations, with a bar from p10 to p90, a panel per operator."""
    column, name, unit = WORK[request.over or "bytes"]
    series = {name: [row for row in rows if getattr(row, column)] for name, rows in series_of(request.runs)}
    rows = [row for own in series.values() for row in own]
    if not rows:
        raise UserError(f"no row has both a time and a value of {column}", "choose other operators, or --over bytes_in")
    operators = longest(rows, MOST_PANELS)
    width = min(len(operators), 3)
    height = ceil(len(operators) / width)
    size = (1.4 + 2.3 * width, 1.2 + 1.9 * height) if len(operators) > 1 else (4.6, 3.6)
    figure, grid = new_figure(request.title, height, width, sharex=True, sharey=True, size=size)
    shown = [row for row in rows if row.op in operators]
    for axes, op in zip(grid, operators, strict=False):
        axes.set_title(literal(op, 34))
        for index, (label, own) in enumerate(series.items()):
            _draw_points(axes, index, label, [row for row in own if row.op == op], column)
    logarithmic(grid[0], "x", [float(getattr(row, column)) for row in shown])
    logarithmic(grid[0], "y", [time for row in shown for time in _band(row)])
    for axes in grid[len(operators) :]:
        axes.set_visible(False)
    for index, axes in enumerate(grid[: len(operators)]):
        is_lowest, is_first = index + width >= len(operators), index % width == 0
        label_axis(axes.xaxis, name if is_lowest else "", unit)
        label_axis(axes.yaxis, "time" if is_first else "", "s", 1e-6)
        axes.tick_params(labelbottom=is_lowest)
    add_legend(figure, grid[0])
    return figure


def _draw_points(axes: Axes, index: int, label: str, rows: Sequence[Result], column: str) -> None:
    style = marked(index) | {"linestyle": "", "label": literal(label, 40), "alpha": 0.8}
    medians = [row.median_us or 0.0 for row in rows]
    bands = [_band(row) for row in rows]
    errors = (
        [median - low for median, (low, _) in zip(medians, bands, strict=True)],
        [high - median for median, (_, high) in zip(medians, bands, strict=True)],
    )
    axes.errorbar([getattr(row, column) for row in rows], medians, errors, elinewidth=0.8, **style)


def _band(row: Result) -> tuple[float, float]:
    median = row.median_us or 0.0
    return min(row.p10_us or median, median), max(row.p90_us or median, median)


def draw_roofline(request: PlotRequest) -> Figure:
    from opgrip.platform.peaks import from_json
    from opgrip.replay.analyses.roofline import drawing

    (run,) = request.runs.values()
    if "ceilings" not in run.header:
        raise UserError("the results do not contain the machine's peak rates", "replay with --roofline")
    try:
        ceilings, threads = from_json(run.header["ceilings"]), int(run.header.get("threads", 1))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError("the machine's peak rates in the results are damaged", "replay with --roofline") from error
    return drawing.draw(run.rows, ceilings, threads, request.title)


_KINDS = {
    "operators": Plot("time of all calls by operator, captured and replayed", draw_operators, by=OPERATOR_GROUPS),
    "modes": Plot("speed-up of each mode over the reference mode", draw_modes, by=MODE_GROUPS),
    "history": Plot("times of the same cases in several runs", draw_history, least=2),
    "scaling": Plot("time for several values of threads, batch_scale or streams", draw_scaling, over=tuple(VARIED)),
    "shapes": Plot("time over bytes or flops, with a panel per operator", draw_shapes, over=tuple(WORK)),
    "roofline": Plot("rates of calls and the machine's peak rates", draw_roofline, most=1),
}
for _name, _plot in _KINDS.items():
    plots.register(_name)(_plot)
