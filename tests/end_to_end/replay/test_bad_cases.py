"""Real cases that crash, hang, exit or use too much memory: each fails in its own row, and the others are measured."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pandas as pd
import pytest
from bad_cases import ABORT, EXIT, EXTENSIONS, HANG, HUGE, SEGFAULT, bad_trace
from programs import program_path, receive_ctrl_c, refusal, run_command, succeed, wait_for

from opgrip.replay import Results

TRUSTED = [word for name in EXTENSIONS for word in ("--extension", name)]
FAST = ["--iterations", "3", "--warmup", "0"]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    folder = tmp_path_factory.mktemp("bad")
    output = folder / "results.json"
    done = succeed(
        "opreplay", bad_trace(folder / "t.jsonl"), *TRUSTED, *FAST, "--timeout", "2", "-o", output, cwd=folder
    )
    assert "20 cases: 15 ok, 4 failed, 1 timeout" in done.stderr
    return Results.load(output).frame


@pytest.mark.parametrize(
    ("op", "status", "message"),
    [
        (SEGFAULT, "failed", "it ended its process: segmentation fault"),
        (ABORT, "failed", "it ended its process: aborted"),
        (EXIT, "failed", "it ended its process with status 3"),
        (HANG, "timeout", "it took longer than 2 s"),
        (HUGE, "failed", "out of memory: "),
    ],
)
def test_bad_case_reports_its_status_and_reason(rows: pd.DataFrame, op: str, status: str, message: str) -> None:
    row = rows[rows["op"] == op].iloc[0]
    assert row["status"] == status
    assert message in row["error"]
    assert pd.isna(row["median_us"])


def test_good_cases_are_measured_next_to_bad_ones(rows: pd.DataFrame) -> None:
    good = rows[rows["op"] == "aten.mul.Tensor"]
    assert len(good) == 15
    assert set(good["status"]) == {"ok"}
    assert (good["median_us"] > 0).all()


def test_case_above_the_memory_limit_is_not_tried(tmp_path: Path) -> None:
    path, output = bad_trace(tmp_path / "t.jsonl", goods=1), tmp_path / "results.json"
    options = ["--op", "aten.*", "--memory-limit", "1GB", "-o", output]
    assert run_command("opreplay", path, *FAST, *options).returncode == 0
    results = Results.load(output).frame
    assert results[results["op"] == HUGE].iloc[0]["status"] == "failed"
    assert set(results[results["op"] != HUGE]["status"]) == {"ok"}


def journal_lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []


def interrupted(folder: Path, how: signal.Signals) -> Path:
    """End a replay when it hangs, after the first part of its cases, and return its journal."""
    trace = bad_trace(folder / "t.jsonl", goods=60)
    command = [program_path("opreplay"), trace, *TRUSTED, *FAST, "--timeout", "600", "-o", folder / "results.json"]
    with subprocess.Popen(
        command, cwd=folder, stderr=subprocess.PIPE, stdout=subprocess.PIPE, preexec_fn=receive_ctrl_c
    ) as process:
        journal = folder / "results.json.journal"
        wait_for(lambda: len(journal_lines(journal)) > 100, process)
        process.send_signal(how)
        output, errors = process.communicate(timeout=300)
    assert len(journal_lines(journal)) > 100, errors
    if how == signal.SIGINT:
        assert process.returncode == 130
        assert b"--resume" in errors
        assert b"aten.mul.Tensor" in output
    return journal


def test_rows_of_an_interrupted_replay_are_not_overwritten_by_mistake(tmp_path: Path) -> None:
    path = bad_trace(tmp_path / "t.jsonl", goods=1)
    (tmp_path / "results.json.journal").write_text('{"trace": "another", "options": {}}\n', encoding="utf-8")
    options = ["--op", "aten.mul*", *FAST, "-o", "results.json"]
    error = refusal("opreplay", path, *options, cwd=tmp_path)
    assert "contains the rows of an interrupted replay: continue with --resume, or start again with --force" in error
    assert "contains rows of a replay of another trace or with other options" in refusal(
        "opreplay", path, *options, "--resume", cwd=tmp_path
    )
    assert run_command("opreplay", path, *options, "--force", cwd=tmp_path).returncode == 0
    done = run_command("opreplay", path, *options, "--resume", cwd=tmp_path)
    assert "results.json is complete" in done.stderr


@pytest.mark.parametrize("suffix", [".json", ".csv"])
def test_rows_are_appended_to_a_file(tmp_path: Path, suffix: str) -> None:
    path, output = bad_trace(tmp_path / "t.jsonl", goods=1), tmp_path / f"results{suffix}"
    assert run_command("opreplay", path, "--op", "aten.mul*", "--stop", "2", *FAST, "-o", output).returncode == 0
    options = ["--op", "aten.mul*", "--start", "2", *FAST, "-o", output]
    assert run_command("opreplay", path, *options).returncode == 2
    assert run_command("opreplay", path, *options, "--append").returncode == 0
    whole = Results.load(output).frame
    assert len(whole) == 5
    assert whole["case"].is_unique
    assert set(whole["status"]) == {"ok"}
