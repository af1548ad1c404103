"""The verbs that validate and trim traces, and the list of all verbs."""

from __future__ import annotations

import argparse
import csv
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from example_trace import RECORDS, write
from programs import refusal, run_command, succeed

from opgrip import Capture
from opgrip.tools.opgrip import make_parser
from opgrip.tools.verbs import verbs
from opgrip.tools.verbs.trace_trim import span, steps
from opgrip.traces.schema.records import Scope


def test_all_verbs_are_listed_on_one_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = make_parser().format_help().splitlines()
    assert len(lines) < 24
    assert max(map(len, lines)) <= 80
    words = {word.strip(",") for line in lines for word in line.split()}
    assert {name.split()[-1] for name in verbs.names()} <= words
    assert {name.split()[0] for name in verbs.names()} <= words


def test_validate_prints_findings_and_sets_the_exit_status(tiny_trace: Path, tmp_path: Path) -> None:
    good = run_command("opgrip", "trace", "validate", tiny_trace)
    assert (good.returncode, good.stderr) == (0, "")
    assert good.stdout.endswith("no findings\n")
    lines = tiny_trace.read_bytes().splitlines(keepends=True)
    (tmp_path / "bad.jsonl").write_bytes(b"".join([*lines[:5], b"{}\n", *lines[6:]]))
    done = run_command(
        "opgrip", "trace", "validate", tiny_trace, "bad.jsonl", "-o", "f.json", "--top", "1", cwd=tmp_path
    )
    assert done.returncode == 1
    assert "bad.jsonl: record 6: form: a line is not a JSON object with a `type`" in done.stdout
    first, second = json.loads((tmp_path / "f.json").read_text())
    assert first["findings"] == []
    assert second["findings"][0] == {
        "record": 6,
        "kind": "form",
        "message": "a line is not a JSON object with a `type`",
    }
    missing = run_command("opgrip", "trace", "validate", tmp_path / "none.jsonl")
    assert (missing.returncode, len(missing.stderr.splitlines())) == (2, 1)


def test_trim_writes_a_part_and_reports_missing_producers(tiny_trace: Path, tmp_path: Path) -> None:
    words = ("opgrip", "trace", "trim", tiny_trace, "-o", tmp_path / "part.jsonl", "--phase", "backward")
    done = succeed(*words)
    assert " a call that is kept reads the result of a removed call" in done.stderr
    assert run_command("opgrip", "trace", "validate", tmp_path / "part.jsonl").returncode == 0
    assert "exists" in refusal(*words)
    whole = run_command(*words, "--with-producers", "-f")
    assert "produce inputs for the others" in whole.stderr
    assert "removed" not in whole.stderr


def test_all_verbs_count_operator_calls_without_marks(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with Capture(tmp_path / f"{name}.jsonl"), torch.profiler.record_function("step"):
            torch.ones(3).add(1)
    both, line = tmp_path / "both.jsonl", tmp_path / "line.json"
    merged = succeed("opgrip", "trace", "merge", tmp_path / "a.jsonl", tmp_path / "b.jsonl", "-o", both).stderr
    info = succeed("opgrip", "trace", "info", both).stdout
    assert re.search(r"calls +4\n", info)
    assert re.search(r"signatures +2 of", info)
    assert "4 calls of 2 signatures from 2 traces" in merged
    assert "wrote 4 calls to" in succeed("opgrip", "trace", "timeline", both, "-o", line).stderr
    assert (
        "4 of 4 calls, 2 of 2 signatures" in succeed("opgrip", "trace", "trim", both, "-o", tmp_path / "t.jsonl").stderr
    )


def test_names_of_a_trace_are_not_formulas_in_a_csv(tmp_path: Path) -> None:
    records = [replace(item, module="=cmd|calc") if isinstance(item, Scope) else item for item in RECORDS]
    write(tmp_path / "t.jsonl", records)
    succeed("opgrip", "trace", "info", "t.jsonl", "--by", "module", "-o", "t.csv", cwd=tmp_path)
    with (tmp_path / "t.csv").open(newline="", encoding="utf-8") as file:
        assert {row["module"] for row in csv.DictReader(file)} == {"'=cmd|calc"}


@pytest.mark.parametrize(
    ("text", "expected"), [("1", (1, 2)), ("0:2", (0, 2)), ("2:", (2, None)), (":3", (0, 3)), (":", (0, None))]
)
def test_steps_option_takes_a_step_or_a_range(text: str, expected: tuple[int, int | None]) -> None:
    assert steps(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1.5s:2s", (1_500_000_000, 2_000_000_000)),
        ("100ms:", (100_000_000, None)),
        (":20us", (0, 20_000)),
        ("1:2", (10**9, 2 * 10**9)),
        ("3ns:4ns", (3, 4)),
    ],
)
def test_time_range_option_takes_units(text: str, expected: tuple[int, int | None]) -> None:
    assert span(text) == expected


@pytest.mark.parametrize("text", ["", "x", "2:1", "1:1", "-1", "1:2:3", "٣"])
def test_invalid_range_is_refused(text: str) -> None:
    for read in (steps, span):
        if not (read is steps and text == "") and not (read is span and text in ("-1:",)):
            with pytest.raises(argparse.ArgumentTypeError):
                read(text)
