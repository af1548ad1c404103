"""Tests of captures of single operators: `opcapture --model opinfo:NAME`."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from optional import needs
from programs import succeed, train_tiny_net

from opgrip.capture import capture
from opgrip.capture.models.operators.operators_program import Coverage
from opgrip.capture.models.operators.samples import (
    ENDS,
    LARGE_ELEMENTS,
    SampleRunner,
    SampleScope,
    find_samples,
    schema_entries,
    schema_samples,
    seeded,
    try_all,
)
from opgrip.capture.models.operators.torch_tables import OperatorEntry
from opgrip.errors import UserError
from opgrip.replay import replay
from opgrip.traces import Trace, load
from opgrip.traces.schema.arguments import tensors

pytestmark = needs("expecttest")

CUSTOM = """
import torch

@torch.library.custom_op("{name}::scale", mutates_args=())
def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor

scale.register_autograd(
    lambda ctx, gradient: (gradient * ctx.factor, None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "factor", inputs[1]),
)

@torch.library.custom_op("{name}::odd", mutates_args=())
def odd(x: torch.Tensor, mode: str) -> torch.Tensor:
    return x.clone()
"""


def make_entry(function: Any, samples: Any, **fields: Any) -> OperatorEntry:
    return OperatorEntry(
        **{
            "name": "own",
            "categories": frozenset(),
            "function": function,
            "dtypes": lambda device: (torch.float32,),
            "differentiable": lambda device: frozenset(),
            "samples": lambda device, dtype, wants_grad: iter(samples),
            **fields,
        }
    )


def specs_of(trace: Trace, op: str) -> list[Any]:
    return [list(tensors(item.args)) for item in trace.signatures if item.op == op]


@pytest.mark.slow
def test_operators_are_recorded_forward_and_backward_and_replay(tmp_path: Path) -> None:
    path = tmp_path / "pooling.jsonl"
    done = succeed("opcapture", "--model", "opinfo:nn.functional.avg_pool2d", "--per-dtype", "1", "-o", path)
    assert "operators by" in done.stderr
    trace = load(path)
    assert {"forward", "backward"} <= set(trace.calls["phase"])
    assert {"aten.avg_pool2d.default", "aten.avg_pool2d_backward.default"} <= {item.op for item in trace.signatures}
    assert "nn.functional.avg_pool2d" in set(trace.calls["module"])
    assert {spec.dtype for args in specs_of(trace, "aten.avg_pool2d.default") for spec in args} >= {
        torch.float32,
        torch.bfloat16,
    }
    frame = replay(path, op="aten.*pool*", iterations=1, warmup=0).frame
    assert set(frame["status"]) == {"ok"}


@pytest.mark.slow
def test_operator_name_includes_variants_and_in_place_forms(tmp_path: Path) -> None:
    trace = capture("opinfo:div", tmp_path / "div.jsonl")
    assert {"aten.div.Tensor", "aten.div.Tensor_mode", "aten.div_.Tensor"} <= {item.op for item in trace.signatures}
    assert {"div.floor_rounding", "div.no_rounding_mode"} <= set(trace.calls["module"])


@pytest.mark.slow
def test_same_seed_gives_the_same_samples_in_any_selection(tmp_path: Path) -> None:
    one = capture("opinfo:floor", tmp_path / "one.jsonl", seed=3)
    two = capture("opinfo:ceil,floor", tmp_path / "two.jsonl", seed=3)
    other = capture("opinfo:floor", tmp_path / "other.jsonl", seed=4)

    def values(trace: Trace) -> list[Any]:
        numbers = [spec.values for args in specs_of(trace, "aten.floor.default") for spec in args]
        return [None if number is None else str(trace.values[number]) for number in numbers]

    assert values(one) == values(two) != values(other)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "options", "problem"),
    [
        ("opinfo:flor", {}, "unknown operator 'flor': did you mean floor"),
        ("opinfo:", {}, "names no operators"),
        ("opinfo:floor", {"run": "train"}, "run= is for modules: leave it out with model= opinfo:NAME"),
        ("opinfo:floor", {"steps": 2}, "steps= is for modules"),
        ("builtin:faster_rcnn", {"shapes": "large"}, "shapes= is for operators: name some with model= opinfo:NAME"),
        ("opinfo:floor", {"import": "no_such_module"}, "no_such_module cannot be imported"),
        ("opinfo:floor", {"shapes_from": "no.jsonl"}, "no.jsonl"),
        ("opinfo:aten.from_file", {}, "no sample inputs for aten.from_file.default can be created"),
    ],
)
def test_usage_error_is_reported_in_one_line(tmp_path: Path, model: str, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError) as raised:
        capture(model, tmp_path / "x.jsonl", **options)
    assert problem in str(raised.value)
    assert not (tmp_path / "x.jsonl").exists()


@pytest.mark.slow
def test_large_shapes_have_about_a_million_elements(tmp_path: Path) -> None:
    trace = capture("opinfo:add", tmp_path / "add.jsonl", shapes="large", per_dtype=1)
    sizes = [spec.extent // spec.dtype.itemsize for args in specs_of(trace, "aten.add.Tensor") for spec in args]
    assert LARGE_ELEMENTS / 4 < max(sizes) < LARGE_ELEMENTS * 4


@pytest.mark.slow
def test_operators_run_with_the_shapes_of_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "tiny.jsonl"
    train_tiny_net(path)
    trace = capture("opinfo:nn.functional.embedding,convolution", tmp_path / "from.jsonl", shapes_from=path)
    shapes = {tuple(spec.shape for spec in args) for args in specs_of(load(path), "aten.embedding.default")}
    assert {tuple(spec.shape for spec in args) for args in specs_of(trace, "aten.embedding.default")} == shapes
    assert {"aten.convolution.default", "aten.convolution_backward.default"} <= {item.op for item in trace.signatures}
    assert "aten.addmm.default" not in {item.op for item in trace.signatures}
    with pytest.raises(UserError, match="contains no call of the selected operators"):
        capture("opinfo:bucketize", tmp_path / "none.jsonl", shapes_from=path)


@pytest.mark.slow
def test_custom_operators_run_and_those_without_samples_are_listed(tmp_path: Path) -> None:
    (tmp_path / "own_ops.py").write_text(CUSTOM.format(name="own_ops"))
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    words = ("--model", "opinfo:custom", "--import", "own_ops", "-o", "own.jsonl", "--uncovered", "own.json")
    done = succeed("opcapture", *words, cwd=tmp_path, env=env)
    assert "my_ops" not in done.stderr
    trace = load(tmp_path / "own.jsonl")
    assert {spec.dtype for args in specs_of(trace, "own_ops.scale.default") for spec in args} >= {torch.float32}
    assert "aten.mul.Tensor" in {item.op for item in trace.signatures}
    form = json.loads((tmp_path / "own.json").read_text())
    reasons = {item["op"]: item["reason"] for item in form["uncovered"]}
    assert reasons["own_ops.odd.default"] == "unsupported type of argument mode: str"
    words = ("own.jsonl", "--op", "own_ops.*", "--extension", "own_ops", "--iterations", "1", "--strict")
    succeed("opreplay", *words, cwd=tmp_path, env=env)


def test_failing_sample_does_not_stop_the_others() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        if x.dim() == 2:
            raise ValueError("not of two dimensions")
        return x + 1

    samples = [((torch.ones(2, 2),), {}), ((torch.ones(3),), {}), ((torch.ones(4),), {})]
    coverage = Coverage()
    SampleRunner("cpu", 0, 0, coverage).run(make_entry(function, samples), SampleScope())
    assert coverage.samples == 2
    assert dict(coverage.failures) == {("own", "float32", "ValueError: not of two dimensions"): 1}
    assert {str(item) for item in coverage.operators} == {"aten.add.Tensor"}


def test_sample_that_ends_its_process_is_reported_and_the_next_runs() -> None:
    outcomes = list(try_all([lambda: 1, lambda: os._exit(3), lambda: 1 / 0, lambda: 2]))
    assert [value for value, _ in outcomes] == [1, None, None, 2]
    assert outcomes[1][1] == ENDS
    assert outcomes[2][1].startswith("ZeroDivisionError")


def test_samples_generated_from_schemas_run() -> None:
    function = torch.ops.aten.celu.default
    places = find_samples(function, 0)
    assert {"float32", "bfloat16"} <= places.keys()
    with seeded(0):
        args, kwargs = next(schema_samples(function, "cpu", torch.float32, False))
    assert torch.isfinite(function(*args, **kwargs)).all()
    entries, reasons = schema_entries([function, torch.ops.aten.from_file.default], 0)
    assert [entry.name for entry in entries] == ["aten.celu.default"]
    assert reasons.keys() == {"aten.from_file.default"}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_nearly_all_captured_operators_replay(tmp_path: Path) -> None:
    path = tmp_path / "many.jsonl.gz"
    names = "opinfo:unary,reduction,nn,indexing,sorting,random,optimizer,schema"
    succeed("opcapture", "--model", names, "--per-dtype", "1", "-o", path)
    assert len({item.op for item in load(path).signatures}) >= 500
    frame = replay(path, iterations=1, warmup=0).frame
    assert (frame["status"] == "ok").mean() >= 0.98


@pytest.mark.slow
def test_random_shapes_follow_the_seed(tmp_path: Path) -> None:
    traces = [
        capture("opinfo:floor", tmp_path / f"{number}.jsonl", shapes="random", per_dtype=1, seed=seed)
        for number, seed in enumerate((1, 1, 2))
    ]
    one, same, other = (
        [spec.shape for args in specs_of(trace, "aten.floor.default") for spec in args] for trace in traces
    )
    assert one == same != other
