"""Tests of gradients under --backward for calls whose source does not record which tensors require them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from foreign_data import write_as
from optional import optional

from opgrip.capture import Capture
from opgrip.replay.results.results import Result
from opgrip.replay.run.preparation import prepare
from opgrip.replay.run.request import RunRequest
from opgrip.replay.run.workload import load_workload
from opgrip.replay.timing.timing_options import Effort, TimingOptions
from opgrip.traces import Trace, load
from opgrip.traces.io.foreign_files import Losses, formats

RELU, MATRIX = "aten.relu.default", "aten.mm.default"


def backward_rows(target: str) -> dict[str, Result]:
    """Return the backward row of each operator, prepared but not timed."""
    plan = RunRequest(timing=TimingOptions(backward=True), effort=Effort(warmup=0))
    loaded = load_workload(replace(plan, trace=str(target)))
    rows = [row for case in loaded.cases for _, row, _ in prepare(case, loaded)]
    assert all(row.status == "ok" for row in rows if row.direction == "forward"), rows
    return {row.op: row for row in rows if row.direction == "backward"}


def captured(folder: Path) -> Trace:
    """Return the trace of a program that needs no gradients."""
    weight = torch.randn(8, 8)
    with Capture(folder / "own.jsonl", force=True), torch.no_grad():
        (torch.randn(4, 8) @ weight).relu().argmax(-1)
        torch.ones(2, dtype=torch.complex64).exp()
    return load(folder / "own.jsonl")


def written(name: str) -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        write_as(name, captured(folder), folder / "file")
        return str(folder / "file")

    return write


def flashinfer(folder: Path) -> str:
    format_ = formats.get("flashinfer")
    assert format_ is not None
    assert format_.write_folder is not None
    (folder / "dataset").mkdir()
    format_.write_folder(captured(folder), folder / "dataset", Losses())
    return str(folder / "dataset")


def table(folder: Path) -> str:
    (folder / "relu.json").write_text(json.dumps({"input_size": [[2, 3]]}), encoding="utf-8")
    return str(folder / "relu.json")


def profile(folder: Path) -> str:
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler, torch.no_grad():
        (torch.randn(4, 8) @ torch.randn(8, 8)).relu()
    profiler.export_chrome_trace(str(folder / "profile.json"))
    return str(folder / "profile.json")


def onnx(folder: Path) -> str:
    onnx = optional("onnx")
    helper, proto = optional("onnx.helper"), onnx.TensorProto
    values = [helper.make_tensor_value_info(name, proto.FLOAT, [2, 3]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "relu", values[:1], values[1:])
    onnx.save(helper.make_model(graph), folder / "relu.onnx")
    return str(folder / "relu.onnx")


@pytest.mark.parametrize(
    "make",
    [
        *map(written, ("tritonbench", "execution_trace", "chakra", "backendbench")),
        *(flashinfer, table, profile, onnx),
    ],
    ids=["tritonbench", "execution_trace", "chakra", "backendbench", "flashinfer", "dlop", "chrome", "onnx"],
)
def test_files_without_requires_grad_have_backward_rows(make: Callable[[Path], str], tmp_path: Path) -> None:
    if make is not flashinfer:
        assert backward_rows(make(tmp_path))[RELU].status == "ok"
    else:
        assert backward_rows(make(tmp_path))[MATRIX].status == "ok"


def test_captures_record_which_tensors_require_gradients(tmp_path: Path) -> None:
    captured(tmp_path)
    assert backward_rows(str(tmp_path / "own.jsonl"))[RELU].error == "no argument required a gradient"


def test_backward_does_not_change_case_keys(tmp_path: Path) -> None:
    path = written("tritonbench")(tmp_path)
    keys = [
        {case.key for case in load_workload(replace(plan, trace=str(path))).cases}
        for plan in (RunRequest(), with_backward())
    ]
    assert keys[0] == keys[1]


def with_backward() -> RunRequest:
    return RunRequest(timing=TimingOptions(backward=True))


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("aten.argmax.default|((T([2, 3], f32),), {})", "not differentiable: its results have no gradient"),
        ("aten.floor_divide.default|((T([2], f32), T([2], f32)), {})", "not differentiable: no derivative of it"),
        ("aten.add.Tensor|((T([2], i64), T([2], i64)), {})", "not differentiable: it has no floating-point tensor"),
        ("aten.relu_.default|((T([2], f32),), {})", "writes into its arguments"),
        ("aten.igammac.default|((T([2], f32), T([2], f32)), {})", "not differentiable: the derivative for"),
        ("aten.view.default|((T([2, 3], f32), [6]), {})", None),
    ],
)
def test_operator_without_gradients_reports_the_reason(call: str, reason: str | None, tmp_path: Path) -> None:
    op, _, arguments = call.partition("|")
    (tmp_path / "inputs.txt").write_text(f"Operator: {op}\ncnt: 1, {arguments}\n", encoding="utf-8")
    row = backward_rows(str(tmp_path / "inputs.txt"))[op]
    assert row.status == ("ok" if reason is None else "unsupported")
    assert reason is None or reason in str(row.error)


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        (
            "aten.native_batch_norm.default",
            "T([2, 3, 4, 4], f32), None, None, T([3], f32), T([3], f32), False, 0.1, 1e-05",
        ),
        ("aten.nll_loss_forward.default", "T([4, 5], f32), T([4], i64), T([5], f32), 1, -100"),
    ],
)
def test_argument_without_a_derivative_requires_no_gradient(op: str, arguments: str, tmp_path: Path) -> None:
    (tmp_path / "inputs.txt").write_text(f"Operator: {op}\ncnt: 1, (({arguments}), {{}})\n", encoding="utf-8")
    assert backward_rows(str(tmp_path / "inputs.txt"))[op].status == "ok"
