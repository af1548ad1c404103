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
from opgrip.replay.sequences.ranks.collective_times import CollectiveTimes
from opgrip.replay.sequences.ranks.replay import RankOutcome, StepOutcome

ROWS = 20
"""Collectives that are printed, where their number is not given."""


def print_ranks(outcome: StepOutcome, most: int, file: IO[str]) -> None:
    """Print what each rank's step took, the collectives that take most, and what did not run."""
    print_table(_rank_columns(outcome.ranks), file, f"{len(outcome.ranks)} of {outcome.recorded} recorded ranks")
    shown = outcome.collectives[:most]
    if shown:
        print_table(
            _collective_columns(shown), file, "collectives, from the coming of the last rank to the end of the last"
        )
    others = len(outcome.collectives) - len(shown)
    if others:
        print_line(f"{counted(others, 'more row')}: --top shows more, --output has all", file)
    if any(item.totals["is_contended"] for item in outcome.ranks):
        print_line(f"the step is contended: {ONLY_CONTENDED}: {QUIETER}", file)
    for text in _left_out(outcome):
        print_line(printable(text), file)


def _rank_columns(ranks: list[RankOutcome]) -> list[TableColumn]:
    def numbers(heading: str, name: str, form: str = ",.2f", rank: int = 0) -> TableColumn:
        return TableColumn(heading, [_number(item.totals.get(name), form) for item in ranks], rank=rank)

    return [
        TableColumn("rank", [str(item.rank) for item in ranks]),
        numbers("calls", "calls", ",d"),
        numbers("replayed", "replayed", ",d"),
        numbers("substituted", "substituted", ",d", 3),
        numbers("unsupported", "unsupported", ",d", 3),
        TableColumn("collectives", [f"{item.times.collectives:,}" for item in ranks], rank=2),
        TableColumn("left out", [f"{sum(item.left_out.values()):,}" for item in ranks], rank=2),
        numbers("captured wall ms", "captured_wall_ms", rank=4),
        numbers("wall ms", "replayed_wall_ms"),
        TableColumn("held ms", [f"{item.times.held_ms:,.2f}" for item in ranks]),
        TableColumn("waited ms", [f"{item.times.waited_ms:,.2f}" for item in ranks]),
    ]


def _collective_columns(rows: list[CollectiveTimes]) -> list[TableColumn]:
    return [
        TableColumn("collective", [_name(row) for row in rows], is_number=False),
        TableColumn("ranks", [_ranks(row.ranks) for row in rows], is_number=False),
        TableColumn("bytes", [f"{row.bytes:,}" for row in rows]),
        TableColumn("calls", [f"{row.calls:,}" for row in rows]),
        TableColumn("time us", [f"{row.median_us:,.1f}" for row in rows]),
        TableColumn("p90", [f"{row.p90_us:,.1f}" for row in rows], rank=4),
        TableColumn("algbw GB/s", [_number(row.algorithm_gb_per_s, ",.3f") for row in rows], rank=1),
        TableColumn("busbw GB/s", [_number(row.bus_gb_per_s, ",.3f") for row in rows]),
        TableColumn("wait us", [f"{row.wait_us:,.1f}" for row in rows]),
        TableColumn("last", [f"rank {row.last_rank}, {row.last_share:.0%}" for row in rows], is_number=False, rank=3),
    ]


def _name(row: CollectiveTimes) -> str:
    return printable(" ".join(word for word in (row.kind, row.reduction.lower(), row.dtype) if word))


def _ranks(ranks: tuple[int, ...]) -> str:
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ",".join(map(str, ranks))


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


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
