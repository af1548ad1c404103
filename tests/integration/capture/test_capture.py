"""Tests of the contents of a capture, and of a program's independence from it."""

from __future__ import annotations

import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import captured
from torch import nn

from opgrip.capture import Capture
from opgrip.capture.signatures import fitting
from opgrip.traces import Trace, load, read
from opgrip.traces.schema.arguments import GeneratorSpec, TensorSpec


def ops(trace: Trace) -> list[str]:
    return trace.calls["op"].astype(str).tolist()


def test_calls_have_their_module_and_phase(tiny_trace: Path) -> None:
    calls = load(tiny_trace).calls
    places = {(row.op, row.module, row.phase) for row in calls.itertuples()}
    assert ("aten.convolution.default", "features.0", "forward") in places
    assert ("aten.embedding.default", "embedding", "forward") in places
    assert ("aten.addmm.default", "head", "forward") in places
    assert ("aten.mean.dim", "", "forward") in places
    assert {row.phase for row in calls.itertuples() if row.op == "aten.convolution_backward.default"} == {"backward"}
    assert {row.phase for row in calls.itertuples() if row.op == "aten.mul_.Tensor"} == {"optimizer"}
    assert set(calls["thread"]) == {"MainThread"}
    assert (calls["duration_ns"] > 0).all()
    assert calls["start_ns"].is_monotonic_increasing


def test_thousands_of_calls_share_a_signature(tmp_path: Path) -> None:
    x = torch.ones(3)
    trace = captured(tmp_path, lambda: [x + 1 for _ in range(5000)])
    assert len(trace.calls) == 5000
    assert len(trace.signatures) == 1


@pytest.mark.parametrize(
    ("first", "second"),
    [(1, 1.0), (1, True), (0.0, -0.0), (2.0, 3.0), (float("inf"), float("-inf")), (1.0, 1 + 0j)],
)
def test_scalars_that_python_compares_equal_have_distinct_signatures(tmp_path: Path, first: Any, second: Any) -> None:
    x = torch.ones(3)
    trace = captured(tmp_path, lambda: (x * first, x * second, x * first))
    scalars = [signature.args[1] for signature in trace.signatures]
    assert [repr(scalar) for scalar in scalars] == [repr(first), repr(second)]
    assert trace.calls["signature"].tolist() == [0, 1, 0]


