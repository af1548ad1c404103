"""The GPU check and the measurements of a first contact, without a GPU and on the simulated accelerator."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import gpu_check
import pytest
import torch
from gpu import ROOT, captures, modes, times
from gpu.archive import write_archive
from gpu.captures import check_side_stream
from gpu.environment import describe_machine
from gpu.kernels import kernel_names, kernels_in
from gpu.processes import StepProcess, run_step, run_steps
from gpu.profilers import _expect_kernels
from gpu.step import NotHereError, Place, Step, Verdict, WrongError
from gpu.steps import CHECKS, MEASUREMENTS, PLANS, STEP_MODULES, STEPS
from optional import needs
from programs import run_python, wait_for
from simulation import build, environment, on_simulator


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


CHECK = ROOT / "benchmarks/gpu_check.py"
STEP = Step("side stream", check_side_stream)


def simulated_place(folder: Path) -> Place:
    return Place("sim", folder, 1, folder / "facts.jsonl", STEP.name)


@on_simulator()
def test_step_is_ok_on_a_correct_device(tmp_path: Path) -> None:
    outcome = run_step(STEP, simulated_place(tmp_path))
    assert (outcome.verdict, outcome.reason) == (Verdict.OK, "")


@on_simulator()
def test_step_is_wrong_on_a_failing_device(tmp_path: Path) -> None:
    torch.sim.fail("aten::index", "device-side assert triggered")
    outcome = run_step(STEP, simulated_place(tmp_path))
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


SCRIPT = ROOT / "benchmarks/first_contact.py"
CALLS = 16


# code that an interpreter runs at its start so that it cannot import opgrip
NOT_INSTALLED = """
import sys

sys.path[:] = [path for path in sys.path if path not in ({root!r}, {root!r} + "/src")]
"""


def measure(folder: Path, plan: str, only: str = "") -> list[dict[str, Any]]:
    """Run a plan, or some of its steps, without an index in an empty folder where opgrip is not installed; return the
    facts.
    """
    build()
    words = (plan, "--out", folder / "out", "--device", "sim", "--small", "--seconds", 1200)
    variables = environment(PIP_INDEX_URL="http://127.0.0.1:9/", PIP_NO_INDEX="1")
    site = folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(NOT_INSTALLED.format(root=str(ROOT)))
    variables["PYTHONPATH"] = os.pathsep.join([str(site), variables["PYTHONPATH"]])
    run_python("-c", "import opgrip", cwd=folder, env=variables, fresh=True, status=1)
    some = ("--only", only) if only else ()
    run_python(SCRIPT, *words, *some, cwd=folder, env=variables, fresh=True, timeout=1250, status=0)
    return [json.loads(line) for line in (folder / "out/facts.jsonl").read_text().splitlines()]


def ends_of(facts: list[dict[str, Any]]) -> dict[str, str]:
    """Return how each step ended: `ok`, its error, or why it was skipped."""
    ends = [fact for fact in facts if "status" in fact or "skipped" in fact]
    return {fact["stage"]: fact.get("error") or fact.get("skipped") or "ok" for fact in ends}


@pytest.mark.slow
@pytest.mark.timeout(1300)
@needs("transformers")
def test_first_plan_measures_a_model(tmp_path: Path) -> None:
    facts = measure(tmp_path, "first", "facts,clocks,bert")
    assert [fact for fact in facts if "error" in fact and "observer" in fact] == []
    assert {name for name, end in ends_of(facts).items() if end != "ok"} == set()
    calls = [fact for fact in facts if "call" in fact]
    assert len(calls) == CALLS
    assert all(call["events"]["us"] > 0 and call["discrete"]["us"] > 0 for call in calls)
    observers = [fact["observer"] for fact in facts if "observer" in fact and fact["stage"] == "program:bert"]
    assert observers == ["native", "opgrip events", "empty mode", "native again", "profiler cpu", "eto"]
    [trace] = [fact for fact in facts if "trace" in fact and fact["stage"] == "program:bert"]
    assert trace["calls"] > 500
    assert trace["untimed"] < trace["calls"] / 2
    for rows in [fact for fact in facts if "statuses" in fact]:
        assert rows["statuses"].keys() <= {"ok", "contended"}
    [graphs] = [fact for fact in facts if "graphs" in fact and fact["stage"] == "step-graphs:bert"]
    assert graphs["graphs"] > 0
    with zipfile.ZipFile(tmp_path / "out/raw.zip") as archive:
        kept = {"bert.jsonl", "bert-events-by-op.json", "replay-bert.json", "clocks-events.jsonl", "facts.txt"}
        assert kept <= {*archive.namelist()}


@pytest.mark.slow
@pytest.mark.timeout(1300)
@needs("transformers")
def test_second_plan_measures_a_model_and_failures(tmp_path: Path) -> None:
    facts = measure(tmp_path, "second", "llama,failures,roofline,collective")
    on_cuda = {"ncu:llama", "collective"}
    assert {name for name, end in ends_of(facts).items() if end != "ok"} == on_cuda
