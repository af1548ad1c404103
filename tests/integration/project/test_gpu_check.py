"""Tests of the GPU check that work without a GPU: the outcome of its steps, and the files that it leaves."""

from __future__ import annotations

import json
import platform
import subprocess
import zipfile
from pathlib import Path

import gpu_check
import pytest
from gpu import ROOT, captures, modes, times
from gpu.archive import write_archive
from gpu.environment import describe_machine
from gpu.kernels import kernel_names, kernels_in
from gpu.processes import StepProcess, run_step, run_steps
from gpu.profilers import _expect_kernels
from gpu.step import NotHereError, Place, Step, Verdict, WrongError
from gpu.steps import CHECKS, MEASUREMENTS, PLANS, STEP_MODULES, STEPS


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


def test_steps_about_times_and_captures_come_first() -> None:
    names = [step.name for step in (*times.STEPS, *captures.STEPS)]
    assert [*CHECKS][: len(names)] == names
    # of other compilers and runtimes, the check reports only that they start
    assert [*CHECKS][-len(modes.STEPS) :] == [step.name for step in modes.STEPS]


def test_make_target_uses_a_python_that_has_cuda_as_it_is(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    words = ["make", "--no-print-directory", "gpu-check", f"PYTHON={python}", "ARGS=--seconds 5"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[1:] == ["benchmarks/gpu_check.py --seconds 5"]
    assert "import torch, opgrip.capture, opgrip.replay" in done.stdout.splitlines()[0]


def test_plan_captures_a_model_before_replaying_it() -> None:
    for plan in PLANS.values():
        captured = set()
        for step in plan:
            kind, _, model = step.name.partition(":")
            model = model.partition("-")[0]
            if kind in ("program", "trace"):
                captured.add(model)
            elif kind in ("replay", "sequence", "graph", "modes", "ncu"):
                assert model in captured
    assert not MEASUREMENTS.keys() & CHECKS.keys()


def test_step_names_are_unique() -> None:
    assert len(CHECKS) == sum(len(module.STEPS) for module in STEP_MODULES)
    assert len({step.slug for step in STEPS.values()}) == len(STEPS)


def test_timeline_kernels_are_sorted_by_time() -> None:
    events = [
        {"cat": "kernel", "name": "second", "ts": 20.5, "dur": 3},
        {"cat": "cpu_op", "name": "aten::add", "ts": 1, "dur": 9},
        {"cat": "kernel", "name": "first", "ts": 10, "dur": 2.5},
        {"cat": "gpu_memcpy", "name": "Memcpy", "ts": 15, "dur": 1},
        {"name": "process_name", "ph": "M"},
    ]
    kernels = kernels_in({"traceEvents": events})
    assert [(kernel.name, kernel.us) for kernel in kernels] == [("first", 2.5), ("second", 3.0)]
    assert kernel_names(kernels) == {"first": 1, "second": 1}


def test_kernel_unknown_to_another_profiler_is_wrong() -> None:
    names = {"void at::native::reduce_kernel<512, 1>(float)": 1}
    _expect_kernels("reduce_kernel x1", names)
    with pytest.raises(WrongError, match="gemm_f32"):
        _expect_kernels("reduce_kernel x1; gemm_f32 x0.5", names)
    with pytest.raises(WrongError, match="no kernels"):
        _expect_kernels(None, names)


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
