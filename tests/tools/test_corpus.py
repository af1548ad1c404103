"""`opgrip corpus`, run as a user runs it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from optional import needs
from outside import with_package
from pages import in_browser, opened
from programs import run_command, train_tiny_net
from several_traces import small_trace

from opgrip.capture import Capture
from opgrip.cli.progress import QuietReporter
from opgrip.errors import UserError
from opgrip.tools.corpus.coverage import cover, plain_operator, public_operators, summarize_coverage
from opgrip.tools.corpus.lacking import Trial, describe_lacking, find_lacking
from opgrip.tools.corpus.sources import compare_sources
from opgrip.tools.opgrip import make_parser
from opgrip.tools.verbs import verbs
from opgrip.traces.corpus import read_corpus

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


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a command where a package with modes is installed."""
    return with_package(tmp_path_factory.mktemp("site"), {"opgrip.modes": "planted_modes"})


@pytest.mark.slow
def test_each_source_has_its_table(folder: Path, tmp_path: Path) -> None:
    done = run_command("opgrip", "corpus", folder, "-o", tmp_path / "corpus.json")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert "trace: 2 models, 2 traces, " in done.stdout
    assert "dlop: 1 model, 2 traces, 4 calls, 4 signatures, 2 operators" in done.stdout
    form = json.loads((tmp_path / "corpus.json").read_text())
    assert {row["op"] for row in form["rows"] if row["source"] == "dlop"} == {"aten.conv2d.default", "aten.erf.default"}


@pytest.mark.slow
def test_the_rows_of_one_model_alone_are_chosen(folder: Path) -> None:
    alone = run_command("opgrip", "corpus", folder / "tiny.jsonl", folder / "small.jsonl", "--models", "1")
    both = run_command("opgrip", "corpus", folder / "tiny.jsonl", folder / "small.jsonl", "--models", "all")
    assert "aten.sin.default" in alone.stdout
    assert "aten.sin.default" not in both.stdout
    assert "aten.convolution.default" not in both.stdout


def test_a_composite_operator_of_another_source_counts_as_what_it_calls(folder: Path) -> None:
    table = compare_sources(read_corpus([str(folder)])).set_index("op")
    convolution = table.loc["aten.convolution"]
    assert (convolution["has_it"], convolution["by_way_of"]) == ("all", "aten.conv2d")
    assert (convolution["trace_models"], convolution["dlop_signatures"]) == (1, 2)
    assert table.loc["aten.erf", "has_it"] == "dlop"
    assert table.loc["aten.sin", "has_it"] == "trace"
    assert "aten.conv2d" not in table.index
    # what makes its inputs is no part of it
    assert table["by_way_of"].get("aten.empty", "") == ""


@pytest.mark.slow
def test_sources_are_compared_by_one_command(folder: Path) -> None:
    done = run_command("opgrip", "corpus", folder, "--compare-sources")
    assert done.returncode == 0, done.stderr
    assert "in all sources" in done.stdout
    assert "in dlop alone (1 in all)" in done.stdout


def test_coverage_counts_operators_and_not_their_variants(folder: Path) -> None:
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


def test_variants_of_an_operator_have_one_name() -> None:
    names = ("aten.add.Tensor", "aten.add_.Tensor", "aten.add", "mmcv._ext:nms")
    assert list(map(plain_operator, names)) == ["aten.add", "aten.add", "aten.add", "mmcv._ext:nms"]


def test_coverage_is_printed_by_category(folder: Path) -> None:
    done = run_command("opgrip", "corpus", folder / "small.jsonl", "--coverage")
    assert done.stdout.startswith(f"3 of {len(public_operators()):,} public operators of torch are in the corpus")


