"""Tests of times by module, phase and line: calls of a signature are shared among all modules that made them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from math import fsum
from pathlib import Path

import pytest
import torch
from made_runs import HEADER, make_run
from pages import in_browser, opened
from settings import settings_of
from torch import nn

from opgrip import Capture, load
from opgrip.replay import Results, compare
from opgrip.replay.cases.call_sites import CallSite, from_text, module_of, to_text
from opgrip.replay.cases.cases import make_cases
from opgrip.replay.cases.selection import Selection
from opgrip.replay.results.ratios import shares_by
from opgrip.replay.run.workload import expected_rows
from opgrip.tools.report import make_page
from opgrip.tools.report.page import describe_runs
from opgrip.traces import Trace


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
    """Return results in which each case takes as long as in the program."""
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
    """Return the shares of time that `opgrip trace info` shows."""
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
