"""Tests that a speed-up is the same number everywhere: the quotient of the medians shown with it."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_runs import HEADER, make_row

from opgrip.display.tables import literal
from opgrip.replay import Results, replay
from opgrip.replay.analyses.speed_ups import print_modes, scalings, speed_up_of, summarize_modes
from opgrip.replay.command.trace_replay import repeat
from opgrip.replay.comparison.results_store import merge_runs
from opgrip.replay.reports.results_table import print_results, write_markdown
from opgrip.replay.results.ratios import with_ratios
from opgrip.replay.results.results import CONTENDED, Result
from opgrip.tools.report.page import describe_runs


def case_of(number: int, eager: Sequence[float], jit: Sequence[float], **cells: Any) -> list[Result]:
    """Return a case's rows under two modes, with percentiles of paired runs."""
    paired = dict(zip(("ratio_p10", "ratio_p50", "ratio_p90"), (1.9, 2.0, 2.1), strict=True))
    rows = [make_row(number, eager), make_row(number, jit, mode="jit", **(paired | cells))]
    return with_ratios(rows, "eager")


def text_of(rows: Sequence[Result]) -> str:
    file = io.StringIO()
    print_results(rows, file)
    return file.getvalue()


def test_speed_up_is_the_quotient_of_medians_in_every_report(tmp_path: Path) -> None:
    rows = [*case_of(0, [10.0] * 3, [20.0] * 3), *case_of(1, [10.0] * 3, [40.0] * 3, ratio_p50=2.0)]
    results = Results(rows, HEADER)
    assert [row.speed_up for row in rows] == [None, 0.5, None, 0.25]
    assert results.frame["speed_up"].tolist()[1::2] == [0.5, 0.25]
    # paired runs of the second case contradict it
    assert [row.is_speed_up_doubtful for row in rows] == [False, False, False, True]
    table = text_of(rows)
    assert " 0.50 " in table
    assert "~0.25" in table
    assert "divided by replayed us of the row itself; ~" in table
    markdown = io.StringIO()
    write_markdown(rows, HEADER, markdown)
    assert literal("~0.25") in markdown.getvalue()
    (summary,) = summarize_modes(rows, "eager")
    assert summary.speed_up is not None
    mean = summary.speed_up.mean
    assert mean == pytest.approx(0.125**0.5)
    lines = io.StringIO()
    print_modes(rows, "eager", lines)
    assert f"{mean:.2f}" in lines.getvalue()
    page = describe_runs({"run": results})
    assert page["rows"]["speed_up"][1::2] == [0.5, 0.25]
    assert page["rows"]["is_speed_up_doubtful"] == [None, None, None, True]
    (mode,) = page["modes"]
    assert mode["speed_up"]["mean"] == pytest.approx(mean, rel=1e-5)
    assert (mode["speed_up"]["faster"], mode["speed_up"]["slower"]) == (
        summary.speed_up.faster,
        summary.speed_up.slower,
    )
    results.save(tmp_path / "r.csv")
    assert [row.speed_up for row in Results.load(tmp_path / "r.csv")] == [None, 0.5, None, 0.25]


def test_faster_and_slower_require_the_median_and_nine_of_ten_pairs() -> None:
    rows = [
        *case_of(0, [20.0], [10.0], ratio_p10=0.4, ratio_p50=0.5, ratio_p90=0.6),
        *case_of(1, [20.0], [10.0], ratio_p10=0.4, ratio_p50=0.5, ratio_p90=1.6),
        *case_of(2, [20.0], [10.0], ratio_p10=1.4, ratio_p50=1.5, ratio_p90=1.6),
        *case_of(3, [10.0], [20.0]),
    ]
    found = speed_up_of(rows)
    assert found is not None
    assert (found.cases, found.faster, found.slower) == (4, 1, 1)


