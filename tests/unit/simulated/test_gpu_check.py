"""The GPU check on the simulated accelerator: only steps that do not need CUDA are judged."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
import torch
from gpu.captures import check_side_stream
from gpu.processes import outcome_of
from gpu.step import Place, Step, Verdict
from programs import ROOT, run_python
from simulation import build, environment, on_simulator

CHECK = ROOT / "benchmarks/gpu_check.py"
STEP = Step("side stream", check_side_stream)


@on_simulator()
def test_a_step_is_right_on_a_device_that_is(tmp_path: Path) -> None:
    outcome = outcome_of(STEP, Place("sim", tmp_path, 1))
    assert (outcome.verdict, outcome.reason) == (Verdict.OK, "")


@on_simulator()
def test_a_step_is_wrong_on_a_device_that_fails(tmp_path: Path) -> None:
    torch.sim.fail("aten::index", "device-side assert triggered")
    outcome = outcome_of(STEP, Place("sim", tmp_path, 1))
    assert outcome.verdict is Verdict.WRONG


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_steps_are_right_or_not_for_this_device_and_one_file_has_them(tmp_path: Path) -> None:
    build()
    output = tmp_path / "check.zip"
    # torch loads the device when an interpreter starts; mmcv has no kernel on it for the trace's first case
    done = run_python(CHECK, "--device", "sim", "--top", 2, "-o", output, env=environment(), fresh=True, timeout=1700)
    assert done.stdout.splitlines()[-1] == f"please send back this one file: {output}", done.stderr
    with zipfile.ZipFile(output) as archive:
        steps = json.loads(archive.read("check.json"))["steps"]
        assert sum(name.startswith("logs/") for name in archive.namelist()) >= 15
    assert {step["name"]: step["reason"] for step in steps if step["verdict"] == "wrong"} == {}
    assert sum(step["verdict"] == "ok" for step in steps) >= 15
    assert done.returncode == 0
