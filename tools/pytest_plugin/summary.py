"""The table below the tests."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

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

    def column(heading: str, value: str | Callable[[Line], object], form: str = "", **options: Any) -> TableColumn:
        return TableColumn(heading, value, form, most=MOST_OF_SHAPES, **options)

    has_modes = len({line.mode for line in lines}) > 1
    columns = [
        column("operator", "op"),
        column("shapes", "shapes"),
        column("mode", "mode", when=lambda _: has_modes),
        column("median us", "median_us", ",.2f"),
    ]
    if is_compared:
        columns += [
            column("baseline us", "base_us", ",.2f"),
            column("ratio", "ratio", ",.3f"),
            column(
                "95% interval", lambda line: interval_text(line.low, line.high) if line.low and line.high else None, ">"
            ),
            column("verdict", "verdict"),
        ]
    columns.append(column("because", "reason", when=lambda line: line.reason))
    columns.append(column("status", "status", when=lambda line: line.status != "ok"))
    file = io.StringIO()
    print_table(columns, lines, file)
    return file.getvalue().strip("\n").splitlines()
