"""Kinds of plots of results, and the choices that a user makes for a plot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Protocol

from opgrip.cli.command import counted
from opgrip.cli.plugins import Registry
from opgrip.errors import UserError
from opgrip.replay.results.results import OK, Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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


plots: Registry[Plot] = Registry("opgrip.replay.reports.plots", "opgrip.plots")  # plot kinds by name


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
    selected = {
        name: SelectedRun([row for row in run.rows if _is_selected(row, choices)], run.header)
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


def _is_selected(row: Result, choices: PlotChoices) -> bool:
    is_op = choices.op is None or fnmatchcase(row.op, choices.op)
    return is_op and (choices.case is None or row.key.startswith(choices.case))


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
