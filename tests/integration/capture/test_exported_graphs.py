"""Captures of programs saved by torch.export, and of GraphNet samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from opgrip.capture.start import main
from opgrip.replay import replay
from opgrip.traces import load
from opgrip.traces.values.exact import Exact


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, words: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.head(self.words(words)).clamp(max=1.5) * scale, -1)


def save(path: Path, with_inputs: bool = True) -> Path:
    program = torch.export.export(Words(), (torch.tensor([7, 9, 3]),), {"scale": torch.ones(1)})
    if not with_inputs:
        program.example_inputs = None
    torch.export.save(program, path)
    return path


def capture(source: object, folder: Path, *options: str) -> Path:
    trace = folder / "trace.jsonl"
    assert main(["--model", str(source), "-o", str(trace), "--steps", "1", "--warmup", "0", *options]) == 0
    return trace


@pytest.mark.parametrize("run", ["predict", pytest.param("train", marks=pytest.mark.slow)])
def test_exported_program_is_recorded_with_values_and_times(run: str, tmp_path: Path) -> None:
    trace = load(path := capture(save(tmp_path / "words.pt2"), tmp_path, "--run", run))
    operators = set(trace.calls["op"])
    assert {"aten.embedding.default", "aten.addmm.default", "aten._softmax.default"} <= operators
    assert ("aten.embedding_dense_backward.default" in operators) == (run == "train")
    assert (trace.calls["duration_ns"] > 0).all()
    (embedding,) = (item for item in trace.signatures if item.op == "aten.embedding.default")
    assert trace.values[embedding.args[1].values] == Exact([7, 9, 3])
    assert trace.header["model"]["name"] == "words"
    assert {row.status for row in replay(path, iterations=1)} == {"ok"}


def test_inputs_that_the_file_lacks_are_made_from_its_placeholders(tmp_path: Path) -> None:
    trace = load(capture(save(tmp_path / "words.pt2", with_inputs=False), tmp_path))
    (embedding,) = (item for item in trace.signatures if item.op == "aten.embedding.default")
    assert embedding.args[1].shape == (3,)


MODEL = """\
import torch

from torch import device


class GraphModule(torch.nn.Module):
    def forward(self, L_x_ : torch.Tensor, L_w_ : torch.nn.Parameter, L_ids_ : torch.Tensor, s1 : torch.SymInt):
        l_x_ = L_x_
        out = torch.conv2d(l_x_, L_w_, None, (1, 1), (1, 1), (1, 1), 1);  l_x_ = L_w_ = None
        out += 1;  out_1 = out;  out = None
        flat = out_1.flatten(2)[(Ellipsis, slice(None, s1, None))];  out_1 = None
        table = torch.arange(4, device=device(type='cuda', index=0)).view(1, 4)
        rows = flat[(slice(None, None, None), L_ids_)];  L_ids_ = None
        return (rows + table.to('cuda:0'), flat)
"""


def meta(name: str, shape: list[int], **facts: Any) -> str:
    facts = {"name": name, "shape": shape, "dtype": "torch.float32", "device": "cuda:0", **facts}
    return f"class Program_weight_tensor_meta_{name}:\n" + "".join(f"\t{key} = {facts[key]!r}\n" for key in facts)


WEIGHTS = (
    meta("L_x_", [2, 3, 8, 8], mean=0.5, std=0.1, data=None)
    + meta("L_w_", [4, 3, 3, 3], mean=1.0, std=0.0, data=None)
    + meta("L_ids_", [3], dtype="torch.int64", mean=None, std=None, min_val=2, max_val=2)
    + meta("s1", [], dtype="torch.int64", device="cpu", data=[4])
)


def sample(folder: Path, **files: str) -> Path:
    folder.mkdir()
    files = {"model": MODEL, "weight_meta": WEIGHTS, "input_meta": "", **files}
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    (folder / "graph_net.json").write_text(json.dumps({"framework": "torch", "model_name": "small"}))
    return folder


@pytest.mark.parametrize("run", ["predict", pytest.param("train", marks=pytest.mark.slow)])
def test_graphnet_sample_is_recorded_with_values_and_times(run: str, tmp_path: Path) -> None:
    trace = load(path := capture(sample(tmp_path / "small"), tmp_path, "--run", run))
    signatures = {item.op: item for item in trace.signatures}
    image, weight = (trace.values[tensor.values] for tensor in signatures["aten.convolution.default"].args[:2])
    assert (image.mean, image.std) == (pytest.approx(0.5, abs=0.02), pytest.approx(0.1, abs=0.02))
    assert weight.value == 1.0
    assert trace.values[signatures["aten.index.Tensor"].args[1][1].values] == Exact([2, 2, 2])
    assert "aten.slice.Tensor" in signatures
    assert ("aten.convolution_backward.default" in signatures) == (run == "train")
    assert (trace.calls["duration_ns"] > 0).all()
    convolution = trace.calls[trace.calls["op"] == "aten.convolution.default"].iloc[0]
    assert (convolution["file"], convolution["line"]) == ("model.py", 9)
    assert {row.status for row in replay(path, iterations=1)} == {"ok"}


@pytest.mark.parametrize(
    ("name", "files", "words"),
    [
        ("small", {"model": ""}, "defines no GraphModule"),
        ("small", {"model": "import missing_package"}, "model.py fails when it is run at model.py:1"),
        ("small", {"weight_meta": WEIGHTS.replace("float32", "float33")}, "describes the tensor L_x_ wrongly"),
        ("small", {"graph_net": '{"framework": "paddle"}'}, "is a sample for paddle"),
        ("", {}, "is not a GraphNet sample: it has no model.py"),
        ("foreign.pt2", {}, "is not a program that torch.export can load"),
        ("foreign.pt2 --batch-size 2", {}, "--batch-size does not apply"),
    ],
)
def test_damaged_or_foreign_graph_is_refused_in_one_line(
    name: str, files: dict[str, str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "foreign.pt2").write_bytes(b"PK no archive")
    folder = sample(tmp_path / "small", **{key: text for key, text in files.items() if key != "graph_net"})
    if "graph_net" in files:
        (folder / "graph_net.json").write_text(files["graph_net"])
    path, *options = name.split(" ")
    assert main(["--model", str(tmp_path / path), "-o", str(tmp_path / "trace.jsonl"), *options]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("error:") == 1
    assert "Traceback" not in error
