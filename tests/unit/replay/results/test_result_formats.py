"""Files of results: their formats, and untrusted ones, for which one line reports the error."""

import csv
import json
import math
import os
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_runs import HEADER, make_row, make_run
from pyarrow import parquet

from opgrip.cli.output_files import quoted, unquoted
from opgrip.errors import UserError
from opgrip.replay import Results
from opgrip.replay.reports import result_files
from opgrip.replay.reports.comparison.comparison import compare
from opgrip.replay.reports.comparison.comparison_report import FORMS
from opgrip.replay.reports.comparison.results_store import join_repeats
from opgrip.replay.reports.outcome import write_results
from opgrip.tools.report import make_page

EVIL = "=cmd|'/c calc'!A1 & <b> % $ # _ { } ~ ^ \\ \x07"


def written(path: Path, results: Results) -> Path:
    write_results(results.rows, results.header, path, force=False)
    return path


@pytest.mark.parametrize("suffix", [".json", ".parquet"])
def test_results_survive_writing_and_reading(suffix: str, tmp_path: Path) -> None:
    results = make_run(1, cases=5, note="a note")
    rows = [*results, replace(make_row(7, []), status="failed", error="it broke")]
    again = Results.load(written(tmp_path / f"r{suffix}", Results(rows, HEADER)))
    assert list(again.rows) == rows
    assert again.header == HEADER


@pytest.mark.parametrize("suffix", [".json", ".csv", ".parquet", ".xlsx"])
def test_infinite_difference_survives_writing_and_reading(suffix: str, tmp_path: Path) -> None:
    rows = [
        replace(make_row(0, []), status="wrong", error="it overflows", max_abs=math.inf, max_rel=math.inf),
        replace(make_row(1, [1.0]), max_abs=1e200, max_rel=1e-7, op='"max_abs": "1e999",'),
    ]
    path = written(tmp_path / f"r{suffix}", Results(rows, HEADER))
    if suffix == ".xlsx":
        with zipfile.ZipFile(path) as book:
            assert ">inf<" in book.read("xl/sharedStrings.xml").decode()
            assert "#DIV/0!" not in book.read("xl/worksheets/sheet1.xml").decode()
        return
    again = Results.load(path).frame
    assert again["max_abs"].tolist() == [math.inf, 1e200]
    assert again["max_rel"].tolist() == [math.inf, 1e-7]
    assert (again["max_abs"] > 1e-3).all()
    if suffix == ".json":
        # strict parsers accept it
        strict = json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
        assert strict["results"][0]["max_abs"] == math.inf
        assert strict["results"][1]["op"] == rows[1].op


def test_merged_repeats_keep_the_largest_difference() -> None:
    near, far = (make_row(0, [1.0], max_abs=error, max_rel=error) for error in (1e-7, 1e-6))
    wrong = [
        replace(near, status="wrong", error=f"by {error}", max_abs=error, max_rel=error) for error in (0.5, math.inf)
    ]
    assert join_repeats([near, far]).max_abs == 1e-6
    assert join_repeats([near, *wrong]) == wrong[1]


@pytest.mark.parametrize("suffix", [".json", ".parquet"])
def test_damaged_file_is_reported_in_one_line(suffix: str, tmp_path: Path) -> None:
    path = written(tmp_path / f"r{suffix}", make_run(1, cases=3))
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(UserError, match="does not contain results of opreplay"):
        Results.load(path)


def test_workbook_has_a_sheet_per_mode_with_filters_and_a_chart(tmp_path: Path) -> None:
    rows = [replace(make_row(number, [1.0, 2.0]), mode=mode, op=EVIL) for mode in ("eager", "jit") for number in (0, 1)]
    with zipfile.ZipFile(written(tmp_path / "r.xlsx", Results(rows, HEADER))) as book:
        sheets = ElementTree.fromstring(book.read("xl/workbook.xml")).findall(".//{*}sheet")
        assert [sheet.get("name") for sheet in sheets] == ["eager", "jit", "environment"]
        first = book.read("xl/worksheets/sheet1.xml").decode()
        assert "<autoFilter" in first
        # a text that begins like a formula stays text
        assert "<f>" not in first
        assert sum(name.startswith("xl/charts/chart") for name in book.namelist()) == 2