@pytest.mark.slow
def test_what_a_mode_cannot_run_is_found_by_trying(folder: Path, tmp_path: Path, planted: dict[str, str]) -> None:
    output = tmp_path / "lacking.json"
    words = ("corpus", folder / "small.jsonl", "--mode", "planted-same,planted-refuses", "-o", output)
    done = run_command("opgrip", *words, env=planted)
    assert done.returncode == 0, done.stderr
    same, refuses = done.stdout.splitlines()[:2]
    assert same.startswith("planted-same: 0 signatures of 0 models cannot run, of 3 that were tried: 0.0% of the time")
    assert refuses.startswith(
        "planted-refuses: 3 signatures of 1 model cannot run, of 3 that were tried: 100.0% of the time"
    )
    rows = json.loads(output.read_text())["rows"]
    assert {row["status"] for row in rows if row["mode"] == "planted-same"} == {"ok"}
    refused = [row for row in rows if row["mode"] == "planted-refuses"]
    assert {row["models"] for row in refused} == {"small"}
    assert all("line one" in row["reason"] for row in refused)
    again = run_command("opgrip", *words, "--resume", "-f", env=planted)
    assert (again.returncode, again.stdout) == (0, done.stdout)


@pytest.mark.slow
def test_a_trial_of_other_signatures_is_not_gone_on_with(folder: Path, tmp_path: Path) -> None:
    trial = Trial(top=1, keep=tmp_path / "lacking.json")
    corpus, reporter = read_corpus([str(folder / "small.jsonl")]), QuietReporter("opgrip")
    table = find_lacking(corpus, trial, reporter)
    assert len(table) == 1
    assert re.search(r"of 1 that were tried, \d+\.\d% of the time: 0.0% of the time$", describe_lacking(table)[0])
    again = replace(trial, resume=True)
    assert len(find_lacking(corpus, again, reporter)) == 1
    with pytest.raises(UserError, match="are of another corpus, or of another part of it: leave out --resume"):
        find_lacking(corpus, replace(again, top=2), reporter)
    other = read_corpus([str(small_trace(tmp_path / "other.jsonl", (10,)))])
    with pytest.raises(UserError, match="are of another corpus"):
        find_lacking(other, again, reporter)


@pytest.fixture(scope="module")
def page(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "corpus.html"
    done = run_command("opgrip", "report", folder, folder / "small.jsonl", "-o", path)
    assert done.returncode == 0, done.stderr
    return path


@needs("plotly", "itables")
def test_a_report_of_a_folder_has_all_tables_of_the_corpus(page: Path) -> None:
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
def test_the_corpus_is_looked_at_in_a_browser(page: Path) -> None:
    with opened(page, "/corpus") as browser:
        browser.wait_for_selector("table.dataTable tbody tr td")
        browser.locator("select").first.select_option("model")
        browser.wait_for_selector("table.dataTable td:has-text('tiny')")
        browser.locator("select").first.select_option("coverage")
        browser.wait_for_selector("table.dataTable td:has-text('elementwise')")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["no.jsonl"], "is not there"),
        (["zoo:nothing"], "no trace of the zoo"),
        (["small.jsonl", "--mode", "nothing"], "there is no mode"),
        (["small.jsonl", "--models", "some"], "is neither a number"),
        (["small.jsonl", "--models", "0"], "no row is of so many models"),
        (["small.jsonl", "--models", "1", "--by", "model"], "does not go with"),
        (["small.jsonl", "--resume"], "--resume needs"),
        (["small.jsonl", "-o", "corpus.txt"], "is neither"),
        (["small.jsonl", "--compare-sources"], "of one source"),
        (["small.jsonl", "--coverage", "--compare-sources"], "not allowed"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(folder: Path, words: list[str], said: str) -> None:
    done = run_command("opgrip", "corpus", *words, cwd=folder)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert said in done.stderr


def test_a_verb_can_stand_beside_one_that_takes_files(monkeypatch: pytest.MonkeyPatch) -> None:
    verb = verbs.get("corpus")
    assert verb is not None
    monkeypatch.setitem(verbs._entries, "corpus beside", verb)
    assert make_parser().parse_args(["corpus", "beside", "zoo"]).prog == "opgrip corpus beside"
    assert make_parser().parse_args(["corpus", "other", "zoo"]).inputs == ["other", "zoo"]
