"""Tables for people, laid out by rich: on a terminal, in a pipe, or in Markdown."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from rich.cells import cell_len

from opgrip.cli.command import printable
from opgrip.cli.terminal import MOST, console_for, fold, print_line, shorten

if TYPE_CHECKING:
    from rich.console import Console
    from rich.segment import Segment

NARROWEST = 60  # terminal width in characters below which lines of a table wrap
WIDE, TIGHT = 3, 2  # number of characters between columns, on wide and narrow terminals
LONGEST = 300  # maximum length of a text cell in a pipe
# widths that long text is folded to, tried in this order until the table fits the terminal
FOLDED = (LONGEST, 12, 10, 8, 6)
INDENT = "  "  # indentation of text below its row


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column of a printed table: its heading, and how its cells are computed and fitted to the terminal.

    value : name of the attribute of a row that the cell shows, or a function of the row; `-` is printed for None
    form : format specification of Python for the value, such as `,.1f`; empty for text
    rank : on a narrow terminal, columns with the highest rank are left out first; columns with rank 0 never
    least : number of characters to which a column of text may be narrowed before other columns are left out
    """

    heading: str
    value: str | Callable[[Any], object]
    form: str = ""
    rank: int = 0
    least: int = 16
    below: bool = False
    is_command: bool = False
    most: int = MOST
    when: Callable[[Any], object] | None = None

    def cell(self, row: Any) -> str:
        value = getattr(row, self.value) if isinstance(self.value, str) else self.value(row)
        return "-" if value is None else shorten(format(value, self.form), self.most)

    def least_width(self, cells: Sequence[str], most: int) -> int:
        widest = _widest(cells)
        return max(_widest(self.heading.split()), widest if self.form else min(widest, self.least, most))


def print_table(
    columns: Sequence[TableColumn],
    rows: Sequence[Any],
    file: IO[str],
    title: str = "",
    style: Callable[[Any], str | None] = lambda row: None,
) -> None:
    """Print a table, fitted to the width of the terminal as far as possible."""
    if not rows:
        return
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    console = console_for(file)
    cells = {column: [column.cell(row) for row in rows] for column in shown_columns(columns, rows)}
    is_narrow = console.is_terminal and _width(cells, WIDE) > console.width
    goes_below = [column for column in cells if column.below and (is_narrow or _widest(cells[column]) > LONGEST)]
    below = {column: cells.pop(column) for column in goes_below}
    gap, width, most = WIDE, _width(cells, WIDE), LONGEST
    if is_narrow:
        gap, width = TIGHT, max(console.width, NARROWEST)
        cells = _narrowed(cells, width)
        most = next((most for most in FOLDED if _width(cells, TIGHT, most) <= width), FOLDED[-1])
        width = max(width, _width(cells, TIGHT, most))
    widths = _shared_out(cells, width, gap, most)
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, gap - TIGHT), header_style="bold")
    for column, own in zip(cells, widths, strict=True):
        heading = Text("\n".join(fold(column.heading, own)))
        table.add_column(heading, justify="right" if column.form else "left", width=own)
    folded = [[fold(text, own) for text in texts] for texts, own in zip(cells.values(), widths, strict=True)]
    for row, lines in zip(rows, zip(*folded, strict=True), strict=True):
        table.add_row(*(Text("\n".join(parts)) for parts in lines), style=style(row))
    print_line(title, file, "italic")
    printed = console.render_lines(table, console.options.update_width(width), pad=False)
    heights = [max(map(len, lines)) for lines in zip(*folded, strict=True)]
    start = len(printed) - sum(heights)
    _print(printed[:start], console)
    for place, height in enumerate(heights):
        _print(printed[start : start + height], console)
        start += height
        for column, texts in below.items():
            most = len(texts[place]) if column.is_command else max(width, NARROWEST) - len(INDENT)
            for line in fold(texts[place], most):
                console.print(Text(f"{INDENT}{line}".rstrip(), style(rows[place]) or ""), soft_wrap=True)
    console.print()


def _print(lines: Sequence[Sequence[Segment]], console: Console) -> None:
    from rich.text import Text

    for line in lines:
        text = Text.assemble(*((segment.text, segment.style or "") for segment in line))
        text.rstrip()
        console.print(text, soft_wrap=True)


def shown_columns(columns: Sequence[TableColumn], rows: Sequence[Any]) -> list[TableColumn]:
    return [column for column in columns if column.when is None or any(map(column.when, rows))]


def _narrowed(cells: Mapping[TableColumn, list[str]], width: int) -> dict[TableColumn, list[str]]:
    fitting = dict(cells)
    while _width(fitting, TIGHT, LONGEST) > width and (highest := max(column.rank for column in fitting)):
        fitting = {column: texts for column, texts in fitting.items() if column.rank != highest}
    return fitting


def _width(cells: Mapping[TableColumn, list[str]], gap: int, folded: int | None = None) -> int:
    widths = (
        _widest([column.heading, *texts]) if folded is None else column.least_width(texts, folded)
        for column, texts in cells.items()
    )
    return sum(widths) + gap * (len(cells) - 1)


def _shared_out(cells: Mapping[TableColumn, list[str]], width: int, gap: int, most: int) -> list[int]:
    rest = width - _width(cells, gap, most)
    widths = []
    for column, texts in cells.items():
        least = column.least_width(texts, most)
        more = max(0, min(rest, _widest([column.heading, *texts]) - least))
        rest -= more
        widths.append(least + more)
    return widths


def _widest(texts: Sequence[str]) -> int:
    return max(map(cell_len, texts), default=0)


# Markdown does not parse underscores within words, and the text is more readable without backslashes
_MARKUP = re.compile(r"[\\|`*<>\[\]]|(?<!\w)_|_(?!\w)|(?<!^)~|^[#+-](?=[\s#]|$)")


def literal(text: str) -> str:
    """Return text for Markdown, with unprintable characters and Markdown's special characters escaped."""
    return _MARKUP.sub(lambda match: f"\\{match[0]}", printable(text))


def markdown_table(columns: Sequence[TableColumn], rows: Sequence[Any]) -> list[str]:
    columns = shown_columns(columns, rows)
    lines = [" | ".join(column.heading for column in columns), " | ".join("---" for _ in columns)]
    lines += [" | ".join(literal(column.cell(row)) for column in columns) for row in rows]
    return [f"| {line} |" for line in lines]
