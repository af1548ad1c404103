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
from opgrip.capture.command.audit import CountDifference, audit, count_calls, differences
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


def test_audit_counts_parts_of_an_operator_missing_from_the_trace(tmp_path: Path) -> None:
    linear, x = torch.nn.Linear(2, 2), torch.ones(1, 2)
    with Capture(tmp_path / "t.jsonl"):
        linear(x)
    assert count_calls(tmp_path / "t.jsonl") == {"aten::t": 1, "aten::addmm": 1}
    assert audit(tmp_path / "t.jsonl", lambda: linear(x)) == []


def test_audit_counts_a_composite_overload_as_its_parts(tmp_path: Path) -> None:
    x = torch.randn(6)

    def step() -> None:
        torch.where(x > 0, x, 0.0)
        torch.where(x > 0)

    with Capture(tmp_path / "t.jsonl"):
        step()
    assert [item for item in audit(tmp_path / "t.jsonl", step) if item.explained is None] == []


def test_audit_explains_autograd_differences_under_a_dispatch_mode(tmp_path: Path) -> None:
    weight = torch.rand(5, 4, requires_grad=True)
    factor = torch.rand(4, requires_grad=True)

    def step() -> None:
        weight.grad = factor.grad = None
        weight.max(dim=0).values.sum().backward()
        scaled = weight * 2
        scaled.mul_(factor)
        (scaled.sum() * torch.tensor([weight.detach()[0, 0], weight.detach()[0, 1]]).sum()).backward()

    with Capture(tmp_path / "t.jsonl"):
        step()
    found = {item.op: item for item in audit(tmp_path / "t.jsonl", step)}
    assert {"aten::zeros", "aten::new_zeros", "aten::clone", "aten::_local_scalar_dense"} <= found.keys()
    assert [item for item in found.values() if item.explained is None] == []


def test_audit_does_not_count_printing_of_tensors(tmp_path: Path) -> None:
    def step() -> None:
        str(torch.arange(2000.0))
        repr(torch.eye(3))

    with Capture(tmp_path / "t.jsonl"):
        step()
    printing = torch.Tensor.__repr__
    assert not audit(tmp_path / "t.jsonl", step)
    assert torch.Tensor.__repr__ is printing


def test_audit_counts_forms_of_an_operator_together() -> None:
    found = differences({"aten::add_": 3, "aten::sin": 1}, {"aten::add": 1, "aten::add_": 2, "aten::sin": 1})
    assert {(item.op, item.torch_calls, item.trace_calls) for item in found} == {
        ("aten::add_", 3, 2),
        ("aten::add", 0, 1),
    }
    assert all(item.explained for item in found)


@pytest.mark.slow
def test_audit_command_prints_the_differences(tmp_path: Path) -> None:
    done = succeed("opcapture", "--audit", *SMALL, "-o", tmp_path / "t.jsonl")
    assert re.search(
        r"audit: aten::to: torch counts \d+, the trace 0: a composite operator that called no other", done.stderr
    )
    assert "without an explanation" in done.stderr.splitlines()[-1]
    assert ", 0 without" in done.stderr.splitlines()[-1]
    assert run_command("opcapture", "--audit", "-o", "-").returncode == 2
