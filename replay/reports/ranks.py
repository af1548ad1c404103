"""The replay of a step of several ranks, for people."""

from __future__ import annotations

from collections import Counter
from typing import IO

from opgrip.cli.command import printable
from opgrip.cli.plural import counted
from opgrip.cli.terminal import print_line
from opgrip.display.tables import TableColumn, print_table
from opgrip.replay.reports.results_table import QUIETER
from opgrip.replay.reports.sequence import ONLY_CONTENDED
from opgrip.replay.sequences.ranks.replay_ranks import CollectiveTimes, StepOutcome

ROWS = 20
"""Collectives that are printed, where their number is not given."""


def print_ranks(outcome: StepOutcome, most: int, file: IO[str]) -> None:
    """Print what each rank's step took, the collectives that take most, and what did not run."""
    print_table(RANK_COLUMNS, outcome.ranks, file, f"{len(outcome.ranks)} of {outcome.recorded} recorded ranks")
    shown = outcome.collectives[:most]
    if shown:
        print_table(
            COLLECTIVE_COLUMNS, shown, file, "collectives, from the coming of the last rank to the end of the last"
        )
    others = len(outcome.collectives) - len(shown)
    if others:
        print_line(f"{counted(others, 'more row')}: --top shows more, --output has all", file)
    if any(item.totals["is_contended"] for item in outcome.ranks):
        print_line(f"the step is contended: {ONLY_CONTENDED}: {QUIETER}", file)
    for text in _left_out(outcome):
        print_line(printable(text), file)


def _name(row: CollectiveTimes) -> str:
    return printable(" ".join(word for word in (row.kind, row.reduction.lower(), row.dtype) if word))


def _ranks(ranks: tuple[int, ...]) -> str:
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ",".join(map(str, ranks))


def _left_out(outcome: StepOutcome) -> list[str]:
    reasons: Counter[str] = Counter()
    for item in outcome.ranks:
        reasons.update(item.left_out)
    lines = [f"left out: {counted(count, 'collective call')}: {reason}" for reason, count in reasons.most_common(12)]
    for item in outcome.ranks:
        lines += [
            f"rank {item.rank}: {entry['status']}: {entry['op']}, {counted(entry['count'], 'call')}: {entry['reason']}"
            for entry in map(dict, item.totals["not_replayed"])
            if entry["reason"] not in item.left_out
        ][:6]
    return lines


def _total(heading: str, name: str, form: str = ",.2f", rank: int = 0) -> TableColumn:
    return TableColumn(heading, lambda item: item.totals.get(name), form, rank)


RANK_COLUMNS = (
    TableColumn("rank", "rank", "d"),
    _total("calls", "calls", ",d"),
    _total("replayed", "replayed", ",d"),
    _total("substituted", "substituted", ",d", 3),
    _total("unsupported", "unsupported", ",d", 3),
    TableColumn("collectives", lambda item: item.times.collectives, ",d", rank=2),
    TableColumn("left out", lambda item: sum(item.left_out.values()), ",d", rank=2),
    _total("captured wall ms", "captured_wall_ms", rank=4),
    _total("wall ms", "replayed_wall_ms"),
    TableColumn("held ms", lambda item: item.times.held_ms, ",.2f"),
    TableColumn("waited ms", lambda item: item.times.waited_ms, ",.2f"),
)
COLLECTIVE_COLUMNS = (
    TableColumn("collective", _name),
    TableColumn("ranks", lambda row: _ranks(row.ranks)),
    TableColumn("bytes", "bytes", ",d"),
    TableColumn("calls", "calls", ",d"),
    TableColumn("time us", "median_us", ",.1f"),
    TableColumn("p90", "p90_us", ",.1f", rank=4),
    TableColumn("algbw GB/s", "algorithm_gb_per_s", ",.3f", rank=1),
    TableColumn("busbw GB/s", "bus_gb_per_s", ",.3f"),
    TableColumn("wait us", "wait_us", ",.1f"),
    TableColumn("last", lambda row: f"rank {row.last_rank}, {row.last_share:.0%}", rank=3),
)
