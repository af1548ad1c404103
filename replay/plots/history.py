"""`--kind history`: the time of all calls, or of some, over the time when they were replayed."""

from __future__ import annotations

from datetime import datetime, timezone
from math import fsum
from typing import TYPE_CHECKING

from opgrip.cli.plural import counted
from opgrip.display.figures import add_legend, label_axis, literal, marked, new_figure
from opgrip.errors import UserError
from opgrip.replay.plots.plot import Plot, Request, Run, plots

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from opgrip.replay.results.results import Result


def draw(request: Request) -> Figure:
    """A line a mode through the runs, of the cases that all of them timed, with a band from p10 to p90."""
    from opgrip.replay.plots.plotted_rows import timed

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
    """Times of other devices are other lines, whatever runs they stand in."""
    return (row.device, *row.identity)


def _moment(name: str, run: Run) -> datetime:
    """When a run was made, in UTC."""
    try:
        moment = datetime.fromisoformat(str(run.header["time"]))
    except (KeyError, ValueError) as error:
        raise UserError(f"{name} does not say when it was made", "take runs that opreplay wrote") from error
    return moment.astimezone(timezone.utc) if moment.tzinfo else moment.replace(tzinfo=timezone.utc)


def _total(rows: list[Result], name: str, common: set[object]) -> float:
    """Of one case the time of a call; of several that of all calls, in us."""
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


plots.register("history")(Plot("time over several runs of the store", draw, least=2))
