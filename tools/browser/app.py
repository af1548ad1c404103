"""The table of a run in a terminal: sorted by any column, filtered as one types, a row's details on request."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Header, Input, Static

from opgrip.replay.measuring.columns import Column
from opgrip.replay.measuring.results import OK, Result, summarize
from opgrip.replay.reports.cells import all_columns
from opgrip.traces.command import printable
from opgrip.traces.folding import shorten

SHOWN = (
    *("op", "mode", "status", "median_us", "captured_us", "ratio", "share", "count", "p10_us", "p90_us"),
    *("gflop_per_s", "gb_per_s", "of_limit", "module", "shapes", "error"),
)
"""Columns of the table, as far as these rows have something in them; a row's details have all."""
WIDTH = 60
"""Characters of a cell."""
STYLES = {OK: "green", "wrong": "bold red", "failed": "red", "timeout": "red", "unsupported": "yellow"}


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
            if not about.several and cells.get(about.name) not in (None, "")
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
        self._rows = list(rows)
        cells = [row.to_plain() for row in rows]
        by_name = {about.name: about for about in all_columns()}
        self._columns: list[Column] = [
            by_name[name] for name in SHOWN if any(cell.get(name) not in (None, "") for cell in cells)
        ]
        self._sorted_by, self._falls = "", False
        self._keep: Callable[[Result], bool] = lambda row: True

    @property
    def shown(self) -> list[Result]:
        """The rows that the table shows, in its order."""
        rows = [row for row in self._rows if self._keep(row)]
        if self._sorted_by:
            rows.sort(key=lambda row: _order(row.to_plain().get(self._sorted_by)), reverse=self._falls)
        return rows

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
        is_number = any(isinstance(row.to_plain().get(name), int | float) for row in self._rows)
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
        self._keep = lambda row: row.status != OK
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
        self._keep = lambda row: text in f"{row.op} {row.shapes} {row.module} {row.mode}".lower()
        self._fill()

    def on_input_submitted(self) -> None:
        """Go back to the table, which stays filtered."""
        self.query_one(DataTable).focus()

    def on_data_table_cell_selected(self, event: DataTable.CellSelected) -> None:
        """Show a row's details."""
        self.push_screen(Details(self.shown[event.coordinate.row]))

    def _fill(self) -> None:
        table, rows = self.query_one(DataTable), self.shown
        column = table.cursor_column
        table.clear()
        for row in rows:
            cells = row.to_plain()
            table.add_row(*(_cell(about, cells.get(about.name)) for about in self._columns))
        if rows:
            table.move_cursor(row=0, column=column)
        self.title = f"{self.TITLE}: {summarize(rows) if rows else 'no rows'}"


def _title(about: Column) -> str:
    return f"{about.name} ({about.unit})" if about.unit not in ("", "1") else about.name


def _cell(about: Column, value: Any) -> Text:
    if value is None:
        return Text("-", justify="right")
    if about.name == "status":
        return Text(value, STYLES.get(value, ""))
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
