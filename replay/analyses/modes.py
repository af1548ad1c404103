"""What each mode comes to over all cases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

from opgrip.cli.plural import counted
from opgrip.cli.terminal import print_line
from opgrip.display.tables import TableColumn, print_table
from opgrip.replay.analyses.analysis import UnaskedAnalysis, analyses
from opgrip.replay.analyses.speed_ups import FASTER_MEANS, SpeedUp, speed_up_columns, speed_up_of
from opgrip.replay.results.results import CONTENDED, FAILED, OK, TIMEOUT, UNSUPPORTED, WRONG, Result

STATUSES = (OK, WRONG, UNSUPPORTED, FAILED, TIMEOUT, CONTENDED)


@analyses.register("modes")
class ModesAnalysis(UnaskedAnalysis):
    """A line for each mode beside the reference."""

    place = 40

    def print(self, rows: Sequence[Result], file: IO[str]) -> None:
        """Print the lines."""
        print_modes(rows, self.session.job.plan.modes.reference, file)


@dataclass(frozen=True, slots=True)
class Summary:
    """A mode beside the reference, over the cases that are ok under both.

    Attributes
    ----------
    statuses : rows by status
    speed_up : None where no case is ok under both
    first_s : sum of the first calls' times
    """

    mode: str
    statuses: Counter[str]
    speed_up: SpeedUp | None
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
    columns = [
        TableColumn("mode", [item.mode for item in summaries], is_number=False),
        *(_status_column(status, summaries) for status in STATUSES),
        *speed_up_columns([item.speed_up for item in summaries]),
        TableColumn("first calls s", [f"{item.first_s:,.1f}" for item in summaries], rank=3),
    ]
    print_table(columns, file, f"beside {reference}")
    if any(item.speed_up for item in summaries):
        print_line(FASTER_MEANS, file)
    slowed = sum(row.is_slowed and row.status == OK for row in results)
    if slowed:
        of_all = counted(len(results), "row")
        print_line(
            f"{slowed} of {of_all}: timed on a processor that was slowed down, so that ratios are doubtful", file
        )


def _status_column(status: str, summaries: Sequence[Summary]) -> TableColumn:
    counts = [item.statuses[status] for item in summaries]
    # what no row came to is missed least
    return TableColumn(status, list(map(str, counts)), rank=0 if any(counts) else 4)


def _summary(mode: str, rows: Sequence[Result]) -> Summary:
    return Summary(
        mode=mode,
        statuses=Counter(row.status for row in rows),
        speed_up=speed_up_of(rows),
        first_s=sum(row.first_ms or 0.0 for row in rows) / 1e3,
    )
