"""The table below the tests."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

    from opgrip.tools.pytest_plugin.measured import Benchmarks, Line

MOST_ROWS = 200
MOST_OF_SHAPES = 48


def print_summary(benchmarks: Benchmarks, reporter: pytest.TerminalReporter) -> None:
    """Print what was measured, what is not as it was with the baseline, and what became of the results."""
    if not benchmarks.lines and not benchmarks.notes:
        return
    compared = benchmarks.options.compare
    reporter.section("opgrip" if compared is None else f"opgrip, against {compared.stem}")
    for name, (old, now) in benchmarks.differs.items():
        reporter.write_line(f"differs {name}: {old}, now {now}", yellow=True)
    if benchmarks.lines:
        for text in _table(benchmarks.lines[:MOST_ROWS], compared is not None):
            reporter.write_line(text)
    if len(benchmarks.lines) > MOST_ROWS:
        reporter.write_line(f"{len(benchmarks.lines) - MOST_ROWS:,} more rows")
    for line in benchmarks.gate_lines:
        reporter.write_line(line)
    for note in benchmarks.notes:
        reporter.write_line(note)


def _table(lines: list[Line], is_compared: bool) -> list[str]:
    from opgrip.display.tables import TableColumn, print_table
    from opgrip.replay.comparison.differences import interval_text

    def column(heading: str, cell: Callable[[Line], str], is_number: bool = True) -> TableColumn:
        return TableColumn(heading, list(map(cell, lines)), is_number, most=MOST_OF_SHAPES)

    columns = [
        column("operator", lambda line: line.op, is_number=False),
        column("shapes", lambda line: line.shapes, is_number=False),
    ]
    if len({line.mode for line in lines}) > 1:
        columns.append(column("mode", lambda line: line.mode, is_number=False))
    columns.append(column("median us", lambda line: _number(line.median_us, 2)))
    if is_compared:
        columns += [
            column("baseline us", lambda line: _number(line.base_us, 2)),
            column("ratio", lambda line: _number(line.ratio, 3)),
            column("95% interval", lambda line: interval_text(line.low, line.high) if line.low and line.high else "-"),
            column("verdict", lambda line: line.verdict, is_number=False),
        ]
    if any(line.reason for line in lines):
        columns.append(column("because", lambda line: line.reason, is_number=False))
    if any(line.status != "ok" for line in lines):
        columns.append(column("status", lambda line: line.status, is_number=False))
    file = io.StringIO()
    print_table(columns, file)
    return file.getvalue().strip("\n").splitlines()


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