def test_repeats_and_merged_files_use_their_own_medians() -> None:
    first, second = case_of(0, [10.0] * 3, [20.0] * 3), case_of(0, [30.0] * 5, [30.0] * 5)
    (_, joined) = repeat({0: first}, lambda numbers, which: {0: second}, 2, None)[0]
    (base, merged) = merge_runs([Results(first, HEADER), Results(second, HEADER)]).rows
    assert base.median_us is not None
    assert merged.median_us is not None
    assert merged.ratio == joined.ratio == merged.median_us / base.median_us


def test_contended_row_has_no_speed_up() -> None:
    eager, jit = case_of(0, [10.0], [20.0])
    for rows in ([replace(eager, status=CONTENDED), jit], [eager, replace(jit, status=CONTENDED)]):
        assert with_ratios(rows, "eager")[1].speed_up is None


def test_each_row_is_compared_with_the_documented_reference(tiny_trace: Path) -> None:
    results = replay(
        tiny_trace,
        op=["aten.addmm*"],
        top=1,
        iterations=3,
        warmup=0,
        threads=[1, 2],
        cache=["warm", "cold"],
        mode="jit",
    )
    if any(row.status == "contended" for row in results):
        pytest.skip("other processes used the cores: contended rows have no speed-up")
    rows = {(row.mode, row.threads, row.cache): row for row in results if row.status == "ok"}
    expected = {
        ("eager", 1, "warm"): None,
        ("eager", 2, "warm"): ("eager", 1, "warm"),
        ("eager", 2, "cold"): ("eager", 1, "cold"),
        ("eager", 1, "cold"): ("eager", 1, "warm"),
        ("jit", 2, "cold"): ("eager", 2, "cold"),
    }
    for way, base in expected.items():
        ratio = None if base is None else rows[way].median_us / rows[base].median_us
        assert rows[way].ratio == ratio
        assert (rows[way].ratio_p50 is None) == (base is None)


@pytest.mark.parametrize(
    ("dimension", "cells", "gain"),
    [
        ("streams", {"streams": 2, "overlap": 1.5}, 1.5),
        ("batch", {"batch_scale": 4, "median_us": 50.0}, 0.8),
        ("threads", {"threads": 2, "median_us": 5.0}, 2.0),
    ],
)
def test_sweep_compares_equal_work(dimension: str, cells: dict[str, Any], gain: float) -> None:
    # rows that count several calls, of which some were run with one value only
    first = [replace(make_row(number, [10.0]), op="aten.mm.default", count=4, threads=1) for number in range(3)]
    (found,) = scalings([*first, *(replace(row, **cells) for row in first[:2])], dimension)
    assert found.gains == (1.0, pytest.approx(gain))


@pytest.mark.parametrize("column", ["slowed", "doubts"])
def test_status_marks_are_in_every_report(column: str, tmp_path: Path) -> None:
    word, cell = {"slowed": ("slowed", 0.9), "doubts": ("launch-bound", "launch-bound")}[column]
    row = make_row(0, [10.0], **{column: cell})
    results = Results([row, make_row(1, [10.0])], HEADER)
    assert (row.status, row.doubts, row.marked_status) == ("ok", word, f"ok, {word}")
    assert f"ok, {word}" in text_of(results.rows)
    assert f"ok, {word}" in results._repr_html_()
    assert describe_runs({"run": results})["rows"]["marked_status"] == [f"ok, {word}", "ok"]
    assert results.frame["doubts"].tolist() == [word, ""]
    results.save(tmp_path / "r.md")
    assert f"ok, {word}" in (tmp_path / "r.md").read_text(encoding="utf-8")
    results.save(tmp_path / "r.csv")
    assert word in (tmp_path / "r.csv").read_text(encoding="utf-8")
    assert [item.marked_status for item in Results.load(tmp_path / "r.csv")] == [f"ok, {word}", "ok"]
    # a row without a time is not marked
    assert replace(row, status="failed").marked_status == "failed"
