"""Results as a table for people, on a terminal, in a pipe, or as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import IO, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from opgrip.replay.arguments.values import RECORDED
from opgrip.replay.reports.report import reports
from opgrip.replay.results import FORWARD, OK, Result

COLUMNS = ("share", "operator", "shapes", "count", "captured us", "replayed us", "p10", "p90", "status")
SHAPES = COLUMNS.index("shapes")
BETWEEN = 3
"""Characters that a column takes beside its own width."""
STYLES = {"failed": "red", "timeout": "red", "unsupported": "yellow", "skipped": "dim"}


def print_table(results: Sequence[Result], file: IO[str]) -> None:
    """Print the table; reasons of what is not ok stand below it, one line for all cases that share one."""
    console = Console(file=file, highlight=False)
    rows = [_cells(result) for result in results]
    widths = [max(map(len, column)) for column in zip(COLUMNS, *rows, strict=True)]
    if console.is_terminal:
        others = sum(widths) - widths[SHAPES] + BETWEEN * len(widths)
        widths[SHAPES] = min(widths[SHAPES], max(console.width - others, len(COLUMNS[SHAPES])))
    else:
        console = Console(file=file, width=sum(widths) + BETWEEN * len(widths), highlight=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for name, width in zip(COLUMNS, widths, strict=True):
        left = name in ("operator", "shapes", "status")
        table.add_column(name, justify="left" if left else "right", no_wrap=True, width=width)
    for result, row in zip(results, rows, strict=True):
        table.add_row(*map(Text, row), style=STYLES.get(result.status))
    console.print(table)
    for reason, operators in _reasons(results).items():
        console.print(Text(f"{reason}: {operators}"), soft_wrap=True)


@reports.register(".md")
def write_markdown(results: Sequence[Result], header: Mapping[str, Any], file: IO[str]) -> None:
    """The same table in Markdown, under a line that says where it comes from."""
    told = ", ".join(f"{name} {value}" for name, value in header.items() if isinstance(value, str | int))
    file.write(f"{told}\n\n| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}\n")
    for result in results:
        cells = (cell.replace("|", "\\|") for cell in _cells(result))
        file.write(f"| {' | '.join(cells)} |\n")
    for reason, operators in _reasons(results).items():
        file.write(f"\n{reason}: {operators}\n")


def _cells(result: Result) -> list[str]:
    status = result.status
    if status == OK:
        doubts = [word for word, is_so in (("unfaithful", result.faithful is False), ("noisy", result.noisy)) if is_so]
        status = ", ".join([status, *doubts])
    kind = [word for word in (result.direction, result.values) if word not in (FORWARD, RECORDED)]
    return [
        f"{result.share:.1%}",
        " ".join([result.op, *kind]),
        result.shapes,
        f"{result.count:,}",
        *(_microseconds(time) for time in (result.captured_us, result.median_us, result.p10_us, result.p90_us)),
        status,
    ]


def _microseconds(time: float | None) -> str:
    if time is None:
        return "-"
    return f"{time:,.0f}" if time >= 100 else f"{time:.1f}"


def _reasons(results: Sequence[Result]) -> dict[str, str]:
    operators: dict[str, dict[str, int]] = {}
    for result in results:
        if result.error is not None:
            counts = operators.setdefault(f"{result.status}: {result.error}", {})
            counts[result.op] = counts.get(result.op, 0) + 1
    return {
        reason: ", ".join(f"{op} ({count} cases)" if count > 1 else op for op, count in counts.items())
        for reason, counts in operators.items()
    }
