"""Kinds of plots, what can be asked of them, and the rows that they draw."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Protocol

from opgrip.cli.command import counted
from opgrip.cli.plugins import Registry
from opgrip.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from opgrip.replay.results.results import Result


class PlottedRun(Protocol):
    """The rows of a replay and where they come from, as `Results` has them."""

    @property
    def rows(self) -> Sequence[Result]:
        """One a case and way to run it."""

    @property
    def header(self) -> Mapping[str, Any]:
        """The trace, the versions and the device."""


@dataclass(frozen=True, slots=True)
class PlotRequest:
    """What is to be drawn.

    Attributes
    ----------
    runs : results by name, in their order
    title : of the picture; empty for none
    by : what cases are grouped by, such as `family` or `op`; None for the kind's own choice
    over : the column along the x axis; None for the kind's own choice
    """

    runs: Mapping[str, PlottedRun]
    title: str = ""
    by: str | None = None
    over: str | None = None


Draw = Callable[[PlotRequest], "Figure"]


@dataclass(frozen=True, slots=True)
class Plot:
    """A kind of picture.

    Attributes
    ----------
    summary : for the help of the command
    draw : makes it; raises `UserError` where the results have nothing to be drawn
    by : the values of `--by` that it takes, its own choice first
    over : the values of `--over` that it takes
    least, most : how many results it takes; None for any number
    """

    summary: str
    draw: Draw
    by: tuple[str, ...] = ()
    over: tuple[str, ...] = ()
    least: int = 1
    most: int | None = None


plots: Registry[Plot] = Registry("opgrip.replay.plots", "opgrip.plots")
"""Kinds of pictures by name."""


def timed(rows: Sequence[Result]) -> list[Result]:
    """Those with a time that may be believed."""
    from opgrip.replay.results.results import OK

    return [row for row in rows if row.status == OK and row.median_us]


def time_of(row: Result) -> float:
    """Of all its calls, in us."""
    return max(row.count, 1) * (row.median_us or 0.0)


def series_of(runs: Mapping[str, PlottedRun]) -> Iterator[tuple[str, list[Result]]]:
    """The timed rows of each mode of each run, with a name; the run is in it where there are several."""
    for name, run in runs.items():
        rows = timed(run.rows)
        for mode in dict.fromkeys(row.mode for row in rows):
            yield mode if len(runs) == 1 else f"{name}: {mode}", [row for row in rows if row.mode == mode]


def longest(rows: Sequence[Result], most: int) -> list[str]:
    """The operators with most time, from the first."""
    totals: dict[str, float] = {}
    for row in rows:
        totals[row.op] = totals.get(row.op, 0.0) + time_of(row)
    return sorted(totals, key=lambda op: -totals[op])[:most]


FITTING = ("modes", "scaling", "operators")
"""Kinds that show what rows differ in; of results, the first that they have something for fits them."""


@dataclass(frozen=True, slots=True)
class PlotChoices:
    """What a user asks of a picture, each None where nothing is asked.

    Attributes
    ----------
    op : only cases of operators whose names match it, as shells match file names
    case : only the case whose key begins so
    by, over : what cases are grouped by, and the column along the x axis, as `PlotRequest` has them
    title : of the picture; else the trace, the machine and the version of torch
    """

    op: str | None = None
    case: str | None = None
    by: str | None = None
    over: str | None = None
    title: str | None = None


@dataclass(frozen=True, slots=True)
class SelectedRun:
    """Some rows of a run."""

    rows: Sequence[Result]
    header: Mapping[str, Any]


def check_choices(kind: str, number: int, choices: PlotChoices) -> None:
    """Raise `UserError` for a kind that there is not, and for what does not go together.

    Parameters
    ----------
    number : how many runs are drawn
    """
    plot = _plot_of(kind)
    if number < plot.least:
        raise UserError(f"--kind {kind} draws several runs", f"name {plot.least} or more")
    if plot.most is not None and number > plot.most:
        raise UserError(f"--kind {kind} draws {counted(plot.most, 'run')}, not {number}", "draw one at a time")
    for flag, word, words in (("--by", choices.by, plot.by), ("--over", choices.over, plot.over)):
        if word is not None and word not in words:
            hint = f"choose {' or '.join(words)}" if words else "leave it out"
            raise UserError(f"--kind {kind} does not take {flag} {word}", hint)


def request_for(kind: str, runs: Mapping[str, PlottedRun], choices: PlotChoices) -> PlotRequest:
    """What a kind is to draw of runs.

    Raises
    ------
    UserError : as `check_choices` does, and where no row is selected
    """
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
    """The picture, in the style that is set meanwhile; raises `UserError` where there is nothing to be drawn."""
    return _plot_of(kind).draw(request_for(kind, runs, choices))


def draw_fitting(runs: Mapping[str, PlottedRun], choices: PlotChoices) -> Figure:
    """The picture of the kind that fits the runs: of several modes `modes`, of several threads `scaling`."""
    *special, usual = FITTING
    for kind in special:
        with suppress(UserError):
            return draw_runs(kind, runs, choices)
    return draw_runs(usual, runs, choices)


def _plot_of(kind: str) -> Plot:
    plot = plots.get(kind)
    if plot is None:
        raise UserError(f"there is no --kind {kind}", f"choose {', '.join(plots.names())}")
    return plot


def _is_selected(row: Result, choices: PlotChoices) -> bool:
    is_op = choices.op is None or fnmatchcase(row.op, choices.op)
    return is_op and (choices.case is None or row.key.startswith(choices.case))


def _title(kind: str, runs: Mapping[str, PlottedRun]) -> str:
    """Trace, machine and torch, each once; of a roofline the trace alone, since it names the machine itself."""
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
