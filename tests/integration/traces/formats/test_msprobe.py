"""Tests of reading msProbe's dumps as traces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_data import CASES, needs_cases, results_of

from opgrip.errors import UserError
from opgrip.replay import replay
from opgrip.traces import Trace, TraceReader, load
from opgrip.traces.values.floats import Floats
from opgrip.traces.values.integers import Integers


def tensor(*shape: int, dtype: str = "float32", **facts: Any) -> dict[str, Any]:
    values = {"Max": 3.0, "Min": -1.0, "Mean": 1.0, "Norm": 4.0, "requires_grad": True} | facts
    return {"type": "torch.Tensor", "dtype": f"torch.{dtype}", "shape": list(shape), **values}


def plain(value: Any) -> dict[str, Any]:
    return {"type": type(value).__name__, "value": value}


def trace_of(path: Path, calls: dict[str, Any], level: str = "L1") -> tuple[Trace, TraceReader]:
    path.write_text(json.dumps({"task": "statistics", "level": level, "framework": "pytorch", "data": calls}))
    reader = TraceReader(path)
    return load(path, reader=reader), reader


def call(*args: Any, **kwargs: Any) -> dict[str, Any]:
    return {"input_args": list(args), "input_kwargs": kwargs, "output": []}


def test_functions_become_the_operators_that_they_run(tmp_path: Path) -> None:
    calls = {
        "Functional.embedding.0.forward": call(tensor(5, dtype="int64", Max=6, Min=0, Mean=3), tensor(7, 4)),
        "Functional.linear.0.forward": call(tensor(2, 3), tensor(4, 3), tensor(4)),
        "Tensor.__iadd__.0.forward": call(tensor(2, 3), tensor(2, 3)),
        "Tensor.__getitem__.0.forward": call(tensor(4, 3), [{"type": "slice", "value": [0, 2, None]}, plain(1)]),
        "Torch.cat.0.forward": call([tensor(2, 3), tensor(2, 3)], dim=plain(1)),
        "Functional.scaled_dot_product_attention.0.forward": call(*[tensor(1, 2, 3, 4)] * 3),
    }
    trace, reader = trace_of(tmp_path / "dump.json", calls)
    assert not reader.losses.skipped
    ops = set(trace.calls["op"])
    operators = ("embedding.default", "addmm.default", "add_.Tensor", "slice.Tensor", "select.int", "cat.default")
    assert ops >= {f"aten.{name}" for name in (*operators, "scaled_dot_product_attention.default")}
    embedding = next(item for item in trace.signatures if item.op == "aten.embedding.default")
    weight, ids = embedding.args[:2]
    assert trace.values[ids.values] == Integers([], 0, 6, 5, ascending=False)
    assert weight.requires_grad
    with torch.no_grad():
        assert all(result is not None for _, result in results_of(trace))


def test_statistics_determine_the_value_model(tmp_path: Path) -> None:
    trace, _ = trace_of(tmp_path / "dump.json", {"Functional.relu.0.forward": call(tensor(8, Norm=8.0))})
    (model,) = trace.values.values()
    assert isinstance(model, Floats)
    assert (model.mean, model.low, model.high) == (1.0, -1.0, 3.0)
    # 64 = 8 (std² + mean²)
    assert model.std == pytest.approx(7**0.5)


@pytest.mark.parametrize(
    ("name", "entry", "reason"),
    [
        ("Functional.relu.0.backward", {"input": [], "output": []}, "a backward pass"),
        ("NPU.npu_rms_norm.0.forward", call(tensor(2)), "the called function is not one of torch but of NPU"),
        (
            "Distributed.all_reduce.0.forward",
            call(tensor(2)),
            "the called function is not one of torch but of Distributed",
        ),
        ("Torch.load.0.forward", call(plain("/etc/passwd")), "not a function of tensors"),
        ("Tensor.__reduce_ex__.0.forward", call(tensor(2)), "not a function of tensors"),
        (
            "Functional.relu.0.forward",
            call({"type": "torch.Generator"}),
            "does not have the value of a torch.Generator",
        ),
        ("Functional.relu.0.forward", call({"type": "torch.Tensor", "shape": [-1], "dtype": "torch.int8"}), "size"),
        ("Functional.linear.0.forward", call(tensor(2, 3), tensor(4, 5)), "same reduction dim"),
        ("Functional.relu.0.forward", 3, "its value is not a JSON object"),
        ("relu", call(tensor(2)), "the name of the entry is not SPACE.FUNCTION.NUMBER.forward"),
    ],
)
def test_unconverted_calls_are_counted(tmp_path: Path, name: str, entry: Any, reason: str) -> None:
    trace, reader = trace_of(tmp_path / "dump.json", {name: entry})
    assert trace.calls.empty
    ((_, told),) = reader.losses.skipped
    assert reason in told


def test_modules_are_counted_only_without_their_functions(tmp_path: Path) -> None:
    calls = {"Module.layer.0.conv.Conv2d.forward.0": call(tensor(2))}
    _, reader = trace_of(tmp_path / "mix.json", calls, level="mix")
    assert not reader.losses.skipped
    _, reader = trace_of(tmp_path / "modules.json", calls, level="L0")
    ((op, reason),) = reader.losses.skipped
    assert (op, "level L0" in reason) == ("Module.layer.0.conv.Conv2d", True)


def test_dump_without_calls_is_refused(tmp_path: Path) -> None:
    (tmp_path / "dump.json").write_text('{"task": "statistics", "level": "L1", "data": [1]}')
    with pytest.raises(UserError, match="it has no calls"):
        list(TraceReader(tmp_path / "dump.json"))


@needs_cases
@pytest.mark.slow
def test_real_dump_is_read_and_replayed() -> None:
    path = CASES / "files/msprobe" / "dump.json"
    reader = TraceReader(path)
    trace = load(path, reader=reader)
    forward = [name for name in json.loads(path.read_text())["data"] if name.endswith(".forward")]
    assert len(trace.calls) >= len(forward)
    assert {reason for _, reason in reader.losses.skipped} == {
        "a backward pass, whose operators the file does not name"
    }
    assert {row.status for row in replay(path, device="cpu", iterations=1, top=3)} == {"ok"}
