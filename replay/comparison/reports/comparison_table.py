"""A comparison on a terminal or in a pipe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import log
from typing import IO

from opgrip.cli.command import printable
from opgrip.cli.terminal import print_line, shorten
from opgrip.display.tables import TableColumn, print_table
from opgrip.replay.comparison.comparison import Comparison
from opgrip.replay.comparison.differences import Verdict, interval_text
from opgrip.replay.comparison.gate import Held, Outcome
from opgrip.replay.comparison.reports.comparison_rows import (
    INTERVAL,
    UNTIMED,
    ComparisonColumns,
    advice,
    origin,
    rows_of,
    summary,
    total_line,
)

STYLES = {"SLOWER": "bold red", "BROKEN": "bold red", "CHANGED": "bold red", "FASTER": "green", "UNSURE": "yellow"}
BECAUSE = "because"
QUIET = {Verdict.SAME.value, Verdict.UNSURE.value, UNTIMED}
"""Verdicts whose rows are shown on request."""
LARGEST = 10
"""Rows that are shown if no other is: those whose times differ most."""
OUTCOMES = {Outcome.PASSED: "green", Outcome.FAILED: "bold red", Outcome.NOT_DECIDED: "yellow"}


def print_comparison(
    comparison: Comparison, file: IO[str], by: str | None = None, all_rows: bool = False, held: Sequence[Held] = ()
) -> None:
    """Print what differs, the groups if they are asked for, the rows that changed, what came of all, and the gates.

    Parameters
    ----------
    by : what cases are grouped by
    all_rows : show those that are the same, and those of which nothing is sure, too
    """
    for name, header in (("base", comparison.base), ("new", comparison.new)):
        print_line(f"{name:<8}{printable(origin(header))}", file)
    for name, old, new in comparison.differs:
        print_line(f"differs {printable(name)}: {printable(old)}, now {printable(new)}", file, "yellow")
    if by is not None:
        _print_groups(comparison, by, file)
    rows = list(rows_of(comparison)) if all_rows else shown_rows(comparison)
    if rows:
        columns = [column for column in columns_of(rows) if column.heading != BECAUSE]
        print_table(columns, file, styles=[STYLES.get(row.verdict) for row in rows])
    # below the table, where a narrow terminal has room for them
    for line in _reasons(rows):
        print_line(line, file)
    print_line(summary(comparison), file, "bold")
    for total in comparison.totals():
        print_line(total_line(total), file)
    for line in advice(comparison):
        print_line(line, file)
    for item in held:
        print_line(item.line, file, OUTCOMES[item.outcome])


def shown_rows(comparison: Comparison) -> list[ComparisonColumns]:
    """Return the rows that changed, or, if there are none, those whose times differ most."""
    rows = list(rows_of(comparison))
    changed = [row for row in rows if row.verdict not in QUIET]
    largest = sorted((row for row in rows if row.ratio), key=lambda row: -abs(log(row.ratio or 1.0)))
    return changed or largest[:LARGEST]


def columns_of(rows: Sequence[ComparisonColumns]) -> list[TableColumn]:
    """The columns of a table of rows."""

    def column(
        heading: str, cell: Callable[[ComparisonColumns], str], is_number: bool = True, rank: int = 0
    ) -> TableColumn:
        return TableColumn(heading, list(map(cell, rows)), is_number, rank, below=heading == "shapes")

    columns = [
        column("verdict", lambda row: row.verdict, is_number=False),
        column("operator", lambda row: row.op, is_number=False),
        column("mode", lambda row: row.mode, is_number=False, rank=3),
        column("shapes", lambda row: row.shapes, is_number=False),
        column("count", lambda row: f"{row.count:,}", rank=4),
        column("base us", lambda row: _time(row.base_us)),
        column("new us", lambda row: _time(row.new_us)),
        column("ratio", lambda row: _ratio(row.ratio)),
        column(INTERVAL, lambda row: interval_text(row.low, row.high) if row.low and row.high else "-", rank=1),
        column("more runs", lambda row: str(row.more_runs or "-"), rank=2),
    ]
    if any(row.variant for row in rows):
        columns.insert(3, column("variant", lambda row: row.variant or "-", is_number=False))
    if any(row.reason for row in rows):
        columns.append(column(BECAUSE, lambda row: row.reason or "", is_number=False, rank=5))
    return columns


def _reasons(rows: Sequence[ComparisonColumns]) -> list[str]:
    """Why rows are not timed, or sure, a line for each reason."""
    operators: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.reason and row.verdict not in QUIET:
            operators.setdefault((row.verdict, row.reason), []).append(row.op)
    return [
        f"{verdict} {shorten(ops[0])}{f' and {len(ops) - 1:,} more' if len(ops) > 1 else ''}: {printable(reason)}"
        for (verdict, reason), ops in operators.items()
    ]


def _print_groups(comparison: Comparison, by: str, file: IO[str]) -> None:
    totals = comparison.totals(by)
    columns = [
        TableColumn("verdict", [total.judgement.verdict.value for total in totals], is_number=False),
        TableColumn(by, [total.name for total in totals], is_number=False),
        TableColumn("cases", [f"{total.cases:,}" for total in totals], rank=3),
        TableColumn("base ms", [f"{total.base_us / 1e3:,.2f}" for total in totals]),
        TableColumn("new ms", [f"{total.new_us / 1e3:,.2f}" for total in totals]),
        TableColumn("ratio", [_ratio(total.judgement.ratio) for total in totals]),
        TableColumn(INTERVAL, [interval_text(total.judgement.low, total.judgement.high) for total in totals], rank=1),
    ]
    print_table(columns, file, styles=[STYLES.get(total.judgement.verdict.value) for total in totals])


def _time(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
