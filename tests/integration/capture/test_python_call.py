"""Tests of the Python function that captures a model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from programs import TinyNet

from opgrip.capture import capture
from opgrip.replay import replay
from opgrip.traces import UserError

INPUTS = (torch.ones(2, 3, 8, 8), torch.zeros(2, 6, dtype=torch.long))


def test_module_is_captured_and_its_trace_replayed(tmp_path: Path) -> None:
    model = TinyNet()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trace = capture(model, tmp_path / "t.jsonl", INPUTS, steps=2)
    assert trace.header["model"]["name"] == "tinynet"
    assert trace.header["steps"] == 2
    assert set(trace.calls["phase"]) == {"forward"}
    assert set(trace.calls["module"]) >= {"features.0", "head"}
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(row.status == "ok" for row in replay(tmp_path / "t.jsonl", top=2, iterations=1))


def test_frozen_layer_stays_frozen(tmp_path: Path) -> None:
    model = TinyNet()
    model.features[0].eval()
    capture(model, tmp_path / "t.jsonl", INPUTS)
    assert model.training
    assert not model.features[0].training
    assert all(module.training for module in model.features[1:])


def test_training_step_of_a_module_has_three_phases(tmp_path: Path) -> None:
    trace = capture(TinyNet(), tmp_path / "t.jsonl", dict(zip(("images", "words"), INPUTS, strict=True)), run="loss")
    assert set(trace.calls["phase"]) == {"forward"}
    trace = capture(TinyNet(), tmp_path / "train.jsonl", INPUTS, run="train")
    assert set(trace.calls["phase"]) == {"forward", "backward", "optimizer"}


def test_invalid_arguments_are_reported_in_python_terms(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with pytest.raises(UserError, match="a module needs inputs"):
        capture(TinyNet(), path)
    with pytest.raises(UserError, match="batch_size= cannot be used with a module"):
        capture(TinyNet(), path, INPUTS, batch_size=3)
    with pytest.raises(TypeError, match="unexpected keyword argument 'step': did you mean 'steps'"):
        capture(TinyNet(), path, INPUTS, step=3)
    with pytest.raises(UserError, match="tinynet fails while it runs a step"):
        capture(TinyNet(), path, INPUTS[:1])
    assert not path.exists()
    path.write_text("mine")
    with pytest.raises(FileExistsError, match="force="):
        capture(TinyNet(), path, INPUTS)
    assert path.read_text() == "mine"
    with pytest.raises(UserError, match="no parameters to train: choose run="):
        capture(torch.nn.Softmax(dim=0), tmp_path / "other.jsonl", torch.ones(3), run="train")


def test_functions_and_extensions_are_given_as_a_list_or_a_string(tmp_path: Path) -> None:
    names = ["programs:TinyNet.forward", "torch.nn.modules.linear:Linear.forward"]
    for grip in (names, names[0]):
        options = {"grip": grip, "grip_to": tmp_path / "samples", "extension": ["math"], "force": True}
        trace = capture(TinyNet(), tmp_path / "t.jsonl", INPUTS, **options)
        gripped = {item.op for item in trace.signatures if item.kind == "function"}
        assert len(gripped) == (2 if grip is names else 1)
