"""A comparison on a terminal or in a pipe."""

from __future__ import annotations

from collections.abc import Sequence
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
        columns = [column for column in COLUMNS if column.heading != BECAUSE]
        print_table(columns, rows, file, style=lambda row: STYLES.get(row.verdict))
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
    columns = [
        TableColumn("verdict", lambda total: total.judgement.verdict.value),
        TableColumn(by, "name"),
        TableColumn("cases", "cases", ",d", rank=3),
        TableColumn("base ms", lambda total: total.base_us / 1e3, ",.2f"),
        TableColumn("new ms", lambda total: total.new_us / 1e3, ",.2f"),
        TableColumn("ratio", lambda total: total.judgement.ratio, ".3f"),
        TableColumn(INTERVAL, lambda total: interval_text(total.judgement.low, total.judgement.high), ">", rank=1),
    ]
    print_table(columns, comparison.totals(by), file, style=lambda total: STYLES.get(total.judgement.verdict.value))


def _time(value: float | None) -> str | None:
    return None if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"


COLUMNS = (
    TableColumn("verdict", "verdict"),
    TableColumn("operator", "op", least=24),
    TableColumn("mode", "mode", rank=3),
    TableColumn("variant", lambda row: row.variant or None, when=lambda row: row.variant),
    TableColumn("shapes", "shapes", below=True),
    TableColumn("count", "count", ",d", rank=4),
    TableColumn("base us", lambda row: _time(row.base_us), ">"),
    TableColumn("new us", lambda row: _time(row.new_us), ">"),
    TableColumn("ratio", "ratio", ".3f"),
    TableColumn(INTERVAL, lambda row: interval_text(row.low, row.high) if row.low and row.high else None, ">", rank=1),
    TableColumn("more runs", lambda row: row.more_runs or None, ">", rank=2),
    TableColumn(BECAUSE, lambda row: row.reason or "", rank=5, when=lambda row: row.reason),
)
"""Columns of a table of rows."""
