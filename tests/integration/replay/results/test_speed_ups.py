"""Speed-ups, the same number everywhere, and times shared among all modules that made a signature's calls."""

import io
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from math import fsum
from pathlib import Path
from typing import Any

import pytest
import torch
from made_runs import HEADER, make_row, make_run
from pages import in_browser, opened
from settings import settings_of
from torch import nn

from opgrip import Capture, load
from opgrip.display.tables import literal
from opgrip.replay import Results, compare, replay
from opgrip.replay.analyses.speed_ups import print_modes, scalings, speed_up_of, summarize_modes
from opgrip.replay.cases.call_sites import CallSite, from_text, module_of, to_text
from opgrip.replay.cases.cases import make_cases
from opgrip.replay.cases.selection import Selection
from opgrip.replay.command.trace_replay import repeat
from opgrip.replay.reports.comparison.results_store import merge_runs
from opgrip.replay.reports.results_table import print_results, write_markdown
from opgrip.replay.results.ratios import shares_by, with_ratios
from opgrip.replay.results.results import CONTENDED, Result
from opgrip.replay.run.workload import expected_rows
from opgrip.tools.report import make_page
from opgrip.tools.report.page import describe_runs
from opgrip.traces import Trace


def case_of(number: int, eager: Sequence[float], jit: Sequence[float], **cells: Any) -> list[Result]:
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


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.fc(x)) + x


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


@pytest.fixture(scope="module", params=["encoder", "blocks"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the trace of a training step of four encoder layers, or of three identical blocks."""
    torch.manual_seed(0)
    model = encoder() if request.param == "encoder" else nn.Sequential(Block(), Block(), Block())
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.01), torch.randn(4, 6, 16)
    path = tmp_path_factory.mktemp("trained") / f"{request.param}.jsonl"
    model(x).sum().backward()
    with Capture(path, model=model):
        for _ in range(2):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
    return path


def results_of(trace: Trace) -> Results:
    rows = expected_rows(make_cases(trace, Selection()), settings_of())
    return Results([replace(row, median_us=row.captured_us, p10_us=0.0, p90_us=0.0) for row in rows], HEADER)


def page_shares(results: Results, place: int, cell: str) -> dict[str, float]:
    """Return the shares of time of groups in the data of a page; `place` is 0 for modules, 1 for phases."""
    page = describe_runs({"run": results})
    sites, rows = page["sites"], page["rows"]
    times: dict[str, float] = defaultdict(float)
    for row, number in enumerate(sites["of_row"]):
        for site in sites["lists"][number]:
            calls = 1 if cell == "total_us" else rows["count"][row]
            times[sites["names"][site[place]]] += site[3] * calls * rows[cell][row]
    return {name: time / fsum(times.values()) for name, time in times.items()}


def summed(trace: Trace, column: str) -> dict[str, float]:
    table = trace.summary(column)
    return dict(zip(table[column].fillna("").astype(str), table["share"], strict=True))


@pytest.mark.parametrize("column", ["module", "phase"])
def test_every_module_and_phase_has_its_share_of_the_trace(trained: Path, column: str) -> None:
    trace = load(trained)
    results, expected = results_of(trace), summed(trace, column)
    assert results.by_call_site.groupby(column)["share"].sum().to_dict() == pytest.approx(expected, abs=1e-9)
    assert page_shares(results, ["module", "phase"].index(column), "captured_us") == pytest.approx(expected, abs=1e-4)
    assert page_shares(results, ["module", "phase"].index(column), "total_us") == pytest.approx(expected, abs=1e-4)
    groups: dict[str, float] = defaultdict(float)
    for row in results:
        for name, share in shares_by(row, column).items():
            groups[name.replace("(outside)", "")] += share * row.share
    assert groups == pytest.approx(expected, abs=1e-9)


def test_files_keep_call_sites(trained: Path, tmp_path: Path) -> None:
    results = results_of(load(trained))
    for suffix in (".json", ".csv", ".parquet"):
        results.save(tmp_path / f"r{suffix}")
        assert [row.sites for row in Results.load(tmp_path / f"r{suffix}")] == [row.sites for row in results], suffix


def test_comparison_by_module_splits_the_calls_of_a_case() -> None:
    sites = to_text([CallSite("a", "forward", "", 6, 1.0), CallSite("b", "forward", "", 2, 1.0)])
    slower = make_run(2, cases=4, slower=2.0, longer_than_us=0.0, call_sites=sites)
    totals = compare(make_run(1, cases=4, call_sites=sites), slower).totals("module")
    assert [(total.name, total.cases) for total in totals] == [("a", 4), ("b", 4)]
    assert totals[0].base_us == pytest.approx(3 * totals[1].base_us)
    assert totals[0].new_us / totals[0].base_us == pytest.approx(totals[1].new_us / totals[1].base_us)


def test_modules_are_summarized_by_a_pattern() -> None:
    def named(*modules: str) -> str:
        return module_of([CallSite(module, "forward", "", 1, 0.0) for module in modules])

    assert named("a.b") == "a.b"
    assert named() == named("", "") == ""
    assert named("layers.0.fc", "layers.1.fc") == "layers.*.fc"
    assert named("layers.0", "layers.0.fc") == "layers.0.*"
    assert named("", "a") == named("a", "b") == "*"


@pytest.mark.parametrize("text", ["[1]", '{"forward":{"":{"a":[0,1]}}}', '{"forward":{"":{"a":[1,NaN]}}}', "{"])
def test_invalid_call_sites_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="call_sites"):
        from_text(text)


@in_browser
def test_first_table_of_a_report_equals_the_trace_summary(trained: Path, tmp_path: Path) -> None:
    trace = load(trained)
    path = tmp_path / "page.html"
    path.write_text(make_page({"run": results_of(trace)}, {"net": trace}, "made"), encoding="utf-8")
    with opened(path, "/overview?by=module") as page:
        rows = page.locator("table:has(caption:has-text('Time by module')) tbody tr").all()
        shown = {cells[0]: cells[4] for cells in (row.locator("td").all_inner_texts() for row in rows)}
        expected = {name or "(outside)": f"{100 * share:.1f}%" for name, share in summed(trace, "module").items()}
        assert shown == {name: expected[name] for name in shown}
        assert len(shown) == min(len(expected), 50)
        page.wait_for_selector("g.slice path.surface")