def test_tensor_layout_is_recorded(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    trace = captured(tmp_path, lambda: torch.add(base.t()[1:], base.expand(1, 4, 6)[0].t()[1:]))
    add = next(signature for signature in trace.signatures if signature.op == "aten.add.Tensor")
    spec = replace(add.args[0], values=None)
    assert spec == TensorSpec((5, 4), (1, 6), torch.float32, "cpu", offset=1, storage=0)
    assert add.args[1].storage == 0


def test_generators_are_recorded_by_device_and_seed(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    trace = captured(tmp_path, lambda: torch.randn(3, generator=generator))
    assert GeneratorSpec("cpu", 5) in [*trace.signatures[0].args, *trace.signatures[0].kwargs.values()]


def test_call_that_raises_is_recorded_and_its_error_reaches_the_program(tmp_path: Path) -> None:
    x = torch.ones(3)

    def program() -> None:
        with pytest.raises(RuntimeError, match="must match"):
            torch.add(x, torch.ones(4))

    trace = captured(tmp_path, program)
    assert trace.signatures[-1].raised is not None
    assert "must match" in trace.signatures[-1].raised


def test_program_error_leaves_a_complete_trace(tmp_path: Path) -> None:
    x = torch.ones(3)
    with pytest.raises(ZeroDivisionError), Capture(tmp_path / "t.jsonl"):
        x + 1
        raise ZeroDivisionError
    trace = load(tmp_path / "t.jsonl", partial=False)
    assert ops(trace) == ["aten.add.Tensor"]


def test_hook_error_drops_only_the_record_and_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Any:
        raise OSError("planted")

    monkeypatch.setattr(fitting, "describe_call", broken)
    x = torch.ones(3)
    with Capture(tmp_path / "t.jsonl") as watched:
        result = x + 1
    assert torch.equal(result, torch.full((3,), 2.0))
    assert watched.dropped == 1
    end = load(tmp_path / "t.jsonl").end
    assert end is not None
    assert [(item.op, item.reason, item.count) for item in end.dropped] == [("aten.add.Tensor", "OSError: planted", 1)]


def test_module_that_is_not_a_child_is_named_under_its_caller(tmp_path: Path) -> None:
    class Outer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.ReLU()(x)

    trace = captured(tmp_path, lambda: Outer()(torch.ones(3)))
    assert {row.op: row.module for row in trace.calls.itertuples()}["aten.relu.default"] == "(ReLU)"


def test_scope_is_restored_after_a_module_failed(tmp_path: Path) -> None:
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError

    x = torch.ones(3)

    def program() -> None:
        model = nn.Sequential(nn.ReLU(), Fails())
        with pytest.raises(ValueError):  # noqa: PT011
            model(x)
        x + 1

    trace = captured(tmp_path, program)
    assert [(row.op, row.module) for row in trace.calls.itertuples()] == [
        ("aten.relu.default", "0"),
        ("aten.add.Tensor", ""),
    ]


def test_extension_functions_are_recorded_as_calls(tmp_path: Path) -> None:
    # any module of builtin functions works here; the tests with mmcv use its real extension
    import math

    original = math.hypot
    trace = captured(tmp_path, lambda: math.hypot(3.0, 4.0), extensions=["math", "not_loaded"])
    (signature,) = trace.signatures
    assert (signature.kind, signature.op, signature.args) == ("extension", "math:hypot", (3.0, 4.0))
    assert signature.outputs == 5.0
    assert math.hypot is original


def test_extension_used_by_the_capture_itself_does_not_deadlock(tmp_path: Path) -> None:
    # the capture itself calls math.isfinite to fit values, and functions of struct and zlib to write
    watched = ["math", "zlib", "_struct"]
    trace = captured(tmp_path, lambda: torch.ones(100) * 2, extensions=watched)
    assert set(ops(trace)) == {"aten.ones.default", "aten.mul.Tensor"}


def test_two_captures_both_record_operators_and_extensions(tmp_path: Path) -> None:
    import cmath

    x = torch.ones(3)
    outer, inner = tmp_path / "outer.jsonl", tmp_path / "inner.jsonl"
    with Capture(outer, extensions=["cmath"]), Capture(inner, extensions=["cmath"]):
        x + 1
        cmath.phase(1j)
    for path in (outer, inner):
        assert ops(load(path)) == ["aten.add.Tensor", "cmath:phase"]


def test_compiled_function_is_recorded_as_its_eager_operators(tmp_path: Path) -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(lambda tensor: (tensor.sin() + 1).cos(), backend=backend)
    x = torch.randn(4)
    trace = captured(tmp_path, lambda: compiled(x))
    assert ops(trace) == ["aten.sin.default", "aten.add.Tensor", "aten.cos.default"]
    assert graphs == []
    assert trace.end is not None
    assert not trace.end.dropped


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_recorded_by_their_buffer(tmp_path: Path) -> None:
    parts = [torch.ones(2), torch.ones(3)]
    trace = captured(tmp_path, lambda: torch.nested.nested_tensor(parts) * 2)
    (mul,) = (signature for signature in trace.signatures if signature.op == "aten.mul.Tensor")
    assert (mul.args[0].shape, mul.args[0].made_of.buffer.shape) == ((2, 3), (5,))
    assert mul.outputs.made_of.sizes == mul.args[0].made_of.sizes == ((2,), (3,))
    assert trace.end is not None
    assert not trace.end.dropped


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensor_subclass_is_recorded_by_its_inner_calls(tmp_path: Path) -> None:
    parts = [torch.ones(2), torch.ones(3)]
    trace = captured(tmp_path, lambda: torch.nested.nested_tensor(parts, layout=torch.jagged) * 2)
    (mul,) = (signature for signature in trace.signatures if signature.op == "aten.mul.Tensor")
    assert mul.args[0].shape == (5,)
    assert trace.end is not None
    assert not trace.end.dropped
    assert ("aten.mul.Tensor", "run by NestedTensor") in [(item.op, item.reason) for item in trace.end.passed_by]


def test_reentered_capture_writes_another_trace(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("precious", encoding="utf-8")
    watched = Capture(path, values="full")
    for number in (2, 3):
        with pytest.warns(RuntimeWarning, match=f"t.jsonl exists: the trace is written to t.{number}.jsonl"), watched:
            torch.ones(100) + number
        assert watched.path == tmp_path / f"t.{number}.jsonl"
        assert load(watched.path, partial=False).signatures[1].args[1] == number
    assert path.read_text(encoding="utf-8") == "precious"
    (tmp_path / "t.values.safetensors").touch()
    with Capture(path, force=True):
        torch.ones(3)
    assert len(load(path).calls) == 1


def test_trace_name_may_contain_time_and_process(tmp_path: Path) -> None:
    with Capture(tmp_path / "t-%t-%p-100%.jsonl") as watched:
        torch.ones(3)
    assert re.fullmatch(rf"t-\d{{8}}T\d{{6}}-{os.getpid()}-100%\.jsonl", Path(watched.path).name)
    assert len(load(watched.path, partial=False).calls) == 1


def test_calls_are_written_while_the_program_idles(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    x = torch.ones(3)
    with Capture(path):
        x + 1
        deadline = time.monotonic() + 300
        while not any(path.parent.glob("t.part*")) or sum(1 for _ in read(next(path.parent.glob("t.part*")))) < 4:
            assert time.monotonic() < deadline, "nothing was flushed"


def test_unknown_parameter_of_a_capture_is_answered_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"^Capture\(\) has no parameter modle: did you mean model=\?$"):
        Capture(tmp_path / "t.jsonl", modle=None)  # type: ignore[call-arg]
