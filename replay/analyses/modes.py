"""What each mode comes to over all cases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from opgrip.replay.analyses.analysis import Analysis, analyses
from opgrip.replay.measuring.results import FAILED, OK, TIMEOUT, UNSUPPORTED, WRONG, Result
from opgrip.traces.options import titled

STATUSES = (OK, WRONG, UNSUPPORTED, FAILED, TIMEOUT)


@titled("how they are run")
@dataclass(frozen=True, slots=True)
class NoOptions:
    """Nothing is asked: it is there wherever there are several modes."""


@analyses.register("modes")
class ModesAnalysis(Analysis):
    """A line for each mode beside the reference."""

    options = NoOptions
    place = 40
    prints_partial = True

    @classmethod
    def is_requested(cls, options: NoOptions) -> bool:
        """Always."""
        return True

    def print(self, rows: Sequence[Result], file: IO[str]) -> None:
        """Print the lines."""
        print_modes(rows, self.session.job.plan.modes.reference, file)


@dataclass(frozen=True, slots=True)
class Summary:
    """A mode beside the reference, over the cases that are ok under both.

    Attributes
    ----------
    statuses : rows by status
    speed_up : geometric mean of the reference's time over the mode's, each case once; None where there is no such case
    weighted : the same, each case as often as it was called
    gains, loses : cases that nine of ten runs say are quicker, or slower
    first_s : sum of the first calls' times
    """

    mode: str
    statuses: Counter[str]
    speed_up: float | None
    weighted: float | None
    gains: int
    loses: int
    first_s: float


def summarize_modes(results: Sequence[Result], reference: str) -> list[Summary]:
    """One summary for each mode that is not the reference, in the order in which they were run."""
    modes = dict.fromkeys(result.mode for result in results)
    return [_summary(mode, [row for row in results if row.mode == mode]) for mode in modes if mode != reference]


def print_modes(results: Sequence[Result], reference: str, file: IO[str]) -> None:
    """Print the summaries, where there are any."""
    summaries = summarize_modes(results, reference)
    if not summaries:
        return
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), title=f"beside {reference}", title_justify="left"
    )
    names = ("mode", *STATUSES, "speed-up", "by calls", "gain", "lose", "first calls s")
    for name in names:
        table.add_column(name, justify="left" if name == "mode" else "right", no_wrap=True)
    for summary in summaries:
        counts = summary.statuses
        table.add_row(
            Text(summary.mode),
            *(str(counts[status]) for status in STATUSES),
            _ratio(summary.speed_up),
            _ratio(summary.weighted),
            str(summary.gains),
            str(summary.loses),
            f"{summary.first_s:,.1f}",
        )
    console = Console(file=file, highlight=False)
    (console if console.is_terminal else Console(file=file, highlight=False, width=120)).print(table)


def _summary(mode: str, rows: Sequence[Result]) -> Summary:
    import numpy as np

    compared = [row for row in rows if row.status == OK and row.ratio]
    logs = np.array([-np.log(row.ratio or 1.0) for row in compared])
    counts = np.array([row.count for row in compared])
    return Summary(
        mode=mode,
        statuses=Counter(row.status for row in rows),
        speed_up=float(np.exp(logs.mean())) if compared else None,
        weighted=float(np.exp(np.average(logs, weights=counts))) if compared else None,
        gains=sum((row.ratio_p90 or 1) < 1 for row in compared),
        loses=sum((row.ratio_p10 or 1) > 1 for row in compared),
        first_s=sum(row.first_ms or 0.0 for row in rows) / 1e3,
    )


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