def test_junit_file_has_a_test_per_row(tmp_path: Path) -> None:
    statuses = ("ok", "wrong", "unsupported", "timeout")
    rows = [replace(make_row(place, [1.0]), status=status, op=EVIL) for place, status in enumerate(statuses)]
    suite = ElementTree.parse(written(tmp_path / "r.xml", Results(rows, HEADER))).getroot()[0]
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("4", "2", "1")
    outcomes = [[child.tag for child in test] for test in suite.iter("testcase")]
    assert outcomes == [[], ["failure"], ["skipped"], ["failure"]]


STRANGE: list[Any] = [None, True, -1, 10**400, float("nan"), "", "\ud800", [None], [[]], {}]
FORMULAS = ["=1+1", "+cmd|'/c calc'!A1", "-2+3", "@SUM(A1)", "\t=1", "'=1", "''", "-1", "None"]


def stored(path: Path, run: Results) -> dict[str, Any]:
    write_results(run.rows, run.header, path, force=True)
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def refused(path: Path, document: Any) -> str:
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    with pytest.raises(UserError) as told:
        Results.load(path)
    return str(told.value)


@pytest.mark.parametrize(
    ("column", "cell", "problem"),
    [
        ("median_us", "fast", "median_us: 'fast' is not a number"),
        ("median_us", 1e200, "is too large"),
        ("count", 1.5, "count: 1.5 is not a 64-bit integer"),
        ("op", 7, "op: 7 is not a string"),
        ("op", None, "op: a row has no op"),
        ("status", "\x1b[2J", "is not one of ok, wrong"),
        ("noisy", "yes", "is neither true nor false"),
        ("times_us", [1.0, None], "is not a list of numbers"),
        ("times_us", [float("nan")], "is too large, or not a number"),
        ("unheard", 1, "has columns that this version"),
    ],
)
def test_cell_that_its_column_cannot_hold_is_reported(column: str, cell: Any, problem: str, tmp_path: Path) -> None:
    document = stored(tmp_path / "r.json", make_run(1, cases=2))
    document["results"][1][column] = cell
    assert problem in refused(tmp_path / "r.json", document)


@pytest.mark.parametrize(
    "document",
    [
        "[]",
        '"results"',
        '{"results": ["a"]}',
        "[" * 200_000,
        '{"results": [], "environment": ' + "[" * 500 + "]" * 500 + "}",
        '{"results": [], "environment": "here"}',
        '{"results": [], "accelerator": {"devices": [1]}}',
        '{"results": [], "seed": 1e999}',
    ],
)
def test_malformed_document_is_reported_in_one_line(document: str, tmp_path: Path) -> None:
    assert "\n" not in refused(tmp_path / "r.json", document)


@pytest.mark.slow
@given(
    column=st.sampled_from(
        ("op", "key", "shapes", "count", "median_us", "times_us", "repeats", "weights", "status", "case")
    ),
    name=st.sampled_from(("trace", "environment", "accelerator", "ceilings", "threads", "device", "time", "tests")),
    cell=st.sampled_from(STRANGE),
    fact=st.sampled_from(STRANGE),
)
def test_any_results_that_are_read_can_be_compared_and_shown(
    column: str, name: str, cell: Any, fact: Any, tmp_path: Path
) -> None:
    run = make_run(1, cases=3, repeats=2)
    document = stored(tmp_path / "r.json", run)
    document["results"][0][column] = cell
    document[name] = fact
    (tmp_path / "r.json").write_text(json.dumps(document))
    try:
        strange = Results.load(tmp_path / "r.json")
    except UserError:
        return
    for one, other in ((strange, run), (run, strange)):
        comparison = compare(one, other)
        for write in FORMS.values():
            write([comparison], []).encode(errors="backslashreplace")
    make_page({"strange": strange}, {}, "title")


