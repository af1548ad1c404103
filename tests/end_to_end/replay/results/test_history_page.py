"""History page of a results store, with the history of each case."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from example_trace import write
from made_runs import HEADER, make_run
from optional import needs
from pages import in_browser, opened
from programs import succeed

from opgrip.replay.comparison.results_store import Store
from opgrip.replay.outcome import Results
from opgrip.tools.report import make_page


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


@needs("plotly", "itables")
def test_folder_of_other_json_files_is_not_a_store(tmp_path: Path) -> None:
    (tmp_path / "traces" / "detector").mkdir(parents=True)
    (tmp_path / "traces" / "detector" / "notes.json").write_text("{}")
    write(tmp_path / "traces" / "t.jsonl")
    succeed("opgrip", "report", tmp_path / "traces", "-o", tmp_path / "corpus.html")
    assert "t.jsonl" in (tmp_path / "corpus.html").read_text()


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
