"""Tests of the GPU check that work without a GPU: the outcome of its steps, and the files that it leaves."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import zipfile
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_check
import pandas as pd
import pytest
import torch
from gpu import ROOT, captures, kernels, modes, processes, times
from gpu.archive import write_archive
from gpu.environment import describe_machine
from gpu.kernels import Kernel, kernel_names, kernels_in
from gpu.modes import check_runtime
from gpu.processes import StepProcess, run_step, run_steps
from gpu.profilers import _expect_kernels
from gpu.reports import NSYS, cut, keep_small, small_reports
from gpu.step import NotHereError, Place, Step, Verdict, WrongError, expect, expect_between, read_facts
from gpu.steps import CHECKS, MEASUREMENTS, PLANS, STEP_MODULES, STEPS
from nsys_reports import NsysStandIn, write_report

from opgrip.replay.analyses.nsys_report import read_report


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


def test_value_out_of_bounds_or_nan_is_wrong() -> None:
    expect_between(2.0, 1.0, 2.0, "the time")
    for value in (0.9, 2.1, float("nan")):
        with pytest.raises(WrongError, match=r"the time is .*, not between 1 and 2"):
            expect_between(value, 1.0, 2.0, "the time")
    with pytest.raises(WrongError, match="nothing"):
        expect([], "nothing")


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


@pytest.mark.slow
def test_next_step_imports_while_one_runs(tmp_path: Path) -> None:
    steps = [CHECKS[name] for name in ("capture on two devices", "replay on the second device")]
    outcomes = list(run_steps(steps, place_in(tmp_path), 100, imports_ahead=True))
    assert [outcome.name for outcome in outcomes] == [step.name for step in steps]
    assert {(outcome.verdict, outcome.reason) for outcome in outcomes} == {(Verdict.NOT_HERE, "there is one device")}


def test_context_is_held_while_steps_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran, released = tmp_path / "ran", tmp_path / "released"
    hold = f"import os, sys; sys.stdin.read(); open({str(released)!r}, 'w').write(str(os.path.exists({str(ran)!r})))"
    monkeypatch.setattr(processes, "HOLD", hold)
    late = Step("late", lambda place: None, least_s=60)
    for _ in run_steps([late], place_in(tmp_path, "cuda"), 1):
        ran.touch()
    assert released.read_text() == "True"


def test_limit_fits_a_command_of_ten_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["gpu_check.py"])
    assert gpu_check.parse_arguments().seconds <= 600


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


def test_step_names_with_leading_dashes_can_be_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    for words in (["--only", "--sequence"], ["--only=--sequence"]):
        monkeypatch.setattr("sys.argv", ["gpu_check.py", *words, "--seconds", "60"])
        args = gpu_check.parse_arguments()
        assert (args.only, args.seconds) == ("--sequence", 60)


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


def test_runtime_without_cuda_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    of_cpu = SimpleNamespace(get_available_providers=lambda: ["CPUExecutionProvider"])
    monkeypatch.setitem(sys.modules, "onnxruntime", of_cpu)
    for name in ("onnxruntime", "tensorrt"):
        with pytest.raises(NotHereError, match="install onnxruntime-gpu"):
            check_runtime(name)
    monkeypatch.setattr("gpu.modes.is_installed", lambda name: False)
    with pytest.raises(NotHereError, match=r"jax\[cuda12\]"):
        check_runtime("jax")
    check_runtime("compile")


def test_tf32_mode_is_compared_with_tf32_eager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    precisions: list[str] = []

    def rows_of(place: Place, trace: str, mode: list[str], timeout: int) -> list[SimpleNamespace]:
        precisions.append(trace)
        return [
            SimpleNamespace(
                op="aten.mm.default", mode=mode[0], status="ok", error="", median_us=1.0, note="", max_abs=0.0
            )
        ]

    monkeypatch.setattr(modes, "find_mode", lambda name: (SimpleNamespace(in_graphs=False), ""))
    monkeypatch.setattr(modes, "check_runtime", lambda name: None)
    # the replay must set the precision that the capture sees
    monkeypatch.setattr(modes, "capture_layers", lambda place: torch.get_float32_matmul_precision())
    monkeypatch.setattr(modes, "replay_rows", rows_of)
    for name in ("tensorrt", "onnxruntime"):
        modes.check_mode(place_in(tmp_path), name)
    assert precisions == ["high", "highest"]


def test_kernel_times_are_compared_with_the_profiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {"aten.mm.default": ("gemm", 300_000), "aten.add.Tensor": ("add", 1_500)}
    calls = pd.DataFrame({"op": list(seen), "device_ns": [float(ns) for _, ns in seen.values()]})
    kernels = pd.DataFrame({"op": list(seen), "kernel": [name for name, _ in seen.values()]})
    trace = SimpleNamespace(calls=calls, kernels_by_operator=lambda: kernels)
    expected = iter([("gemm", 310.0), ("add", 1.2)])

    def next_kernel(run: object) -> list[Kernel]:
        name, us = next(expected)
        return [Kernel(name, 0.0, us)]

    monkeypatch.setattr(times, "kernels_of", next_kernel)
    monkeypatch.setattr(times, "kernel_us", lambda run: 310.0 if run().numel() > 1 else 1.2)
    monkeypatch.setattr(times, "Capture", lambda path, device_time: nullcontext(SimpleNamespace(dropped=0)))
    monkeypatch.setattr(times, "load", lambda path, partial: trace)
    place = place_in(tmp_path)
    times.check_times_of_kernels(place)
    facts = read_facts(place.facts, place.step)
    assert (facts["aten.mm.default"], facts["aten.add.Tensor"]) == (300.0, 1.5)
    expected = iter([("gemm", 310.0), ("mul", 1.2)])
    with pytest.raises(WrongError, match=r"the kernels \['add'\] of aten.add.Tensor, not \['mul'\]"):
        times.check_times_of_kernels(place_in(tmp_path))


def test_step_names_are_unique() -> None:
    assert len(CHECKS) == sum(len(module.STEPS) for module in STEP_MODULES)
    assert len({step.slug for step in STEPS.values()}) == len(STEPS)


@pytest.mark.parametrize("measure", [kernels.kernels_of, kernels.work_of])
def test_clocks_are_raised_before_reference_times_are_taken(measure: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    order = list[str]()

    def warm_up(device: str, seconds: float) -> None:
        assert seconds > 0
        order.append(device)

    def run() -> None:
        order.append("run")
        raise NotHereError("the first run")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(kernels, "warm_up", warm_up)
    with pytest.raises(NotHereError, match="the first run"):
        measure(run)
    assert order == ["cuda:0", "run"]


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


def test_report_excerpt_has_everything_that_opgrip_reads(tmp_path: Path) -> None:
    kernel = {"start": 210, "end": 220, "correlationId": 1, "name": "reduce_kernel"}
    path = write_report(tmp_path / "whole", [(200, 300, "aten.sum.default", 7)], [(205, 1)], {"KERNEL": [kernel]})
    cut(path, tmp_path / "cut.sqlite")
    whole, excerpt = read_report(path), read_report(tmp_path / "cut.sqlite")
    assert whole.work
    assert (excerpt.spans, excerpt.work) == (whole.spans, whole.work)


def test_small_report_is_included_with_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_report(tmp_path / "whole", [(200, 300, "aten.sum.default", 7)])
    stand_in = NsysStandIn(tmp_path / "bin", [path])
    monkeypatch.setenv("PATH", f"{stand_in.binary.parent}:/usr/bin:/bin")
    step = tmp_path / "steps" / "nsys-step"
    step.mkdir(parents=True)
    (step / "nsys.nsys-rep").write_bytes(path.read_bytes())
    (step / "nsys.json").write_text("{}")
    keep_small(NSYS, step)
    assert [path.name for path in small_reports(step.parent)] == ["nsys.sqlite", "nsys.json"]
    assert read_report(step / "nsys.sqlite").spans


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
