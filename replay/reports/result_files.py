"""Result files: CSV, JSON, JUnit XML, Parquet, Excel, and a roofline as SVG."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import IO, Any
from xml.etree import ElementTree

import pandas as pd

from opgrip.cli.command import printable
from opgrip.cli.output_files import quoted, read_input, unquoted, write_parquet_table
from opgrip.cli.plugins import needed
from opgrip.display.figures import write_figure
from opgrip.errors import FormatError, UserError
from opgrip.platform.peaks import from_json
from opgrip.replay.analyses.roofline.drawing import draw
from opgrip.replay.reports import report
from opgrip.replay.reports.cells import all_columns, check_columns, other_columns, parse_json, to_frame, whole_cells
from opgrip.replay.results.columns import Column, columns_in
from opgrip.replay.results.results import CONTENDED, OK, SKIPPED, UNSUPPORTED, Result
from opgrip.traces.io.parquet_file import TooLargeError, read_parquet_table
from opgrip.traces.schema.json_values import count_items

# maximum number of bytes of a file; enough for half a million rows with run times as Parquet
LARGEST_BYTES = 1 << 30
# of a text, whose values need more memory; a value is at least a comma, bracket or line
LARGEST_TEXT, MOST_VALUES = 1 << 28, 1 << 24
LONGEST_LINE = 1 << 16  # maximum number of bytes of the first line of .csv, which names the columns
IN_PARTS = "replay in parts, by --start and --stop, or write .parquet, which is smaller"


def _read_text(path: Path) -> bytes:
    content = read_input(path, LARGEST_TEXT, IN_PARTS)
    if count_items(content) + content.count(b"\n") > MOST_VALUES:
        raise UserError(f"{path} contains more than {MOST_VALUES:,} values", IN_PARTS)
    return content


def read_csv(path: Path) -> pd.DataFrame:
    content, columns = _read_text(path), all_columns()
    if len(content.partition(b"\n")[0]) > LONGEST_LINE:
        raise other_columns(path)
    # keep the text `None`, a common argument, and read keys as text even if they look like numbers
    texts = {about.name: str for about in columns if about.kind in (str, list)}
    rows = pd.read_csv(io.BytesIO(content), dtype=texts, keep_default_na=False, na_values=[""])
    for about in columns:
        if about.name in rows and about.name in texts:
            read = parse_json if about.several else unquoted
            rows[about.name] = rows[about.name].map(read, na_action="ignore").astype(object)
    return rows


@report(".csv", read=read_csv)
def write_csv(results: Sequence[Result], header: Mapping[str, Any], file: IO[str]) -> None:
    frame = to_frame(results)
    for name, column in frame.items():
        if not pd.api.types.is_numeric_dtype(column):
            frame[name] = [quoted(printable(cell)) if isinstance(cell, str) else cell for cell in column]
    frame.to_csv(file, index=False)


_INFINITE = "1e999"  # text that represents infinity in JSON: parsers read a number that is too large as inf
_UNBOUNDED = "|".join(about.name for about in columns_in(Result) if about.unbounded)
_AS_NUMBER = re.compile(rf'^( +"(?:{_UNBOUNDED})": )"{_INFINITE}"(,?)$', re.MULTILINE)


def read_json(path: Path) -> pd.DataFrame:
    header = parse_json(_read_text(path))
    plain = header.pop("results")
    # check the names before a data frame gets a column for each of, say, a million names
    check_columns(dict.fromkeys(name for row in plain for name in row.keys()), path)  # noqa: SIM118 - fails for a list
    rows = pd.DataFrame(plain)
    rows.attrs = header
    return rows


@report(".json", read=read_json)
def write_json(results: Sequence[Result], header: Mapping[str, Any], file: IO[str]) -> None:
    rows = [{name: _INFINITE if cell == inf else cell for name, cell in row.items()} for row in whole_cells(results)]
    text = json.dumps({**header, "results": rows}, indent=1, allow_nan=False, ensure_ascii=False)
    file.write(_AS_NUMBER.sub(rf"\g<1>{_INFINITE}\g<2>", text) + "\n")


HEADER = b"opgrip"  # metadata key under which the header is stored as JSON
MOST_CELLS = 100_000_000  # maximum number of cells in a file, including run times: half a million rows with all columns


def read_parquet(path: Path) -> pd.DataFrame:
    columns = {about.name: about for about in all_columns()}
    try:
        if path.stat().st_size > LARGEST_BYTES:
            raise TooLargeError(f"it has more than {LARGEST_BYTES >> 20:,} MB")
        table = read_parquet_table(path, MOST_CELLS, LARGEST_BYTES)
        names = table.schema.names
        check_columns(names, path)
        if table.num_rows * len(names) > MOST_CELLS:
            raise TooLargeError(f"it has more than {MOST_CELLS:,} cells")
        table = table.unify_dictionaries()
    except TooLargeError as error:
        raise UserError(f"{path} is too large ({error})", IN_PARTS) from error
    except FormatError as error:
        raise UserError(
            f"{path} does not contain results of opreplay ({error})", "write some with opreplay -o results.json"
        ) from error
    rows: pd.DataFrame = table.to_pandas(ignore_metadata=True)
    for name in names:
        if columns[name].several:
            rows[name] = rows[name].map(lambda cell: cell.tolist(), na_action="ignore").astype(object)
    header = parse_json((table.schema.metadata or {}).get(HEADER, b"{}"))
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    rows.attrs = header
    return rows


@report(".parquet", read=read_parquet, binary=True)
def write_parquet(results: Sequence[Result], header: Mapping[str, Any], file: IO[bytes]) -> None:
    write_parquet_table(to_frame(results), file, {HEADER: json.dumps(header).encode()})


@report(".svg", needs="roofline", binary=True, package=("matplotlib", "plot"))
def write_svg(results: Sequence[Result], header: Mapping[str, Any], file: IO[bytes]) -> None:
    if "ceilings" not in header:
        raise UserError("the rows were not compared with the machine's limits", "replay with --roofline")
    ceilings, threads = from_json(header["ceilings"]), header.get("threads", 1)
    write_figure(lambda: draw(results, ceilings, threads, str(header.get("trace", ""))), "svg", file)


ROWS = 1_048_575  # maximum number of rows of a worksheet, without the row of column names
CHARTED = 20  # number of rows in a chart
FORMATS = {"1": "0.0%", "us": "#,##0.00", "ms": "#,##0.00", "bytes": "#,##0"}  # number format by unit of the column
WIDE = {"op": 34, "shapes": 60, "error": 60, "module": 34}  # widths of text columns, in characters
_FORBIDDEN = re.compile(r"[\[\]:*?/\\']")


@report(".xlsx", binary=True, package=("xlsxwriter", "excel"))
def write_excel(results: Sequence[Result], header: Mapping[str, Any], file: IO[bytes]) -> None:
    workbook = needed("xlsxwriter", "excel").Workbook(
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
        cells = [row.to_plain() | {"status": row.marked_status} for row in rows[:ROWS]]
        columns = [
            about
            for about in all_columns()
            if not about.hidden and any(row.get(about.name) is not None for row in cells)
        ]
        for index, about in enumerate(columns):
            unit = f" ({about.unit})" if about.unit not in ("", "1") else ""
            self._sheet.write_string(0, index, f"{about.name}{unit}", self._bold)
            self._sheet.write_comment(0, index, about.meaning)
            self._sheet.set_column(index, index, WIDE.get(about.name, 12), self._format(about))
            for number, row in enumerate(cells, 1):
                self._write_cell(number, index, row.get(about.name))
        self._sheet.freeze_panes(1, 2)
        self._sheet.autofilter(0, 0, max(len(cells), 1), max(len(columns) - 1, 0))
        by_name = {about.name: index for index, about in enumerate(columns)}
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


def _sheet_name(name: str, used_names: set[str]) -> str:
    text = _FORBIDDEN.sub("-", printable(name))[:28] or "sheet"
    number = 1
    while (unique := text if number == 1 else f"{text}-{number}").lower() in used_names:
        number += 1
    used_names.add(unique.lower())
    return unique


@dataclass(frozen=True, slots=True)
class Test:
    group: str
    name: str
    seconds: float = 0.0
    outcome: str = ""  # `failure`, `error`, `skipped`, or empty if the test passed
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Suite:
    name: str
    tests: Sequence[Test]
    properties: Mapping[str, Any]


def write_suites(suites: Iterable[Suite], file: IO[str]) -> None:
    root = ElementTree.Element("testsuites")
    for suite in suites:
        _add_suite(root, suite)
    ElementTree.indent(root)
    file.write('<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n")


def _add_suite(root: ElementTree.Element, suite: Suite) -> None:
    counts = {
        "tests": len(suite.tests),
        "failures": sum(test.outcome == "failure" for test in suite.tests),
        "errors": sum(test.outcome == "error" for test in suite.tests),
        "skipped": sum(test.outcome == "skipped" for test in suite.tests),
    }
    attributes = {"name": printable(suite.name), **{name: str(count) for name, count in counts.items()}}
    holder = ElementTree.SubElement(root, "testsuite", attributes)
    listed = ElementTree.SubElement(holder, "properties")
    for name, value in suite.properties.items():
        ElementTree.SubElement(listed, "property", {"name": printable(name), "value": printable(value)})
    for test in suite.tests:
        about = {"classname": printable(test.group), "name": printable(test.name), "time": f"{test.seconds:.9f}"}
        element = ElementTree.SubElement(holder, "testcase", about)
        if test.outcome:
            ElementTree.SubElement(element, test.outcome, {"message": printable(test.reason)})


@report(".xml")
def write_junit(results: Sequence[Result], header: Mapping[str, Any], file: IO[str]) -> None:
    plain = {name: value for name, value in header.items() if isinstance(value, str | int | float)}
    write_suites([Suite(f"opreplay {header.get('trace', '')}".strip(), list(map(_test, results)), plain)], file)


def _test(row: Result) -> Test:
    outcome = "" if row.status == OK else "skipped" if row.status in (UNSUPPORTED, SKIPPED, CONTENDED) else "failure"
    seconds = (row.median_us or 0.0) / 1e6
    name = " ".join(filter(None, (row.op, row.shapes, f"({row.variant})" if row.variant else "")))
    return Test(row.mode, name, seconds, outcome, f"{row.status}: {row.error or ''}")
