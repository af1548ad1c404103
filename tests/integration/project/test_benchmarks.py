"""Tests of the thresholds of benchmarks, and of the records that the coverage of models keeps."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib import util
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from covering.table import is_native, is_whole, page
from figures import table_of_thresholds as table_module
from figures.figure import Experiment, Figure, Rounds, read_figure
from figures.table_of_thresholds import (
    Threshold,
    Verdict,
    judge,
    lower,
    new_threshold,
    read_thresholds,
    thresholds_on,
    write_thresholds,
)
from programs import ROOT

COST = Figure("cost", "what over what")
SHARE = Figure("share", "right of all", "", larger_is_better=True)
STEADY = [(2.0, 1.0), (2.02, 1.0), (1.98, 1.0), (2.01, 1.0), (1.99, 1.0)]
NOISY = [(2.0, 1.0), (0.5, 1.0), (4.0, 1.0), (0.9, 1.0), (2.5, 1.0)]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    # benchmarks set these when they are imported
    for name in ("TORCH_CPP_LOG_LEVEL", "KINETO_LOG_LEVEL"):
        monkeypatch.setenv(name, "9")
    import thresholds as benchmark

    return benchmark


def verdict(figure: Figure, rounds: Rounds, threshold: float, when_set: float = 2.0) -> Verdict:
    return judge(figure, read_figure(figure, rounds), Threshold(figure.name, threshold, when_set, "2025-01-01"))


def run(
    benchmark: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    threshold: float,
    arguments: Sequence[str] = (),
    later: Rounds = STEADY,
) -> int:
    """Return the exit status of a run whose only figure is 2; a complete run's rounds are `later`."""
    # a builtin method, so that a new process can load it
    measure = {3: [later], 1: [STEADY]}.__getitem__
    monkeypatch.setattr(benchmark, "EXPERIMENTS", (Experiment("made up", (COST,), measure, rounds=3, quick_rounds=1),))
    monkeypatch.setattr(
        benchmark, "thresholds_on", lambda processor: {"cost": Threshold("cost", threshold, threshold, "2025-01-01")}
    )
    monkeypatch.setattr(sys, "argv", ["thresholds.py", *arguments])
    return int(benchmark.main())


