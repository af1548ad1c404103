"""What a page is told of how runs differ: verdicts, totals, and what became of gates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from opgrip.replay.comparison.comparison import compare
from opgrip.replay.comparison.gate import hold_all, margin_for, parse_gate
from opgrip.replay.comparison.reports.comparison_rows import advice, rows_of, summary, total_line
from opgrip.replay.outcome import Results

GATES = ("slower<=5%", "failed<=0", "changed<=0")
"""Gates of a page if no others are asked for."""
COLUMNS = ("verdict", "op", "shapes", "mode", "variant", "base_us", "new_us", "ratio", "low", "high", "reason")


def describe_comparisons(runs: Mapping[str, Results], gates: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the comparison of each run with the first."""
    conditions = list(map(parse_gate, gates))
    names = list(runs)
    for name in names[1:]:
        comparison = compare(runs[names[0]], runs[name], margin_for(conditions))
        lines = [summary(comparison), *map(total_line, comparison.totals()), *advice(comparison)]
        rows = list(islice(rows_of(comparison), MOST_ROWS))
        yield {
            "name": name,
            "base": names[0],
            "lines": list(map(_plain, lines)),
            "gates": [_plain(item.line) for item in hold_all(conditions, comparison)],
            "columns": COLUMNS,
            "rows": [[_plain(getattr(row, column)) for column in COLUMNS] for row in rows],
        }


MOST_ROWS = 20_000
"""Rows of a comparison that a page holds, those that got worse first."""


def _plain(cell: Any) -> Any:
    if isinstance(cell, float):
        return float(f"{cell:.6g}") if abs(cell) < float("inf") else None
    # a browser takes no halves of characters
    return cell.encode("utf-8", "backslashreplace").decode() if isinstance(cell, str) else cell
