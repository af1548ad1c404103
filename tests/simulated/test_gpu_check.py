"""The check of a GPU, on the simulated accelerator: steps that need no CUDA are judged there."""

from __future__ import annotations

import json
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
from programs import ROOT, run_python
from simulation import build, environment

CHECK = ROOT / "benchmarks/gpu_check.py"


def check(output: Path, *options: object, **variables: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """The check's own words, and each step by name."""
    build()
    words = ("--device", "sim", "--top", 1, "-o", output, *options)
    done = run_python(CHECK, *words, env=environment(**variables), fresh=True, timeout=900)
    assert output.exists(), done.stderr
    with zipfile.ZipFile(output) as archive:
        steps = json.loads(archive.read("check.json"))["steps"]
    return done, {step["name"]: step for step in steps}


def test_a_step_is_right_and_the_last_line_names_the_file(tmp_path: Path) -> None:
    done, steps = check(tmp_path / "check.zip", "--only", "*side stream*")
    assert done.returncode == 0, done.stdout
    assert [step["verdict"] for step in steps.values()] == ["ok"]
    assert done.stdout.splitlines()[-1] == f"please send back this one file: {tmp_path / 'check.zip'}"


@pytest.mark.slow
def test_a_step_on_a_device_that_fails_is_wrong(tmp_path: Path) -> None:
    failure = {"SIM_FAIL": "aten::index=device-side assert triggered"}
    done, steps = check(tmp_path / "check.zip", "--only", "*side stream*", **failure)
    assert done.returncode == 1
    assert [step["verdict"] for step in steps.values()] == ["wrong"]


@pytest.mark.slow
def test_all_steps_are_right_or_not_for_this_device(tmp_path: Path) -> None:
    done, steps = check(tmp_path / "check.zip")
    wrong = {name: step["reason"] for name, step in steps.items() if step["verdict"] == "wrong"}
    assert not wrong
    assert done.returncode == 0
    right = [name for name, step in steps.items() if step["verdict"] == "ok"]
    assert len(right) >= 15, done.stdout
