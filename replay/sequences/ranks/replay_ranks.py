"""Step replay by several ranks together, and the results that rank 0 collects."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from opgrip.cli.progress import Tell, tell_nobody
from opgrip.errors import UserError
from opgrip.replay.cases.cases import make_cases
from opgrip.replay.modes import EAGER
from opgrip.replay.results.results import Result
from opgrip.replay.sequences.ranks.collective_times import (
    CollectiveStepTimes,
    CollectiveTimes,
    OwnTimes,
    RankTotals,
    clock_offsets_ns,
    share_stamps,
)
from opgrip.replay.sequences.ranks.control import Control
from opgrip.replay.sequences.ranks.plan import part_of, recorded_ranks
from opgrip.replay.sequences.ranks.running import backend_for
from opgrip.replay.sequences.ranks.step import replay_step
from opgrip.replay.sequences.step_options import RankColumns, RankOptions
from opgrip.replay.sequences.step_process import sequence_settings
from opgrip.replay.sequences.step_rows import rows_of, totals_of
from opgrip.replay.workers.job import Loaded


@dataclass(frozen=True, slots=True)
class RankOutcome:
    """Results of one rank.

    Attributes
    ----------
    totals : of its step, as in a file of results
    left_out : number of collectives that did not run, by reason
    """

    rank: int
    totals: dict[str, Any]
    times: RankTotals
    left_out: dict[str, int]


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Results of all ranks.

    Attributes
    ----------
    recorded : number of ranks in the trace
    collectives : of all ranks, slowest first
    """

    recorded: int
    ranks: list[RankOutcome]
    rows: list[Result]
    collectives: list[CollectiveTimes]

    def plain(self) -> dict[str, Any]:
        """Return the form for a file of results."""
        return {
            "recorded": self.recorded,
            "ranks": [
                {**item.totals, **asdict(item.times), "rank": item.rank, "left_out": item.left_out}
                for item in self.ranks
            ],
            "collectives": [asdict(item) for item in self.collectives],
        }


def replay_ranks(
    loaded: Loaded, options: RankOptions, control: Control, tell: Tell = tell_nobody
) -> StepOutcome | None:
    """Replay this rank's part of a trace together with the other ranks; only rank 0 returns the results.

    Raises
    ------
    UserError : if the trace has another number of ranks, or one of them ends
    """
    settings = sequence_settings(loaded.settings)
    if settings.mode != EAGER:
        raise UserError("ranks replay in eager alone", "leave out --mode")
    rank, world_size = control.launch.rank, control.launch.world_size
    # refused here, where one rank tells; it is asked again where groups are made
    control.together(lambda: backend_for(settings.device))
    part = control.together(lambda: part_of(loaded.trace, rank, world_size))
    step = replay_step(part, settings, options, control, tell)
    cases = make_cases(part)
    rows = rows_of(step.result, cases, loaded.settings)
    offsets = clock_offsets_ns(control)
    stamps = share_stamps(control, step.stamps)
    mine = {
        "rows": [row.to_plain() for row in rows],
        "totals": totals_of(step.result),
        "signatures": step.signatures,
        "left_out": dict(step.left_out),
    }
    everyone = control.share(mine)
    if not control.is_first:
        return None
    times = CollectiveStepTimes(step.plan.meetings, stamps, [item["signatures"] for item in everyone], offsets)
    ranks = [
        RankOutcome(number, item["totals"], times.totals[number], item["left_out"])
        for number, item in enumerate(everyone)
    ]
    all_rows = [
        _with_times(Result.from_plain(cells), number, times.own(number, int(cells["case"])))
        for number, item in enumerate(everyone)
        for cells in item["rows"]
    ]
    return StepOutcome(len(recorded_ranks(loaded.trace)), ranks, all_rows, times.together())


def _with_times(row: Result, rank: int, own: OwnTimes | None) -> Result:
    columns = RankColumns(rank)
    if own is not None:
        columns = replace(
            columns,
            group_ranks=",".join(map(str, own.ranks)),
            exchanged_bytes=own.bytes,
            exchange_us=own.exchange_us,
            wait_us=own.wait_us,
            held_us=own.held_us,
            algorithm_gb_per_s=own.algorithm_gb_per_s,
            bus_gb_per_s=own.bus_gb_per_s,
        )
    return row.adding(columns)
