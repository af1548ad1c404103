"""Makes a picture of runs, for the command and for Python: checks what is asked, selects rows, and gives a title."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from opgrip.cli.plural import counted
from opgrip.errors import UserError
from opgrip.replay.plots.plot import Plot, Request, Run, plots

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from opgrip.replay.results.results import Result

FITTING = ("modes", "scaling", "operators")
"""Kinds that show what rows differ in; of results, the first that they have something for fits them."""


@dataclass(frozen=True, slots=True)
class Choices:
    """What a user asks of a picture, each None where nothing is asked.

    Attributes
    ----------
    op : only cases of operators whose names match it, as shells match file names
    case : only the case whose key begins so
    by, over : what cases are grouped by, and the column along the x axis, as `Request` has them
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


def check_choices(kind: str, number: int, choices: Choices) -> None:
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


def request_for(kind: str, runs: Mapping[str, Run], choices: Choices) -> Request:
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
    return Request(selected, title, choices.by, choices.over)


def draw_runs(kind: str, runs: Mapping[str, Run], choices: Choices) -> Figure:
    """The picture, in the style that is set meanwhile; raises `UserError` where there is nothing to be drawn."""
    return _plot_of(kind).draw(request_for(kind, runs, choices))


def draw_fitting(runs: Mapping[str, Run], choices: Choices) -> Figure:
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


def _is_selected(row: Result, choices: Choices) -> bool:
    is_op = choices.op is None or fnmatchcase(row.op, choices.op)
    return is_op and (choices.case is None or row.key.startswith(choices.case))


def _title(kind: str, runs: Mapping[str, Run]) -> str:
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
