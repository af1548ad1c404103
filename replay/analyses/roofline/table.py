"""How near the operators come to the machine's limits, for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

from opgrip.cli.terminal import print_line
from opgrip.display.tables import TableColumn, print_table
from opgrip.replay.analyses.roofline.limits import LimitColumns
from opgrip.replay.cases.ways import FORWARD
from opgrip.replay.modes import EAGER
from opgrip.replay.results.results import Result


@dataclass(frozen=True, slots=True)
class Nearness:
    """All calls of an operator that have a limit.

    Attributes
    ----------
    operator : with its mode and what else tells its rows from others
    share : of the time of all that have a limit, 0 to 1
    calls : in the program
    us, limit_us : time of all calls, and the least that they could take
    bound : what binds most of that time
    gain : share of the time of all that would be saved if all calls ran at their limits
    """

    operator: str
    share: float
    calls: int
    us: float
    limit_us: float
    bound: str
    gain: float

    @property
    def of_limit(self) -> float:
        """How near the calls come to their limits, 1 being there."""
        return self.limit_us / self.us


def nearness(rows: Sequence[Result]) -> list[Nearness]:
    """One for each operator, by falling share of time; rows without a limit are left out."""
    limited = [row for row in rows if LimitColumns.of(row).limit_us is not None and row.median_us]
    total = sum(_us(row) for row in limited)
    by_operator: dict[str, list[Result]] = {}
    for row in limited:
        by_operator.setdefault(_name(row), []).append(row)
    entries = [_nearness(name, own, total) for name, own in by_operator.items()]
    return sorted(entries, key=lambda item: -item.share)


def print_roofline(rows: Sequence[Result], file: IO[str]) -> None:
    """Print the table, and what the whole would gain."""
    entries = nearness(rows)
    if not entries:
        print("no row has a limit: nothing was timed, or it is not known what the calls move", file=file)
        return
    columns = [
        TableColumn("share", [f"{item.share:.1%}" for item in entries], rank=2),
        TableColumn("operator", [item.operator for item in entries], is_number=False, least=20),
        TableColumn("calls", [f"{item.calls:,}" for item in entries], rank=3),
        TableColumn("time us", [f"{item.us:,.0f}" for item in entries], rank=1),
        TableColumn("limit us", [f"{item.limit_us:,.0f}" for item in entries], rank=1),
        TableColumn("of limit", [f"{item.of_limit:.2f}" for item in entries]),
        TableColumn("bound", [item.bound for item in entries], is_number=False),
        TableColumn("gain", [f"{item.gain:.1%}" for item in entries]),
    ]
    print_table(columns, file, "how near the machine's limit")
    us, limit = sum(item.us for item in entries), sum(item.limit_us for item in entries)
    bounds = Counter[str]()
    for item in entries:
        bounds[item.bound] += item.share  # type: ignore[assignment]
    bounds_text = ", ".join(f"{share:.0%} {bound}" for bound, share in bounds.most_common())
    print_line(f"{limit / us:.2f} of the limit in all; bound by {bounds_text}", file)


def _nearness(name: str, rows: Sequence[Result], total: float) -> Nearness:
    limits = [(row, LimitColumns.of(row)) for row in rows]
    us, limit = sum(map(_us, rows)), sum(row.count * (own.limit_us or 0.0) for row, own in limits)
    times: dict[str, float] = {}
    for row, own in limits:
        times[own.bound or ""] = times.get(own.bound or "", 0.0) + _us(row)
    saved = sum(row.count * max((row.median_us or 0.0) - (own.limit_us or 0.0), 0.0) for row, own in limits)
    calls = sum(row.count for row in rows)
    return Nearness(name, us / total, calls, us, limit, max(times, key=lambda bound: times[bound]), saved / total)


def _us(row: Result) -> float:
    return row.count * (row.median_us or 0.0)


def _name(row: Result) -> str:
    """The operator, and of its rows what is not usual."""
    return " ".join(
        [
            row.op,
            *([row.direction] if row.direction != FORWARD else []),
            *([row.mode] if row.mode != EAGER else []),
            *([f"threads {row.threads}"] if row.threads else []),
            *([f"batch x{row.batch_scale}"] if row.batch_scale != 1 else []),
        ]
    )
