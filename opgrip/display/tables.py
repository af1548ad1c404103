"""Tables for people, on a terminal of any width or in a pipe.

Where a table is too wide, text folds, headings stand in two lines, some text goes below its row, and columns leave by
their rank. On a terminal of less than 60 columns each row is a block of lines. Numbers are whole everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import IO

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from opgrip.cli.terminal import MOST, console_for, fold, print_line, shorten

LIST_BELOW = 60
"""Columns of a terminal from which on there is a table."""
WIDE, TIGHT = 3, 2
"""Characters between columns."""
EXTRA = 5
"""Rank from which on columns leave before any text folds."""
LONGEST = 300
"""Characters of a text that stands beside others in a pipe."""
INDENT = "  "
MOST_INDENT = 12
"""Characters before what stands below its row."""


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column.

    Attributes
    ----------
    is_number : stands at the right, and is never folded
    rank : columns with the largest leave first where there is no room for all, from 5 on before text folds for them;
        those of 0 stay
    least : characters that text folds to, before columns leave for it
    below : the text may go below its row, where less than that is left for it
    joint : ends each line of a text below that another one follows
    most : characters of a cell that are shown
    """

    heading: str
    cells: Sequence[str]
    is_number: bool = True
    rank: int = 0
    least: int = 12
    below: bool = False
    joint: str = ""
    most: int = MOST

    @property
    def width(self) -> int:
        """Of its widest cell."""
        return max(map(cell_len, self.cells), default=0)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where columns stand: beside each other with their widths, or below the others."""

    columns: Sequence[TableColumn]
    widths: Sequence[int]
    gap: int
    below: Sequence[TableColumn] = ()

    @property
    def width(self) -> int:
        return sum(self.widths) + self.gap * (len(self.widths) - 1)


def print_table(
    columns: Sequence[TableColumn], file: IO[str], title: str = "", styles: Sequence[str | None] | None = None
) -> None:
    """Print a table that fits the terminal; in a pipe, lines are as long as the table is wide without very long texts.

    Parameters
    ----------
    styles : of each row, in rich's words
    """
    console = console_for(file)
    width = console.width if console.is_terminal else None
    columns = [replace(column, cells=[shorten(cell, column.most) for cell in column.cells]) for column in columns]
    layout = _lay_out(columns, width)
    print_line(title, file, "italic")
    if layout is None:
        assert width is not None, "a pipe has room for all"
        rows: Iterator[list[str]] = _blocks(columns, width)
    else:
        for line in _lines([column.heading for column in layout.columns], layout):
            _print(console, line, "bold")
        _print(console, "─" * layout.width)
        rows = (_row_lines(place, layout) for place in range(len(columns[0].cells)))
    for lines, style in zip_longest(rows, styles or (), fillvalue=None):
        for line in lines or ():
            _print(console, line, style)
    console.print()


def _print(console: Console, line: str, style: str | None = None) -> None:
    console.print(Text(line.rstrip(), style or ""), soft_wrap=True)


def _lay_out(columns: Sequence[TableColumn], width: int | None) -> _Layout | None:
    """The layout that shows most in a terminal of that width; None where only a list of blocks fits."""
    if width is None:
        long = [column for column in columns if column.below and column.width > LONGEST]
        layout = _fit([column for column in columns if column not in long], None, WIDE, folds_headings=False)
        return None if layout is None else replace(layout, below=long)
    if width < LIST_BELOW:
        return None
    below = [column for column in columns if column.below]
    # with text as wide as it wants first
    comfortable = [column if column.below else replace(column, least=column.width) for column in columns]
    layout = _fit(comfortable, width, WIDE, folds_headings=False)
    beside = [column for column in columns if not column.below]
    while layout is None:
        comfortable = [replace(column, least=column.width) for column in beside]
        layout = _fit(comfortable, width, WIDE, folds_headings=False) or _fit(
            comfortable, width, TIGHT, folds_headings=True
        )
        highest = max(column.rank for column in beside)
        if layout is None and highest < EXTRA:
            layout = _fit(beside, width, TIGHT, folds_headings=True)
        if layout is not None or not highest:
            return None if layout is None else replace(layout, below=below)
        beside = [column for column in beside if column.rank != highest]
    return layout


def _fit(columns: Sequence[TableColumn], width: int | None, gap: int, folds_headings: bool) -> _Layout | None:
    """The columns beside each other, text having what the numbers leave; None where that is less than its least."""
    headings = [_heading_width(column.heading, folds_headings) for column in columns]
    naturals = [max(heading, column.width) for heading, column in zip(headings, columns, strict=True)]
    layout = _Layout(columns, naturals, gap)
    if width is None or layout.width <= width:
        return layout
    widths = [
        natural if column.is_number else max(heading, min(natural, column.least))
        for natural, heading, column in zip(naturals, headings, columns, strict=True)
    ]
    room = width - _Layout(columns, widths, gap).width
    if room < 0:
        return None
    for place, natural in enumerate(naturals):
        added = min(room, natural - widths[place])
        widths[place], room = widths[place] + added, room - added
    return _Layout(columns, widths, gap)


def _heading_width(heading: str, folds: bool) -> int:
    return max(map(cell_len, heading.split() if folds else [heading]), default=0)


def _row_lines(place: int, layout: _Layout) -> list[str]:
    lines = list(_lines([column.cells[place] for column in layout.columns], layout))
    indent = _indent(layout)
    for column in layout.below:
        width = max(layout.width, LIST_BELOW) - indent
        lines += [" " * indent + line for line in fold(column.cells[place], width, column.joint)]
    return lines


def _indent(layout: _Layout) -> int:
    """Where the first text begins, below which what belongs to it stands; less where that would leave little."""
    first = next((place for place, column in enumerate(layout.columns) if not column.is_number), 0)
    place = sum(width + layout.gap for width in layout.widths[:first])
    return place if place <= MOST_INDENT else len(INDENT)


def _lines(cells: Sequence[str], layout: _Layout) -> Iterator[str]:
    """One row, in as many lines as its cells fold to."""
    folded = [fold(cell, width) for cell, width in zip(cells, layout.widths, strict=True)]
    for parts in zip_longest(*folded, fillvalue=""):
        aligned = [
            _pad(part, width, column.is_number)
            for part, width, column in zip(parts, layout.widths, layout.columns, strict=True)
        ]
        yield (" " * layout.gap).join(aligned).rstrip()


def _pad(text: str, width: int, is_right: bool) -> str:
    spaces = " " * (width - cell_len(text))
    return spaces + text if is_right else text + spaces


def _blocks(columns: Sequence[TableColumn], width: int) -> Iterator[list[str]]:
    """Each row as a name, and below it the other cells, each after its heading."""
    name = next((column for column in columns if not column.is_number), columns[0])
    others = sorted((column for column in columns if column is not name), key=lambda column: not column.below)
    for place, title in enumerate(name.cells):
        lines = fold(title, width)
        line = ""
        for column in others:
            cell = column.cells[place]
            entry = cell if column.below else f"{column.heading} {cell}"
            if not cell:
                continue
            if line and cell_len(f"{line}  {entry}") > width - len(INDENT):
                lines.append(INDENT + line)
                line = ""
            if cell_len(entry) > width - len(INDENT):
                lines += [INDENT + part for part in fold(entry, width - len(INDENT), column.joint)]
            else:
                line = f"{line}  {entry}" if line else entry
        yield [*lines, *([INDENT + line] if line else [])]
