"""`opgrip corpus`, run as a user runs it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from optional import needs
from pages import in_browser, opened
from programs import refusal, run_command, succeed, train_tiny_net

from opgrip.capture import Capture
from opgrip.zoo.corpus import read_corpus
from opgrip.zoo.corpus.summaries import cover, public_operators, summarize_coverage

CONV = {
    "input": [[1, 3, 8, 8], [2, 3, 8, 8]],
    "weight": [[4, 3, 3, 3], [4, 3, 3, 3]],
    "bias": [[4], [4]],
    "stride": [[1, 1], [1, 1]],
    "padding": [[0, 0], [0, 0]],
    "dilation": [[1, 1], [1, 1]],
    "groups": [[1], [1]],
}
ERF = {"input": [[2, 3], [4, 3]]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    train_tiny_net(folder / "tiny.jsonl")
    with Capture(folder / "small.jsonl"):
        torch.randn(8, 8).relu().sin()
    (folder / "conv2d.json").write_text(json.dumps(CONV))
    (folder / "erf.json").write_text(json.dumps(ERF))
    return folder


@pytest.mark.slow
def test_corpus_has_a_table_per_source(folder: Path, tmp_path: Path) -> None:
    done = run_command("opgrip", "corpus", folder, "-o", tmp_path / "corpus.json")
    assert done.returncode == 0
    assert re.fullmatch(r"opgrip corpus: wrote \d+ rows to .*corpus\.json\n", done.stderr)
    assert "\x1b" not in done.stdout
    assert "trace: 2 models, 2 traces, " in done.stdout
    assert "dlop: 1 model, 2 traces, 4 calls, 4 signatures, 2 operators" in done.stdout
    form = json.loads((tmp_path / "corpus.json").read_text())
    assert {row["op"] for row in form["rows"] if row["source"] == "dlop"} == {"aten.conv2d.default", "aten.erf.default"}


def test_coverage_counts_operators_without_their_variants(folder: Path) -> None:
    public = public_operators()
    assert {"aten.add", "aten.convolution", "aten.relu", "aten.sin"} <= public
    assert not {"aten.add_", "aten.conv2d", "aten._softmax"} & public
    table = cover(read_corpus([str(folder / "small.jsonl")])).set_index("op")
    assert table.index[table["is_covered"]].tolist() == ["aten.randn", "aten.relu", "aten.sin"]
    summary = summarize_coverage(table.reset_index()).set_index("category")
    assert summary["covered"].sum() == 3
    assert summary["operators"].sum() == len(public)
    assert "relu" not in summary.loc["activation", "missing"].split(", ")
    assert "hardswish" in summary.loc["activation", "missing"].split(", ")


@pytest.fixture(scope="module")
def page(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "corpus.html"
    succeed("opgrip", "report", folder, folder / "small.jsonl", "-o", path)
    return path


@needs("plotly", "itables")
@pytest.mark.slow
def test_report_of_a_folder_has_all_tables_of_the_corpus(page: Path) -> None:
    text = page.read_text()
    form = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
    assert set(form["corpus"]["tables"]) == {"op", "shape", "dtype", "signature", "model", "family", "coverage"}
    assert len(form["corpus"]["members"]) == 4
    assert len(form["traces"]) == 1
    columns = [column["name"] for column in form["corpus"]["tables"]["op"]["columns"]]
    ops = [row[columns.index("op")] for row in form["corpus"]["tables"]["op"]["rows"]]
    assert {"aten.sin.default", "aten.conv2d.default"} <= set(ops)
    covered = form["corpus"]["tables"]["coverage"]
    names = [column["name"] for column in covered["columns"]]
    kinds = {row[0]: dict(zip(names, row, strict=True)) for row in covered["rows"]}
    elementwise = kinds["elementwise"]
    assert 0 < elementwise["covered"] < elementwise["of_torch"]
    percent = 100 * elementwise["covered"] / elementwise["of_torch"]
    assert elementwise["part_covered"] == pytest.approx(percent, rel=1e-4)
    assert "cos" in elementwise["missing"].split(", ")


@in_browser
def test_corpus_page_works_in_a_browser(page: Path) -> None:
    with opened(page, "/corpus") as browser:
        browser.wait_for_selector("table.dataTable tbody tr td")
        browser.locator("select").first.select_option("model")
        browser.wait_for_selector("table.dataTable td:has-text('tiny')")
        browser.locator("select").first.select_option("coverage")
        browser.wait_for_selector("table.dataTable td:has-text('elementwise')")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no.jsonl"], "no.jsonl does not exist"),
        (["zoo:nothing"], "no trace of the zoo"),
        (["small.jsonl", "--models", "some"], "is not a number ('2')"),
        (["small.jsonl", "--models", "0"], "does not contain a possible number of models"),
        (["small.jsonl", "--models", "1", "--by", "model"], "cannot be used with"),
        (["small.jsonl", "-o", "corpus.txt"], "corpus.txt is not the name of"),
    ],
)
def test_invalid_arguments_are_refused_in_one_line(folder: Path, words: list[str], message: str) -> None:
    assert message in refusal("opgrip", "corpus", *words, cwd=folder, in_one_line=True)
