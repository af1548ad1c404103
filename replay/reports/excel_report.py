"""Results as an Excel workbook: a sheet a mode, with filters and a chart, and one that says where they come from."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import inf
from typing import IO, Any

from opgrip.cli.command import printable
from opgrip.cli.plugins import needed
from opgrip.replay.reports.cells import all_columns
from opgrip.replay.reports.report import report
from opgrip.replay.results.columns import Column
from opgrip.replay.results.results import OK, Result

ROWS = 1_048_575
"""Of a sheet, beside that of names."""
CHARTED = 20
"""Rows that a chart shows."""
FORMATS = {"1": "0.0%", "us": "#,##0.00", "ms": "#,##0.00", "bytes": "#,##0"}
"""By the unit of a column."""
WIDE = {"op": 34, "shapes": 60, "error": 60, "module": 34}
"""Widths of columns of text, in characters."""
_FORBIDDEN = re.compile(r"[\[\]:*?/\\']")


@report(".xlsx", binary=True, package=("xlsxwriter", "results"))
def write_excel(results: Sequence[Result], header: Mapping[str, Any], file: IO[bytes]) -> None:
    """A sheet for each mode with its rows in all columns that have something, and a chart of the longest calls."""
    workbook = needed("xlsxwriter", "results").Workbook(
        file, {"strings_to_formulas": False, "strings_to_urls": False, "nan_inf_to_errors": True, "in_memory": True}
    )
    modes = dict.fromkeys(row.mode for row in results)
    names: set[str] = set()
    for mode in modes:
        _Sheet(workbook, _sheet_name(mode, names)).write([row for row in results if row.mode == mode])
    _write_origin(workbook, _sheet_name("environment", names), header)
    workbook.close()


class _Sheet:
    def __init__(self, workbook: Any, name: str) -> None:
        self._workbook, self._sheet, self._name = workbook, workbook.add_worksheet(name), name
        self._bold = workbook.add_format({"bold": True, "bottom": 1})
        self._formats: dict[str, Any] = {}

    def write(self, rows: Sequence[Result]) -> None:
        """The rows, those of all that fit."""
        cells = [row.to_plain() | {"status": row.marked_status} for row in rows[:ROWS]]
        columns = [
            about
            for about in all_columns()
            if not about.hidden and any(row.get(about.name) is not None for row in cells)
        ]
        for place, about in enumerate(columns):
            unit = f" ({about.unit})" if about.unit not in ("", "1") else ""
            self._sheet.write_string(0, place, f"{about.name}{unit}", self._bold)
            self._sheet.write_comment(0, place, about.meaning)
            self._sheet.set_column(place, place, WIDE.get(about.name, 12), self._format(about))
            for number, row in enumerate(cells, 1):
                self._write_cell(number, place, row.get(about.name))
        self._sheet.freeze_panes(1, 2)
        self._sheet.autofilter(0, 0, max(len(cells), 1), max(len(columns) - 1, 0))
        by_name = {about.name: place for place, about in enumerate(columns)}
        if "status" in by_name:
            self._mark(by_name["status"], len(cells))
        if {"median_us", "captured_us", "op"} <= by_name.keys():
            self._chart(by_name, min(len(cells), CHARTED))

    def _write_cell(self, row: int, column: int, cell: Any) -> None:
        if isinstance(cell, bool | int | float) and cell != inf:
            self._sheet.write(row, column, cell)
        elif cell is not None:
            self._sheet.write_string(row, column, printable(cell)[:32_767])

    def _mark(self, column: int, count: int) -> None:
        rule = {
            "type": "cell",
            "criteria": "!=",
            "value": f'"{OK}"',
            "format": self._workbook.add_format({"bold": True}),
        }
        self._sheet.conditional_format(1, column, max(count, 1), column, rule)

    def _chart(self, columns: Mapping[str, int], count: int) -> None:
        chart = self._workbook.add_chart({"type": "bar"})
        for name in ("captured_us", "median_us"):
            chart.add_series({
                "name": [self._name, 0, columns[name]],
                "categories": [self._name, 1, columns["op"], count, columns["op"]],
                "values": [self._name, 1, columns[name], count, columns[name]],
            })  # fmt: skip
        chart.set_title({"name": f"the first {count} cases, us a call"})
        chart.set_y_axis({"reverse": True})
        chart.set_size({"width": 900, "height": 120 + 26 * count})
        self._sheet.insert_chart(1, len(columns) + 1, chart)

    def _format(self, about: Column) -> Any:
        text = FORMATS.get(about.unit, "")
        if text not in self._formats:
            self._formats[text] = self._workbook.add_format({"num_format": text}) if text else None
        return self._formats[text]


def _write_origin(workbook: Any, name: str, header: Mapping[str, Any]) -> None:
    sheet = workbook.add_worksheet(name)
    sheet.set_column(0, 0, 34)
    sheet.set_column(1, 1, 90)
    for number, (title, value) in enumerate(_flat(header)):
        sheet.write_string(number, 0, printable(title)[:32_767])
        sheet.write_string(number, 1, printable(value)[:32_767])


def _flat(facts: Mapping[str, Any], before: str = "") -> list[tuple[str, str]]:
    lines: list[tuple[str, str]] = []
    for name, value in facts.items():
        title = f"{before}{name}"
        lines += _flat(value, f"{title}.") if isinstance(value, dict) else [(title, str(value))]
    return lines


def _sheet_name(name: str, taken: set[str]) -> str:
    """A name that Excel takes and that no other sheet has."""
    text = _FORBIDDEN.sub("-", printable(name))[:28] or "sheet"
    number = 1
    while (unique := text if number == 1 else f"{text}-{number}").lower() in taken:
        number += 1
    taken.add(unique.lower())
    return unique
