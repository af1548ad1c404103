"""Thresholds of benchmarks, and the GPU check without a GPU."""

import json
import platform
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from importlib import util
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import gpu_check
import pytest
import torch
from covering.table import page
from figures import table_of_thresholds as table_module
from figures.figure import Experiment, Figure, Rounds, read_figure
from figures.table_of_thresholds import (
    Threshold,
    judge,
    lower,
    new_threshold,
    read_thresholds,
    thresholds_on,
    write_thresholds,
)
from figures.table_of_thresholds import (
    Verdict as Judgement,
)
from gpu.archive import write_archive
from gpu.captures import check_side_stream
from gpu.environment import describe_machine
from gpu.processes import StepProcess, run_step, run_steps
from gpu.step import NotHereError, Place, Step, Verdict, WrongError
from gpu.steps import STEPS
from programs import ROOT, run_python, wait_for
from simulation import build, environment, on_simulator

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


def verdict(figure: Figure, rounds: Rounds, threshold: float, when_set: float = 2.0) -> Judgement:
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
    assert verdict(COST, STEADY, threshold=1.9) is Judgement.WORSE
    assert verdict(COST, NOISY, threshold=1.9) is Judgement.NOISE
    assert verdict(COST, NOISY, threshold=0.4) is Judgement.WORSE
    assert verdict(COST, STEADY, threshold=2.1) is Judgement.REACHED


def test_threshold_is_a_minimum_if_larger_is_better() -> None:
    assert verdict(SHARE, STEADY, threshold=2.1) is Judgement.WORSE
    assert verdict(SHARE, NOISY, threshold=2.1) is Judgement.NOISE
    assert verdict(SHARE, STEADY, threshold=1.9) is Judgement.REACHED


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


@pytest.mark.parametrize("table", [table_module.TABLE, table_module.table_of("AVX2")], ids=["common", "AVX2"])
def test_threshold_table_is_written_as_it_is_read(table: Path, tmp_path: Path) -> None:
    path = tmp_path / "thresholds.csv"
    write_thresholds(read_thresholds(table), path)
    assert path.read_text() == table.read_text()


CAPTURED: dict[str, Any] = {"missing": {}, "surplus": {}, "dropped": 0, "is_same": True}


def test_coverage_page_equals_its_journal() -> None:
    # load it by path, since pytest-cov's package has the same name
    spec = util.spec_from_file_location("coverage_of_models", ROOT / "benchmarks/coverage.py")
    assert spec is not None
    assert spec.loader is not None
    coverage = util.module_from_spec(spec)
    spec.loader.exec_module(coverage)
    outcomes = list(coverage.read_journal(coverage.JOURNAL).values())
    available = json.loads(coverage.AVAILABLE.read_text())
    assert (ROOT / "docs/coverage.md").read_text(encoding="utf-8") == page(outcomes, available)


def place_in(folder: Path, device: str = "cpu") -> Place:
    return Place(device, folder, top=1, facts=folder / "facts.jsonl", step="planted")


def raising(error: Exception) -> Step:
    def run(place: Place) -> None:
        place.note(us=3, names=["add"])
        raise error

    return Step("planted", run)


@pytest.mark.parametrize(
    ("error", "verdict", "reason"),
    [
        (WrongError("3 us"), Verdict.WRONG, "3 us"),
        (NotHereError("no nsys"), Verdict.NOT_HERE, "no nsys"),
        (ValueError("first\nlast"), Verdict.WRONG, "ValueError: last"),
        (AssertionError(), Verdict.WRONG, "AssertionError: "),
    ],
)
def test_error_of_a_step_determines_its_verdict(
    error: Exception, verdict: Verdict, reason: str, tmp_path: Path
) -> None:
    outcome = run_step(raising(error), place_in(tmp_path))
    assert (outcome.verdict, outcome.reason) == (verdict, reason)
    assert outcome.facts == {"us": 3, "names": ["add"]}