def test_missed_threshold_fails_the_run_and_is_named_in_the_table(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(benchmark, monkeypatch, threshold=2.5) == 0
    assert "reach their thresholds" in capsys.readouterr().out
    assert run(benchmark, monkeypatch, threshold=1.5, arguments=["--quick"]) == 1
    output = capsys.readouterr().out
    assert "so 3 more rounds are measured" in output
    assert "WORSE" in output
    assert "1 of 1 figures miss their thresholds" in output


def test_worse_figure_is_measured_again_and_judged_with_all_rounds(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(benchmark, monkeypatch, threshold=1.5, arguments=["--quick"], later=[(1.0, 1.0)] * 9) == 0
    output = capsys.readouterr().out
    assert "made up: worse, so 3 more rounds are measured" in output
    assert "reach their thresholds" in output


def test_figure_is_worse_only_if_its_whole_interval_is() -> None:
    assert verdict(COST, STEADY, threshold=1.9) is Verdict.WORSE
    assert verdict(COST, NOISY, threshold=1.9) is Verdict.NOISE
    assert verdict(COST, NOISY, threshold=0.4) is Verdict.WORSE
    assert verdict(COST, STEADY, threshold=2.1) is Verdict.REACHED


def test_threshold_is_a_minimum_if_larger_is_better() -> None:
    assert verdict(SHARE, STEADY, threshold=2.1) is Verdict.WORSE
    assert verdict(SHARE, NOISY, threshold=2.1) is Verdict.NOISE
    assert verdict(SHARE, STEADY, threshold=1.9) is Verdict.REACHED


def test_missing_threshold_or_failing_experiment_fails_the_run(benchmark: ModuleType) -> None:
    assert judge(COST, read_figure(COST, STEADY), None).fails
    broken = Experiment("broken", (COST,), {}.__getitem__, rounds=3)
    (outcome,) = benchmark.run_experiment(broken, 3, {})
    assert outcome.verdict.fails
    assert "KeyError" in outcome.why


def test_threshold_is_the_worst_of_several_runs_and_never_rises() -> None:
    old = {"cost": Threshold("cost", 2.0, 1.9, "2025-01-01")}
    assert new_threshold(COST, [1.2041, 1.1, 1.0], "today") == Threshold("cost", 1.21, 1.1, "today")
    assert new_threshold(SHARE, [0.98761, 1.0, 1.0], "today").threshold == 0.987
    assert lower([COST], old, {"cost": new_threshold(COST, [2.5, 2.4, 2.3], "today")}) == old
    assert lower([COST], old, {"cost": new_threshold(COST, [1.5, 1.4, 1.3], "today")})["cost"].threshold == 1.5


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="the project's history is not here")
def test_raised_threshold_has_a_note(benchmark: ModuleType, tmp_path: Path) -> None:
    path = table_module.TABLE.relative_to(ROOT)
    commits = git("log", "--format=%H", "--", str(path)).split()
    tables = [table_module.TABLE.read_text(), *(git("show", f"{commit}:{path}") for commit in commits)]
    files = [tmp_path / str(number) for number in range(len(tables))]
    for file, table in zip(files, tables, strict=True):
        file.write_text(table)
    versions = [read_thresholds(file) for file in files]
    for new, old in pairwise(versions):
        for name in new.keys() & old.keys() & benchmark.FIGURES.keys():
            if benchmark.FIGURES[name].is_worse(new[name].threshold, old[name].threshold):
                assert new[name].note not in ("", old[name].note), name


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_thresholds_and_measured_figures_have_the_same_names(benchmark: ModuleType) -> None:
    assert list(read_thresholds()) == list(benchmark.FIGURES)


def test_processor_specific_thresholds_exist_in_the_table_and_have_notes() -> None:
    common = read_thresholds()
    assert thresholds_on("DEFAULT") == common
    own = read_thresholds(table_module.TABLE.with_name("thresholds-avx2.csv"))
    assert thresholds_on("AVX2") == common | own
    assert own.keys() <= common.keys()
    assert all(threshold.note for threshold in own.values())


def test_runs_lower_only_the_thresholds_of_their_processor(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(table_module, "TABLE", tmp_path / "thresholds.csv")
    first, second = list(benchmark.FIGURES)[:2]
    rows = [Threshold(name, 100.0, 99.0, "2025-01-01") for name in (first, second)]
    write_thresholds({row.figure: row for row in rows}, tmp_path / "thresholds.csv")
    write_thresholds({second: rows[1]}, tmp_path / "thresholds-avx2.csv")

    def run_of(processor: str, number: int) -> Path:
        path = tmp_path / f"{processor}{number}.json"
        rounds = {name: [[2.0, 0.0, 1.0, 0.0]] for name in (first, second)}
        path.write_text(json.dumps({"processor": processor, "rounds": rounds}))
        return path

    with pytest.raises(SystemExit, match="of AVX2 and AVX512: thresholds are set by runs of one kind"):
        benchmark.set_thresholds([run_of("AVX2", 0), run_of("AVX512", 0)])
    benchmark.set_thresholds([run_of("AVX2", number) for number in range(3)])
    assert [row.threshold for row in thresholds_on("AVX512").values()] == [2.0, 100.0]
    assert [row.threshold for row in thresholds_on("AVX2").values()] == [2.0, 2.0]


@pytest.mark.parametrize("table", [table_module.TABLE, table_module.table_of("AVX2")], ids=["common", "AVX2"])
def test_threshold_table_is_written_as_it_is_read(table: Path, tmp_path: Path) -> None:
    path = tmp_path / "thresholds.csv"
    write_thresholds(read_thresholds(table), path)
    assert path.read_text() == table.read_text()


CAPTURED: dict[str, Any] = {"missing": {}, "surplus": {}, "dropped": 0, "is_same": True}


@pytest.fixture
def coverage() -> ModuleType:
    # load it by path, since pytest-cov's package has the same name
    path = ROOT / "benchmarks/coverage.py"
    spec = util.spec_from_file_location("coverage_of_models", path)
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_crash_is_attributed_to_the_running_stage(coverage: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(about: dict[str, Any], folder: str, answers: Connection) -> None:
        for part in ({"native": {}}, {"counted": {"is_repeatable": True}}, {"captured": CAPTURED}):
            answers.send(part)
        (Path(folder) / "said.txt").write_text("Segmentation fault\n")
        os._exit(3)

    monkeypatch.setattr(coverage, "PROCESSES", multiprocessing.get_context("fork"))
    monkeypatch.setattr(coverage, "run_in_process", crash)
    outcome = coverage.run_trial({}, 600)
    assert outcome["failed"] == "audited"
    assert outcome["reason"] == "the process ended with status 3: Segmentation fault"
    assert is_native(outcome)
    assert is_whole(outcome)


def test_coverage_page_equals_its_journal(coverage: ModuleType) -> None:
    outcomes = list(coverage.read_journal(coverage.JOURNAL).values())
    available = json.loads(coverage.AVAILABLE.read_text())
    assert (ROOT / "docs/coverage.md").read_text(encoding="utf-8") == page(outcomes, available)


def test_incomplete_last_journal_line_is_replaced(coverage: ModuleType, tmp_path: Path) -> None:
    journal = tmp_path / "outcomes.jsonl"
    outcomes = [{"library": "mmdet", "name": name, "run": "train"} for name in ("dino", "ssd")]
    coverage.append(journal, outcomes[0])
    with journal.open("a") as file:
        file.write(json.dumps(outcomes[1])[:20])
    assert coverage.read_journal(journal) == {"mmdet/dino train": outcomes[0]}
    coverage.append(journal, outcomes[1])
    assert list(coverage.read_journal(journal).values()) == outcomes
