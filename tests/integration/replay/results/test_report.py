"""Tests of the HTML report of results and traces, in a real browser."""

import json
from dataclasses import replace
from math import fsum
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from made_runs import HEADER, make_row, make_run
from optional import needs
from pages import in_browser, opened, table_cells
from programs import refusal, succeed

from opgrip.capture.command.opcapture import own_cost
from opgrip.replay.reports.comparison.comparison import compare
from opgrip.replay.reports.comparison.results_store import Store
from opgrip.replay.reports.outcome import Results
from opgrip.replay.results.judgement import CandidateColumns
from opgrip.tools.report import make_page
from opgrip.tools.report.page import describe_comparisons, describe_launches, describe_runs, describe_trace
from opgrip.traces import load
from opgrip.traces.analysis.longtail import bandwidth_of, find_longtail
from opgrip.traces.schema.records import Kernels

VIEWS = ("overview", "cases", "modes", "runs", "shapes", "roofline", "launches", "longtail", "timeline", "failures")
VIEWS += ("environment",)
EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)><a href='https://x.y'>z</a>{{7*7}}\u2028"


@pytest.fixture(scope="module")
def report(detector_trace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    words = ("--top", "40", "--iterations", "3", "--cache", "warm")
    for name, more in {"one": ("--mode", "eager,jit"), "two": ()}.items():
        succeed("opreplay", detector_trace, *words, *more, "-o", folder / f"{name}.json")
    succeed("opgrip", "report", "one.json", "two.json", detector_trace, "-o", "r.html", cwd=folder)
    return folder / "r.html"


def page_of(path: Path, runs: dict[str, Results]) -> Path:
    path.write_text(make_page(runs, {}, "made"), encoding="utf-8")
    return path


def rows_of(count: int) -> Results:
    rows = make_run(1, cases=100, repeats=1, runs=3).rows
    many = [
        replace(rows[place % 100], case=place, key=f"{place:012x}", op=f"aten.op{place}.default")
        for place in range(count)
    ]
    return Results(many, HEADER)


@in_browser
def test_every_view_loads_without_console_messages(report: Path) -> None:
    with opened(report) as page:
        shown = [link.get_attribute("href")[2:] for link in page.locator("nav a").all()]
        assert set(VIEWS) - set(shown) <= {"failures"}
        for view in shown:
            page.click(f"nav a[href='#/{view}']")
            page.wait_for_selector(f"nav a[href='#/{view}'][aria-current='page']")
            page.wait_for_timeout(300)
            assert page.locator("main h1").inner_text()
        page.goto(f"{report.as_uri()}#/overview")
        page.wait_for_selector("g.slice path.surface")
        assert page.locator("g.slice").count() > 10


def judged_run() -> Results:
    """Return rows of an operator and of a candidate in two traces, in one of which the candidate is wrong."""
    rows = []
    for name, verdict in (("a", "faster"), ("b", "wrong")):
        made = make_row(1, [2.0, 2.0], trace=name)
        judged = CandidateColumns(verdict, 0.4, 0.6, 0.2, 0.1, 0.01, labels=json.dumps({EVIL: [3, 0.5]}))
        rows += [made, replace(made, mode="candidate", ratio_p50=0.5, error=verdict).adding(judged)]
    return Results(rows, HEADER)


@in_browser
def test_candidates_are_listed_wrong_ones_first(tmp_path: Path) -> None:
    page_file = page_of(tmp_path / "r.html", {"run": judged_run()})
    with opened(page_file, "/candidates", viewport={"width": 390, "height": 900}) as page:
        assert table_cells(page, 1, "Judged signatures") == ["wrong", "faster"]
        assert "mean over 2 models, 2 traces: saves 10.00 %" in page.locator("main").inner_text()
        cells = page.locator("table.plain tbody tr").all_inner_texts()
        assert cells[0].split("\t")[:5] == ["a", "whole step", "20.0%", "10.0%", "1.0%"]
        assert cells[1].split("\t")[1:4] == [f"within {EVIL}", "50.0%", "25.0%"]
        assert page.evaluate("document.documentElement.scrollWidth") <= 390


@in_browser
def test_tables_sort_search_and_link(report: Path) -> None:
    with opened(report, "/cases") as page:
        page.wait_for_selector("table.dataTable tbody tr")
        page.fill("input[type=search]", "convolution")
        page.wait_for_selector(".dt-info:has-text('filtered')")
        assert {"convolution" in text for text in table_cells(page, 1)} == {True}
        assert "q=convolution" in page.url
        names = page.locator("table.dataTable thead th").all_inner_texts()
        median = next(place for place, name in enumerate(names) if name.startswith("median"))
        page.locator("table.dataTable thead th").nth(median).click()
        page.wait_for_timeout(200)
        times = [float(text.replace(",", "")) for text in table_cells(page, median + 1)]
        assert times == sorted(times)
        page.locator("table.dataTable tbody tr td:first-child a").first.click()
        page.wait_for_selector("h2:has-text('Run it again')")
        assert page.locator("main").inner_text().count("convolution") > 1
        assert "opreplay" in page.locator("pre").inner_text()
        assert page.locator("table:has(caption:has-text('Arguments')) tbody tr").count() > 1
        address = page.url
    with opened(report, address.partition("#")[2]) as page:
        assert "convolution" in page.locator("h1").inner_text()


@in_browser
def test_axe_finds_no_serious_accessibility_problem(report: Path) -> None:
    from axe_playwright_python.sync_playwright import Axe

    with opened(report, color_scheme="dark") as page:
        for view in VIEWS:
            page.goto(f"{report.as_uri()}#/{view}")
            page.wait_for_timeout(700)
            found = Axe().run(page).response["violations"]
            serious = [
                (item["id"], item["nodes"][0]["html"][:200])
                for item in found
                if item["impact"] in ("serious", "critical")
            ]
            assert serious == [], view


@in_browser
def test_report_is_usable_by_keyboard_and_on_a_phone(report: Path) -> None:
    with opened(report, viewport={"width": 360, "height": 740}) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
        for _ in range(2):
            page.keyboard.press("Tab")
        page.keyboard.press("Tab")
        chosen = page.evaluate("document.activeElement.getAttribute('href')")
        page.keyboard.press("Enter")
        page.wait_for_selector(f"nav a[href='{chosen}'][aria-current='page']")
        assert page.evaluate("document.activeElement.id") == "main"


@in_browser
def test_page_of_cases_fits_1280_pixels(tmp_path: Path) -> None:
    shapes, module = "float32[1,256,200,304] " * 6, "backbone.layer1.{}.bn2"
    rows = [
        replace(row, op="aten.native_batch_norm_backward.default", shapes=f"{shapes}{i}", module=module.format(i))
        for i, row in enumerate(make_run(1, cases=30))
    ]
    page_of(tmp_path / "r.html", {"one": Results(rows, HEADER), "two": Results(rows, HEADER)})
    with opened(tmp_path / "r.html", "/cases", viewport={"width": 1280, "height": 800}) as page:
        page.wait_for_selector("table.dataTable tbody tr")
        place = page.locator(".scroll")
        assert place.evaluate("place => place.scrollWidth - place.clientWidth") == 0


@in_browser
def test_report_with_many_rows_responds_quickly(tmp_path: Path) -> None:
    with opened(page_of(tmp_path / "r.html", {"big": rows_of(50_000)}), "/cases") as page:
        page.wait_for_selector("table.dataTable tbody tr")
        began = monotonic()
        page.fill("input[type=search]", "op49")
        page.wait_for_selector(".dt-info:has-text('filtered')")
        answered = monotonic() - began
        began = monotonic()
        page.locator("table.dataTable thead th").first.click()
        page.wait_for_selector("th[aria-sort]")
        assert max(answered, monotonic() - began) < 3.0


@in_browser
def test_case_with_several_variants_counts_once(tmp_path: Path) -> None:
    rows = [replace(row, threads=threads) for row in make_run(1, cases=3) for threads in (1, 2, 4)]
    rows = [replace(row, median_us=float(row.threads or 0), count=1) for row in rows]
    runs = {"one": Results(rows, HEADER), "two": Results(rows, HEADER)}
    with opened(page_of(tmp_path / "r.html", runs)) as page:
        # 1 us for each of three cases
        assert (
            page.locator("table:has(caption:text-is('Runs')) tbody tr td:last-child").all_inner_texts() == ["3 us"] * 2
        )
        page.goto(f"{(tmp_path / 'r.html').as_uri()}#/runs")
        ways = table_cells(page, 3, "Cases in each run")
        assert sorted(ways) == sorted(["eager, 1 thread", "eager, 2 threads", "eager, 4 threads"] * 3)


def test_break_even_compares_with_the_same_variant_in_eager() -> None:
    eager = [replace(make_row(number, [time]), key="") for number, time in enumerate((100.0, 10.0))]
    compiled = [
        replace(row, mode="compile", median_us=row.median_us / 2, first_ms=1.0) for row in eager if row.median_us
    ]
    runs = describe_runs({"made": Results([*eager, *compiled], HEADER)})
    assert runs["rows"]["break_even"] == [None, None, 20, 200]


@in_browser
def test_names_in_untrusted_results_run_no_code(tmp_path: Path) -> None:
    about: dict[str, Any] = {"op": EVIL, "shapes": EVIL, "module": EVIL, "mode": EVIL, "note": EVIL, "key": EVIL}
    rows = [
        replace(make_row(0, [1.0, 2.0]), **about),
        replace(make_row(1, [1.0]), **about, status="failed", error=EVIL),
    ]
    evil = Results(rows, {**HEADER, "trace": EVIL, "device": EVIL})
    with opened(page_of(tmp_path / "r.html", {EVIL: evil, "b": evil})) as page:
        for view in VIEWS:
            page.goto(f"{(tmp_path / 'r.html').as_uri()}#/{view}")
            page.wait_for_timeout(300)
            assert page.locator("main img, main script").count() == 0
            # an SVG link in a chart could lead to a third party's page
            assert page.locator("main svg a").count() == 0
        page.click("nav a[href='#/cases']")
        page.locator("table.dataTable tbody a").first.click()
        page.wait_for_selector("h2:has-text('Run it again')")
        assert page.locator("main img, main script").count() == 0


def test_launches_are_kernels_if_the_trace_has_kernels(tiny_trace: Path) -> None:
    trace = load(tiny_trace)
    calls = trace.own_calls
    signature = int(calls["signature"].iloc[0])
    count = int((calls["signature"] == signature).sum())
    kernels = [Kernels(signature, ["a", "b"], [count, 2 * count], [1000, 2000])]
    launches_of = describe_launches(replace(trace, kernels=kernels), {signature: "key"})
    assert launches_of["are_kernels"]
    assert launches_of["all"][1:3] == (len(calls), 3 * count)
    ((op, own, launches, *_, shapes, key),) = (case for case in launches_of["case"] if case[-1])
    assert (op, own, launches, key) == (calls["op"].iloc[0], count, 3 * count, "key")
    assert shapes
    for groups in ("module", "op", "case"):
        assert sum(group[2] for group in launches_of[groups]) == 3 * count


def test_times_and_savings_of_a_trace_are_those_of_other_commands(detector_trace: Path) -> None:
    trace = load(detector_trace)
    page = describe_trace("detector", trace)
    assert fsum(time for _, time in page["stacks"]) == pytest.approx(trace.summary()["time_us"].sum())
    found = find_longtail([trace], bandwidth_of, own_cost()).functions
    assert [row["saving_us"] for row in page["longtail"]] == [item.saving_ns / 1e3 for item in found]
    assert page["gb_per_s"] == bandwidth_of(trace) / 1e9


def test_cumulative_launch_shares_rise_to_one(tiny_trace: Path) -> None:
    curve = describe_launches(load(tiny_trace), {})["curve"]
    for column in zip(*curve, strict=True):
        assert list(column) == sorted(column)
    assert curve[-1][1:] == (1.0, 1.0)


def test_report_page_is_self_contained(tmp_path: Path) -> None:
    page = make_page({"made": make_run(1, cases=4)}, {}, "<made> & done")
    assert "<title>&lt;made&gt; &amp; done</title>" in page
    embedded = page.partition('id="data">')[2].partition("</script>")[0]
    content = json.loads(embedded)
    assert len(content["rows"]["median_us"]) == 4
    assert [run["name"] for run in content["runs"]] == ["made"]
    for outside in ('src="http', "src='http", 'href="http', "@import"):
        assert outside not in page.partition("<script>")[0]


def test_unreadable_report_input_is_an_error_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    refusal("opgrip", "report", "x.json", "-o", "r.html", cwd=tmp_path, in_one_line=True)
    assert not (tmp_path / "r.html").exists()


def test_report_of_two_runs_has_verdicts_and_gates() -> None:
    runs = {"base": make_run(1, cases=20), "head": make_run(2, cases=20, slower=1.5)}
    (shown,) = describe_comparisons(runs, ["slower<=5%", "total<=80%"])
    held = compare(runs["base"], runs["head"]).gate("slower<=5%", "total<=80%")
    assert shown["gates"] == [item.line for item in held]
    assert shown["gates"][0].startswith("gate slower<=5%: failed: ")
    assert len(shown["rows"]) == 20
    assert shown["rows"][0][0] == "SLOWER"
    page = make_page(runs, {}, "made")
    assert json.dumps(held[0].line).strip('"').replace("<", "\\u003c").replace(">", "\\u003e") in page


@needs("plotly", "itables")
@pytest.mark.slow
def test_store_page_shows_the_newest_runs(tmp_path: Path) -> None:
    for seed in range(22):
        run = make_run(seed, cases=1, repeats=1, runs=3)
        Store(tmp_path / "store").keep(run.rows, {**run.header, "trace": f"t{seed:02}.jsonl"})
    (tmp_path / "store" / "machine").mkdir()
    (tmp_path / "store" / "machine" / "broken.json").write_text("{")
    succeed("opgrip", "report", tmp_path / "store", "-o", tmp_path / "history.html")
    page = (tmp_path / "history.html").read_text()
    assert "t21" in page
    assert "t02" in page
    assert "t01.jsonl" not in page


@in_browser
def test_history_page_shows_the_history_of_a_case(tmp_path: Path) -> None:
    runs = {}
    for day in (1, 2, 3):
        run = make_run(day, cases=3)
        header = {**HEADER, "time": f"2026-01-0{day}T00:00:00+00:00"}
        runs[f"day{day}"] = Results([replace(row, p10_us=row.median_us, p90_us=row.median_us) for row in run], header)
    path = tmp_path / "r.html"
    path.write_text(make_page(runs, {}, "days"))
    with opened(path, f"/case/{run.rows[1].key}") as page:
        page.wait_for_selector("h2:has-text('History')")
        page.wait_for_selector("[aria-label='History of the case'] .scatterlayer .point")
        assert page.locator("[aria-label='History of the case'] .scatterlayer .point").count() == 3


@in_browser
def test_first_page_begins_with_what_is_wrong(tmp_path: Path) -> None:
    base, new = make_run(1, cases=12), make_run(2, cases=12, slower=1.5)
    rows = [replace(row, status="wrong", share=0.05, error="x") if row.case == 3 else row for row in new]
    base.save(tmp_path / "base.json")
    Results([replace(row, share=0.05) for row in rows], new.header).save(tmp_path / "new.json")
    succeed("opgrip", "report", tmp_path / "base.json", tmp_path / "new.json", "-o", tmp_path / "page.html")
    with opened(tmp_path / "page.html") as page:
        page.wait_for_selector(".status-bad")
        bad, doubtful = (page.locator(f".status-{style}").all_inner_texts() for style in ("bad", "doubtful"))
    assert bad[0].startswith("new: gate slower<=5%: failed: ")
    assert {"new: 1 CHANGED", "1 row wrong"} <= set(bad)
    assert "only 60.0% of the captured time was replayed" in doubtful