@pytest.mark.slow
def test_parquet_file_with_other_types_is_reported_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "folder=1" / "r.parquet"
    path.parent.mkdir()
    run = make_run(1, cases=2)
    write_results(run.rows, run.header, path, force=False)
    # the name of a folder is not a column
    assert list(Results.load(path).rows) == list(run.rows)
    table = parquet.ParquetFile(path).read()
    for name, cells in {"op": [1, 2], "times_us": [1.0, 2.0], "count": ["a", "b"], "status": [b"ok", b"ok"]}.items():
        place = table.schema.names.index(name)
        parquet.write_table(table.set_column(place, name, pyarrow.array(cells)), path)
        with pytest.raises(UserError, match="does not contain results"):
            Results.load(path)
    for header in (b"[" * 100_000, b"[]", b"\xff"):
        parquet.write_table(table.replace_schema_metadata({b"opgrip": header}), path)
        with pytest.raises(UserError, match="does not contain results"):
            Results.load(path)


@pytest.mark.parametrize("suffix", [".json", ".csv", ".parquet"])
def test_results_that_may_never_end_are_refused(suffix: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / f"pipe{suffix}")
    (tmp_path / f"zeros{suffix}").symlink_to("/dev/zero")
    (tmp_path / f"folder{suffix}").mkdir()
    for name, problem in (("pipe", "is a pipe"), ("zeros", "is not a regular file"), ("folder", "is a folder")):
        with pytest.raises(UserError, match=f"{name}{suffix} {problem}: name a file"):
            Results.load(tmp_path / f"{name}{suffix}")


def test_results_that_would_fill_the_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many = '{"results": [], "x": [' + "[]," * (result_files.MOST_VALUES // 2) + "[]]}"
    assert "contains more than 16,777,216 values: replay in parts" in refused(tmp_path / "r.json", many)
    assert "has columns that this version" in refused(tmp_path / "r.csv", "," * 100_000)
    monkeypatch.setattr(result_files, "LARGEST_TEXT", 1 << 20)
    assert "is larger than 1 MB: replay in parts" in refused(tmp_path / "r.json", " " * (1 << 21))


def test_small_file_with_millions_of_rows_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opgrip.replay.reports.result_files.MOST_CELLS", 100_000)
    cells = pyarrow.array([1] * 60_000, pyarrow.int64())
    parquet.write_table(pyarrow.table({"case": cells, "count": cells}), tmp_path / "r.parquet", compression="zstd")
    assert (tmp_path / "r.parquet").stat().st_size < 10_000
    with pytest.raises(UserError, match="has more than 100,000 cells"):
        Results.load(tmp_path / "r.parquet")


@pytest.mark.parametrize("text", FORMULAS)
def test_csv_cells_never_start_a_formula(text: str, tmp_path: Path) -> None:
    assert unquoted(quoted(text)) == text
    row = replace(make_row(0, [1.0, 2.0]), op=text, shapes=text, module=text, key="123e45")
    write_results([row], HEADER, tmp_path / "r.csv", force=False)
    with (tmp_path / "r.csv").open(newline="") as file:
        (cells,) = csv.DictReader(file)
    assert cells["op"][0] not in "=+@\t" or text == "+1"
    assert cells["op"][0] != "-" or text == "-1"
    (again,) = Results.load(tmp_path / "r.csv").rows
    assert (again.op, again.shapes, again.key, again.note) == (text.replace("\t", "\\t"), again.op, "123e45", "")


def test_names_are_escaped_in_markdown(tmp_path: Path) -> None:
    evil = "[x](javascript:alert(1)) <img src=x onerror=alert(1)> |`_a_ `*b*"
    rows = [replace(make_row(0, [1.0]), op=evil, captured_total_us=0.0, count=1)]
    write_results(rows, {**HEADER, "trace": "a\n# b <i>"}, tmp_path / "r.md", force=False)
    text = (tmp_path / "r.md").read_text()
    assert "a\\\\n# b \\<i\\>" in text.splitlines()[0]
    assert "\\[x\\](javascript:alert(1)) \\<img src=x onerror=alert(1)\\> \\|\\`\\_a\\_ \\`\\*b\\*" in text