@pytest.mark.slow
def test_step_that_hangs_or_dies_is_wrong(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    place = place_in(tmp_path / "hangs")
    outcome = StepProcess(Step(next(iter(STEPS)), lambda place: None, timeout_s=0.01), place, log).run(60)
    assert (outcome.verdict, outcome.reason) == (Verdict.WRONG, "it exceeded the limit of 0 s")
    outcome = StepProcess(Step("unknown", lambda place: None), place_in(tmp_path / "dies"), log).run(60)
    assert outcome.verdict is Verdict.WRONG
    assert outcome.reason == "its process ended with status 1: KeyError: 'unknown'"


def test_steps_that_need_cuda_or_more_time_are_skipped(tmp_path: Path) -> None:
    on_cuda = Step("on CUDA", lambda place: None, needs_cuda="it reads NVML")
    late = Step("late", lambda place: None, least_s=60)
    outcomes = list(run_steps([on_cuda, late], place_in(tmp_path), 59.9))
    assert [outcome.verdict for outcome in outcomes] == [Verdict.NOT_HERE] * 2
    assert [outcome.reason for outcome in outcomes] == ["it reads NVML", "60 s are left"]
    assert not list(tmp_path.glob("*/"))


def test_make_target_uses_a_python_that_has_cuda_as_it_is(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    words = ["make", "--no-print-directory", "gpu-check", f"PYTHON={python}", "ARGS=--seconds 5"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[1:] == ["benchmarks/gpu_check.py --seconds 5"]
    assert "import torch, opgrip.capture, opgrip.replay" in done.stdout.splitlines()[0]


def test_archive_has_the_end_of_step_logs_without_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "node", lambda: "cluster-17")
    (tmp_path / "a-step.txt").write_text(f"{'x' * gpu_check.MOST_LOG_BYTES}\n{Path.home()}/a.py on cluster-17\n")
    path = tmp_path / "check.zip"
    write_archive(path, gpu_check.texts_of({"machine": describe_machine("cpu")}, tmp_path), ())
    with zipfile.ZipFile(path) as archive:
        assert archive.namelist() == ["check.json", "logs/a-step.txt"]
        log = archive.read("logs/a-step.txt").decode()
        check = json.loads(archive.read("check.json"))
    assert log.endswith("x\n~/a.py on HOST\n")
    assert len(log) <= gpu_check.MOST_LOG_BYTES
    assert check["machine"]["torch"]["version"]


def test_missing_device_skips_the_check(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["gpu_check.py", "--device", "nowhere:0"])
    assert gpu_check.main() == 0
    assert "sees no nowhere:0: nothing is checked" in capsys.readouterr().out


CHECK = ROOT / "benchmarks/gpu_check.py"
STEP = Step("side stream", check_side_stream)


@on_simulator()
def test_step_is_wrong_on_a_failing_device(tmp_path: Path) -> None:
    torch.sim.fail("aten::index", "device-side assert triggered")
    outcome = run_step(STEP, place_in(tmp_path, "sim"))
    assert outcome.verdict is Verdict.WRONG


@pytest.mark.slow
def test_killed_check_keeps_the_completed_steps(tmp_path: Path) -> None:
    build()
    output = tmp_path / "check.zip"
    command = [sys.executable, str(CHECK), "--device", "sim", "--only", "replay *", "-o", str(output)]
    with subprocess.Popen(command, env=environment(), cwd=tmp_path, stdout=subprocess.DEVNULL) as check:
        try:
            wait_for(output.exists, check, seconds=100)
        finally:
            check.kill()
    with zipfile.ZipFile(output) as archive:
        assert archive.testzip() is None
        steps = json.loads(archive.read("check.json"))["steps"]
        assert "logs/replay-on-a-device-without-an-index.txt" in archive.namelist()
    assert [(step["name"], step["verdict"]) for step in steps] == [("replay on a device without an index", "ok")]
    facts = [json.loads(line) for line in (tmp_path / "check.jsonl").read_text().splitlines()]
    assert facts[0]["stage"] == steps[0]["name"]
    assert facts[0]["device"] == steps[0]["facts"]["device"] == "sim:0"


@pytest.mark.slow
def test_no_step_of_some_is_wrong_and_one_archive_contains_all(tmp_path: Path) -> None:
    build()
    output = tmp_path / "check.zip"
    # torch loads the device when an interpreter starts; mmcv has no kernel on it for the trace's first case
    words = ("--device", "sim", "--top", 2, "--only", "*captured*", "-o", output)
    done = run_python(CHECK, *words, env=environment(), fresh=True, timeout=500)
    assert done.stdout.splitlines()[-1] == f"please send back this one file: {output}", done.stderr
    with zipfile.ZipFile(output) as archive:
        steps = json.loads(archive.read("check.json"))["steps"]
        assert sum(name.startswith("logs/") for name in archive.namelist()) >= 3
    assert {step["name"]: step["reason"] for step in steps if step["verdict"] == "wrong"} == {}
    assert sum(step["verdict"] == "ok" for step in steps) >= 2
    assert done.returncode == 0
