"""Details of printed output: names, columns, counts and addresses in the form that a reader expects."""

from __future__ import annotations

import io
import json
import os
import re
from pathlib import Path

import pandas as pd
import pytest
import torch
from made_runs import make_row
from programs import refusal, run_command, succeed

from opgrip.capture import Capture
from opgrip.replay.cases.cases import make_cases
from opgrip.replay.outcome import read_run, write_results
from opgrip.replay.reports.results_table import print_results
from opgrip.traces import load, read
from opgrip.traces.io.writer import TraceWriter
from opgrip.traces.schema.records import Calls
from opgrip.zoo.corpus.summaries import print_coverage


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kept")
    inputs = json.dumps([{"self": [size, size], "other": [size, size], "alpha": 2} for size in range(1, 7)])
    words = ["--operator", "aten.add.Tensor", "--inputs", inputs, "--iterations", "1", "--warmup", "0"]
    succeed("opreplay", *words, cwd=folder, env=os.environ | {"OPGRIP_STORE": "results"})
    return folder


def test_stored_run_of_an_operator_is_named_after_it(kept: Path) -> None:
    (path,) = kept.glob("results/*/*")
    assert re.fullmatch(r"\d+T\d+-operator_aten_add_Tensor-\w+", path.stem)


def test_results_show_separates_facts_from_their_names(kept: Path) -> None:
    done = run_command("opgrip", "results", "show", "latest", "--store", "results", cwd=kept)
    assert re.search(r"^options_hash  +\w{16}$", done.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("compare run.json run.json -o x.json", "1 comparison to x.json"),
        ("corpus t.jsonl -o x.csv", "2 rows to x.csv"),
        ("corpus t.jsonl --coverage -o x.json", "rows to x.json"),
        ("trace diff t.jsonl t.jsonl -o x.json", "the differences to x.json"),
        ("trace validate t.jsonl -o x.json", "all findings to x.json"),
    ],
)
def test_verb_reports_what_it_wrote(words: str, message: str, kept: Path, tmp_path: Path) -> None:
    with Capture(tmp_path / "t.jsonl"):
        torch.ones(3).sin()
    (run,) = kept.glob("results/*/*")
    results = read_run(run)
    write_results(results.rows, results.header, tmp_path / "run.json", force=False)
    done = run_command("opgrip", *words.split(), cwd=tmp_path)
    assert f"{message}\n" in done.stderr
    assert list(tmp_path.glob("x.*"))


@pytest.mark.parametrize("words", [(), ("trace",)])
def test_command_without_a_verb_prints_its_help(words: tuple[str, ...]) -> None:
    error = refusal("opgrip", *words)
    assert error.startswith("usage: opgrip")
    assert "export-case" in error


def test_partial_operator_name_is_completed_to_a_pattern(tmp_path: Path) -> None:
    with Capture(tmp_path / "t.jsonl"):
        torch.ones(3).sin()
    error = refusal("opreplay", "t.jsonl", "--op", "sin", cwd=tmp_path)
    assert error.endswith("; a pattern matches whole names, so try --op '*sin*'\n")


def test_words_after_ok_are_explained() -> None:
    text = io.StringIO()
    print_results([make_row(0, [1.0, 2.0, 3.0], noisy=True)], text)
    assert "noisy: the middle half of the runs spreads over more than a quarter of the median\n" in text.getvalue()


def test_list_of_runs_fits_a_line(kept: Path) -> None:
    done = run_command("opgrip", "results", "list", "--store", "results", cwd=kept)
    assert "operator:aten.add.Tensor" in done.stdout
    assert max(map(len, done.stdout.splitlines())) < 200


def test_trimmed_trace_is_counted_as_in_trace_info(tmp_path: Path) -> None:
    with Capture(tmp_path / "t.jsonl"), torch.profiler.record_function("a mark"):
        torch.ones(3).sin()
    info = run_command("opgrip", "trace", "info", "t.jsonl", cwd=tmp_path).stdout
    trimmed = run_command("opgrip", "trace", "trim", "t.jsonl", "-o", "p.jsonl", "--op", "aten.*", cwd=tmp_path)
    assert re.search(r"calls +2\b", info)
    assert "2 of 2 calls, 2 of 2 signatures" in trimmed.stderr


def test_missing_operators_are_wrapped_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    import sys

    names = [f"aten.operator_number_{number}" for number in range(80)]
    table = pd.DataFrame({"op": names, "category": "all", "is_public": True, "is_covered": False})
    print_coverage(table, sys.stdout)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) < 200
    assert all(any(f"operator_number_{number}," in line for line in lines) for number in range(79))


def test_cases_of_a_trace_without_times_are_sorted_by_work(tmp_path: Path) -> None:
    with Capture(tmp_path / "t.jsonl"):
        x = torch.ones(256, 256)
        for _ in range(5):
            x.relu()
        x.view(-1)
        x.mm(x)
    writer = TraceWriter(tmp_path / "timeless.jsonl", next(iter(read(tmp_path / "t.jsonl"))), False)
    for record in list(read(tmp_path / "t.jsonl"))[1:]:
        writer.write(Calls(**{**fields_of(record), "duration_ns": [0] * 8}) if isinstance(record, Calls) else record)
    writer.close()
    cases = make_cases(load(tmp_path / "timeless.jsonl"))
    assert cases[0].op == "aten.mm.default"
    assert cases[-1].op == "aten.view.default"
    assert sum(case.share for case in cases) == pytest.approx(1)


def fields_of(record: Calls) -> dict[str, object]:
    return {name: getattr(record, name) for name in record.__slots__}
