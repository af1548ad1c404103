"""Tests of the audit that names operators which torch counts and a trace lacks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from openmmlab_models import NARROW
from optional import needs, optional
from programs import run_command, succeed
from shortened import slow_except
from small_models import SMALL_PROGRAMS, TRANSFORMERS_PROGRAMS, SmallProgram

from opgrip.capture import Capture
from opgrip.capture.command.audit import CountDifference, audit
from opgrip.capture.models import load_program
from opgrip.capture.models.sources import ModelOptions


def audit_model(path: Path, source: str, options: ModelOptions) -> list[CountDifference]:
    def build() -> tuple[object, object]:
        torch.manual_seed(0)
        program = load_program(source, options)
        return program, program.inputs()

    program, inputs = build()
    with Capture(path, model=program.model):  # type: ignore[attr-defined]
        program.step(inputs)  # type: ignore[attr-defined]
    program, inputs = build()
    return audit(path, lambda: program.step(inputs))  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("run", ["predict", "train"])
def test_audit_explains_every_difference_of_the_builtin_detector(tmp_path: Path, run: str) -> None:
    options = ModelOptions(run=run, input_size=(64, 64), batch_size=1)
    found = audit_model(tmp_path / "t.jsonl", "builtin:faster_rcnn", options)
    assert found
    assert [item for item in found if item.explained is None] == []


@needs("mmdet")
@pytest.mark.slow
@pytest.mark.parametrize("run", ["predict", "train"])
@pytest.mark.parametrize("source", NARROW)
def test_audit_explains_every_difference_of_openmmlab_detectors(tmp_path: Path, source: str, run: str) -> None:
    options = ModelOptions(run=run, input_size=(64, 64), cfg_options=NARROW[source])
    found = audit_model(tmp_path / "t.jsonl", source, options)
    assert [item for item in found if item.explained is None] == []


SMALL = ("--input-size", "64", "--batch-size", "1")
# docs/capture.md explains these two, which the command cannot infer from the counts
APART = ("activation checkpointing", "per-sample gradients")
AUDITED_ABOVE = ("detector",)
AUDITED = sorted({*SMALL_PROGRAMS, *TRANSFORMERS_PROGRAMS} - {*APART, *AUDITED_ABOVE})


@pytest.mark.parametrize("run", ["train", pytest.param("predict", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name",
    # importing transformers takes three seconds; `test_unchanged_programs.py` counts the operators of one of its models
    slow_except([name for name in AUDITED if name not in TRANSFORMERS_PROGRAMS], AUDITED),
)
def test_audit_explains_every_difference_of_small_models(tmp_path: Path, name: str, run: str) -> None:
    if name in TRANSFORMERS_PROGRAMS:
        optional("transformers")
    build = {**SMALL_PROGRAMS, **TRANSFORMERS_PROGRAMS}[name]

    def step(program: SmallProgram) -> None:
        program.model.train(run == "train")
        with torch.set_grad_enabled(run == "train"):
            getattr(program, run)()

    torch.manual_seed(0)
    with Capture(tmp_path / "t.jsonl", model=(program := build()).model):
        step(program)
    torch.manual_seed(0)
    again = build()
    found = audit(tmp_path / "t.jsonl", lambda: step(again))
    assert [item for item in found if item.explained is None] == []


def test_audit_names_operators_that_a_capture_misses(tmp_path: Path) -> None:
    x = torch.ones(3)
    with Capture(tmp_path / "t.jsonl"):
        x.sin()
    (missed,) = audit(tmp_path / "t.jsonl", lambda: (x.sin(), x.cos()))
    assert missed == CountDifference("aten::cos", 1, 0)


@pytest.mark.slow
def test_audit_command_prints_the_differences(tmp_path: Path) -> None:
    done = succeed("opcapture", "--audit", *SMALL, "-o", tmp_path / "t.jsonl")
    assert re.search(
        r"audit: aten::to: torch counts \d+, the trace 0: a composite operator that called no other", done.stderr
    )
    assert "without an explanation" in done.stderr.splitlines()[-1]
    assert ", 0 without" in done.stderr.splitlines()[-1]
    assert run_command("opcapture", "--audit", "-o", "-").returncode == 2
