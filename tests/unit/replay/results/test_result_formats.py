"""File formats of results."""

from __future__ import annotations

import json
import math
import zipfile
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from made_runs import HEADER, make_row, make_run

from opgrip.errors import UserError
from opgrip.replay import Results
from opgrip.replay.outcome import write_results
from opgrip.replay.results.ratios import join_repeats

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
