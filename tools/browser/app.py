"""The table of a run in a terminal: sorted by any column, filtered as one types, a row's details on request."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Header, Input, Static

from opgrip.cli.command import printable
from opgrip.cli.folding import shorten
from opgrip.replay.reports.cells import all_columns
from opgrip.replay.results.columns import Column
from opgrip.replay.results.results import OK, Result, summarize

SHOWN = (
    *("op", "mode", "status", "median_us", "captured_us", "speed_up", "share", "count", "p10_us", "p90_us"),
    *("gflop_per_s", "gb_per_s", "of_limit", "module", "shapes", "error"),
)
"""Columns of the table, as far as these rows have something in them; a row's details have all."""
WIDTH = 60
"""Characters of a cell."""
CHUNK, AHEAD = 500, 100
"""Rows that the table is given at once, and how many before its end it is given more: of 50,000 it would take half a
minute to list all, at each letter that is typed."""
STYLES = {OK: "green", "wrong": "bold red", "failed": "red", "timeout": "red", "unsupported": "yellow"}


@dataclass(frozen=True, slots=True)
class _Row:
    """A row, its cells by their columns, and the text that it is found by."""

    result: Result
    cells: dict[str, Any]
    text: str


class Details(ModalScreen[None]):
    """All that is known of a row."""

    BINDINGS: ClassVar = [Binding("escape,q,enter", "dismiss", "Back")]
    CSS = """
    Details { align: center middle; }
    VerticalScroll { width: 90%; height: 90%; border: solid $primary; padding: 1 2; }
    """

    def __init__(self, row: Result) -> None:
        super().__init__()
        self._row = row

    @property
    def text(self) -> str:
        """A line a column that has something in it."""
        cells = self._row.to_plain()
        return "\n".join(
            f"{about.name:<22}{printable(cells[about.name])}{f' {about.unit}' if about.unit not in ('', '1') else ''}"
            for about in all_columns()
            if not about.hidden and cells.get(about.name) not in (None, "")
        )

    def compose(self) -> ComposeResult:
        """Its text, which scrolls."""
        with VerticalScroll():
            yield Static(Text(self.text))


class ResultsBrowser(App[None]):
    """The table.

    Parameters
    ----------
    rows : of a run
    title : what they come from
    """

    TITLE = "opgrip top"
    BINDINGS: ClassVar = [
        Binding("q", "quit", "Quit"),
        Binding("s", "sort", "Sort by the column"),
        Binding("/", "filter", "Filter"),
        Binding("n", "not_ok", "Not ok alone"),
        Binding("escape", "clear", "Show all"),
    ]
    CSS = "Input { dock: bottom; display: none; } Input.shown { display: block; } DataTable { height: 1fr; }"

    def __init__(self, rows: Sequence[Result], title: str) -> None:
        super().__init__()
        self.sub_title = printable(title)
        self._rows = [
            _Row(
                row,
                row.to_plain() | {"status": row.marked_status},
                f"{row.op} {row.shapes} {row.module} {row.mode}".lower(),
            )
            for row in rows
        ]
        by_name = {about.name: about for about in all_columns()}
        self._columns: list[Column] = [
            by_name[name] for name in SHOWN if any(row.cells.get(name) not in (None, "") for row in self._rows)
        ]
        self._sorted_by, self._falls = "", False
        self._keep: Callable[[_Row], bool] = lambda row: True
        self._shown = self._rows

    @property
    def shown(self) -> list[Result]:
        """The rows that the table shows, or would further down, in its order."""
        return [row.result for row in self._shown]

    def compose(self) -> ComposeResult:
        """The table, and below it what is typed to filter by."""
        yield Header()
        yield DataTable(cursor_type="cell", zebra_stripes=True, fixed_columns=1)
        yield Input(placeholder="text in operator, shapes, module or mode")
        yield Footer()

    def on_mount(self) -> None:
        """Fill the table."""
        table = self.query_one(DataTable)
        for about in self._columns:
            table.add_column(_title(about), key=about.name)
        self._fill()
        table.focus()

    def action_sort(self) -> None:
        """Sort by the column that the cursor is in; again for the other way round."""
        name = self._columns[self.query_one(DataTable).cursor_column].name
        is_number = any(isinstance(row.cells.get(name), int | float) for row in self._rows)
        self._falls = not self._falls if name == self._sorted_by else is_number
        self._sorted_by = name
        self._fill()

    def action_filter(self) -> None:
        """Ask for a text to filter by."""
        field = self.query_one(Input)
        field.add_class("shown")
        field.focus()

    def action_not_ok(self) -> None:
        """Show the rows that are not ok alone."""
        self._keep = lambda row: row.result.status != OK
        self._fill()

    def action_clear(self) -> None:
        """Show all rows."""
        field = self.query_one(Input)
        field.value = ""
        field.remove_class("shown")
        self._keep = lambda row: True
        self._fill()
        self.query_one(DataTable).focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter as one types."""
        text = event.value.lower()
        self._keep = lambda row: text in row.text
        self._fill()

    def on_input_submitted(self) -> None:
        """Go back to the table, which stays filtered."""
        self.query_one(DataTable).focus()

    def on_data_table_cell_selected(self, event: DataTable.CellSelected) -> None:
        """Show a row's details."""
        self.push_screen(Details(self._shown[event.coordinate.row].result))

    def on_data_table_cell_highlighted(self, event: DataTable.CellHighlighted) -> None:
        """Give the table more rows where the cursor comes near its end."""
        if event.coordinate.row >= self.query_one(DataTable).row_count - AHEAD:
            self._add_rows()

    def _fill(self) -> None:
        self._shown = [row for row in self._rows if self._keep(row)]
        if self._sorted_by:
            self._shown.sort(key=lambda row: _order(row.cells.get(self._sorted_by)), reverse=self._falls)
        table = self.query_one(DataTable)
        column = table.cursor_column
        table.clear()
        self._add_rows()
        if self._shown:
            table.move_cursor(row=0, column=column)
        self.title = f"{self.TITLE}: {summarize(self.shown) if self._shown else 'no rows'}"

    def _add_rows(self) -> None:
        table = self.query_one(DataTable)
        for row in self._shown[table.row_count : table.row_count + CHUNK]:
            table.add_row(*(_cell(about, row.cells.get(about.name)) for about in self._columns))


def _title(about: Column) -> str:
    return f"{about.name} ({about.unit})" if about.unit not in ("", "1") else about.name


def _cell(about: Column, value: Any) -> Text:
    if value is None:
        return Text("-", justify="right")
    if about.name == "status":
        return Text(printable(value), STYLES.get(value.partition(",")[0], ""))
    if isinstance(value, float):
        return Text(f"{value:.1%}" if about.unit == "1" else f"{value:,.4g}", justify="right")
    if isinstance(value, int):
        return Text(f"{value:,}", justify="right")
    return Text(shorten(str(value), WIDTH))


def _order(value: Any) -> tuple[int, float, str]:
    """What is missing comes first."""
    if value is None:
        return (0, 0.0, "")
    return (1, float(value), "") if isinstance(value, int | float) and not math.isnan(value) else (2, 0.0, str(value))
