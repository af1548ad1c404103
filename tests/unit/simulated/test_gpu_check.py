"""The GPU check on the simulated accelerator: only steps that do not need CUDA are judged."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from gpu.captures import check_side_stream
from gpu.processes import run_step
from gpu.step import Place, Step, Verdict
from programs import ROOT, run_python, wait_for
from simulation import build, environment, on_simulator

CHECK = ROOT / "benchmarks/gpu_check.py"
STEP = Step("side stream", check_side_stream)


def place_in(folder: Path) -> Place:
    return Place("sim", folder, 1, folder / "facts.jsonl", STEP.name)


@on_simulator()
def test_step_is_ok_on_a_correct_device(tmp_path: Path) -> None:
    outcome = run_step(STEP, place_in(tmp_path))
    assert (outcome.verdict, outcome.reason) == (Verdict.OK, "")


@on_simulator()
def test_step_is_wrong_on_a_failing_device(tmp_path: Path) -> None:
    torch.sim.fail("aten::index", "device-side assert triggered")
    outcome = run_step(STEP, place_in(tmp_path))
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
