"""Results as a table for people, on a terminal, in a pipe, or as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import IO, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from opgrip.replay.arguments.values import RECORDED
from opgrip.replay.cases.ways import FORWARD
from opgrip.replay.measuring.columns import Column
from opgrip.replay.measuring.results import OK, Result
from opgrip.replay.modes import EAGER
from opgrip.replay.reports.cells import added_columns
from opgrip.replay.reports.report import report
from opgrip.traces.command import printable

SHAPES = "shapes"
LEFT = ("operator", "mode", SHAPES, "status")
MOST_NAMED = 6
"""Operators that one reason is said of by name."""
BETWEEN = 3
"""Characters that a column takes beside its own width."""
STYLES = {"wrong": "bold red", "failed": "red", "timeout": "red", "unsupported": "yellow", "skipped": "dim"}


def print_table(results: Sequence[Result], file: IO[str]) -> None:
    """Print the table; reasons of what is not ok stand below it, one line for all cases that share one."""
    console = Console(file=file, highlight=False)
    columns = _columns(results)
    widths = {name: max(map(len, (name, *cells))) for name, cells in columns.items()}
    if console.is_terminal:
        others = sum(widths.values()) - widths[SHAPES] + BETWEEN * len(widths)
        widths[SHAPES] = min(widths[SHAPES], max(console.width - others, len(SHAPES)))
    else:
        console = Console(file=file, width=sum(widths.values()) + BETWEEN * len(widths), highlight=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for name, width in widths.items():
        table.add_column(name, justify="left" if name in LEFT else "right", no_wrap=True, width=width)
    for result, *row in zip(results, *columns.values(), strict=True):
        table.add_row(*map(Text, row), style=STYLES.get(result.status))
    console.print(table)
    for reason, operators in _reasons(results).items():
        console.print(Text(printable(f"{operators}: {reason}")), soft_wrap=True)


@report(".md")
def write_markdown(results: Sequence[Result], header: Mapping[str, Any], file: IO[str]) -> None:
    """The same table in Markdown, under a line that says where it comes from."""
    origin = ", ".join(f"{name} {value}" for name, value in header.items() if isinstance(value, str | int))
    columns = _columns(results)
    file.write(f"{origin}\n\n| {' | '.join(columns)} |\n|{' --- |' * len(columns)}\n")
    for row in zip(*columns.values(), strict=True):
        cells = (cell.replace("|", "\\|") for cell in row)
        file.write(f"| {' | '.join(cells)} |\n")
    for reason, operators in _reasons(results).items():
        file.write(f"\n{printable(operators)}: {printable(reason)}\n")


def _columns(results: Sequence[Result]) -> dict[str, list[str]]:
    """The cells of the columns that these results need, by the columns' names."""
    added = [
        about
        for about in added_columns()
        if about.heading and any(row.added.get(about.name) is not None for row in results)
    ]
    columns: dict[str, Callable[[Result], str]] = {
        "share": lambda result: f"{result.share:.1%}",
        "operator": _operator,
        "mode": lambda result: f"{result.mode} ({result.note})" if result.note else result.mode,
        "threads": lambda result: str(result.threads or "-"),
        "batch": lambda result: f"x{result.batch_scale}",
        "streams": lambda result: str(result.streams),
        SHAPES: lambda result: result.shapes,
        "count": lambda result: f"{result.count:,}",
        "captured us": lambda result: _microseconds(result.captured_us),
        "replayed us": lambda result: _microseconds(result.median_us),
        "p10": lambda result: _microseconds(result.p10_us),
        "p90": lambda result: _microseconds(result.p90_us),
        "speed-up": lambda result: "-" if not result.ratio else f"{1 / result.ratio:.2f}",
        "first ms": lambda result: "-" if result.first_ms is None else f"{result.first_ms:,.1f}",
        **{about.heading: partial(_added, about) for about in added},
        "status": _status,
    }
    is_needed = {
        "mode": any(result.mode != EAGER for result in results),
        "threads": any(result.threads for result in results),
        "batch": any(result.batch_scale != 1 for result in results),
        "streams": any(result.streams != 1 for result in results),
    }
    # samples were not captured in a program, and of gripped calls the time there is not known
    is_needed["share"] = is_needed["captured us"] = any(result.captured_total_us for result in results)
    is_needed["count"] = is_needed["share"] or any(result.count != 1 for result in results)
    is_needed["speed-up"] = is_needed["first ms"] = is_needed["mode"]
    return {
        name: [printable(cell(result)) for result in results]
        for name, cell in columns.items()
        if is_needed.get(name, True)
    }


def _operator(result: Result) -> str:
    return " ".join(
        [result.op, *(word for word in (result.direction, result.values) if word not in (FORWARD, RECORDED))]
    )


def _status(result: Result) -> str:
    if result.status != OK:
        return result.status
    doubts = [word for word, is_so in (("unfaithful", result.faithful is False), ("noisy", result.noisy)) if is_so]
    return ", ".join([OK, *doubts])


def _microseconds(time: float | None) -> str:
    if time is None:
        return "-"
    return f"{time:,.0f}" if time >= 100 else f"{time:.1f}"


def _added(about: Column, result: Result) -> str:
    """The cell of a column that a part has added."""
    cell = result.added.get(about.name)
    if about.unit == "us":
        return _microseconds(cell)
    if cell is None:
        return "-"
    if about.unit == "1":
        return f"{cell:.0%}"
    return cell if isinstance(cell, str) else f"{cell:g}"


def _reasons(results: Sequence[Result]) -> dict[str, str]:
    operators: dict[str, dict[str, int]] = {}
    for result in results:
        if result.error is not None:
            where = "" if result.mode == EAGER else f"{result.mode} "
            counts = operators.setdefault(f"{where}{result.status}: {result.error}", {})
            counts[result.op] = counts.get(result.op, 0) + 1
    return {reason: _counted(counts) for reason, counts in operators.items()}


def _counted(counts: Mapping[str, int]) -> str:
    """The operators that share a reason, the first few by name."""
    names = [f"{op} ({count} cases)" if count > 1 else op for op, count in counts.items()]
    others = len(names) - MOST_NAMED
    return f"{', '.join(names[:MOST_NAMED])} and {others} others" if others > 1 else ", ".join(names)
