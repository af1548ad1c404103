"""Tests of operators named on the command line: `opreplay --operator NAME --inputs JSON`."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import refusal, succeed

from opgrip.errors import UserError
from opgrip.replay import replay
from opgrip.replay.cases.selection import Selection
from opgrip.replay.cases.sources.operator import OperatorSource, target_of
from opgrip.traces.schema.arguments import tensors

ADD = {"self": [16, 8], "other": [16, 8]}


def signatures(operator: str, *configurations: Any) -> list[Any]:
    target = target_of([operator], [json.dumps(item) for item in configurations])
    assert OperatorSource().takes(target)
    return [case.signature for case in OperatorSource().open(target, Selection(), ()).cases]


def test_operator_is_replayed_without_a_trace() -> None:
    inputs = json.dumps(ADD)
    done = succeed("opreplay", "--operator", "aten.add.Tensor", "--inputs", inputs, "--iterations", "1", "--strict")
    assert "float32[16,8] float32[16,8]" in done.stdout
    assert "1 case: 1 ok" in done.stderr


def test_overload_is_chosen_by_the_arguments() -> None:
    ops = [item.op for item in signatures("aten::add", ADD, {"self": [3], "other": 2.5})]
    assert ops == ["aten.add.Tensor", "aten.add.Scalar"]
    assert signatures("mm", {"self": [2, 3], "mat2": [3, 4]})[0].op == "aten.mm.default"


def test_pattern_selects_the_operators_that_take_the_arguments() -> None:
    ops = [item.op for item in signatures("aten.add*", ADD)]
    assert ops == ["aten.add.Tensor", "aten.add_.Tensor"]
    assert [item.op for item in signatures("aten::ma*imum", ADD, ADD)] == ["aten.maximum.default"] * 2


@pytest.mark.parametrize(
    "name", ["torch.relu", "torch.nn.functional.relu", "nn.functional.relu", "F.relu", "torch.Tensor.relu", "aten.relu"]
)
def test_operator_is_found_by_its_python_names(name: str) -> None:
    assert [item.op for item in signatures(name, {"self": [3]})] == ["aten.relu.default"]


def test_values_are_converted_by_the_schema() -> None:
    (signature,) = signatures("aten.sum.dim_IntList", {"self": [4, 5], "dim": [1], "keepdim": True, "dtype": "float64"})
    assert signature.args[1:] == ([1], True)
    assert signature.kwargs == {"dtype": torch.float64}
    (signature,) = signatures("aten.embedding", {"weight": [10, 4], "indices": [3]})
    assert [spec.dtype for spec in tensors(signature.args)] == [torch.float32, torch.int64]
    (signature,) = signatures("aten.cat", {"tensors": [[2, 3], [4, 3]]})
    assert [spec.shape for spec in tensors(signature.args)] == [(2, 3), (4, 3)]


def test_tensor_may_have_strides_and_dtype() -> None:
    form = {"self": {"shape": [4, 3], "stride": [1, 4], "dtype": "int32"}}
    (spec,) = tensors(signatures("aten.neg", form)[0].args)
    assert (spec.stride, spec.dtype, spec.requires_grad) == ((1, 4), torch.int32, False)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--operator", "aten.add.Tensr"], "no operator 'aten.add.Tensr' is registered: did you mean aten.add"),
        (["--operator", "aten.mm", "--inputs", '{"self": [2, 2]}'], "lacks its argument mat2"),
        (
            ["--operator", "aten.mm", "--inputs", '{"self": [-2, 2], "mat2": [2]}'],
            "from 0 to 4611686018427387903): its schema is aten::mm(",
        ),
        (["--operator", "aten.neg", "--inputs", '{"nobody": [2]}'], "has no argument nobody"),
        (["--operator", "aten.neg", "--inputs", "[" * 100_000], "--inputs cannot be read"),
        (["--operator", "aten.qq*"], "no operator matches 'aten.qq*': use a pattern such as 'aten.add*'"),
        (["--operator", "aten.neg*", "--inputs", '{"nobody": [2]}'], "that matches 'aten.neg*' takes these arguments"),
        (["--operator", "aten.neg", "trace.jsonl"], "--operator cannot be combined with a trace"),
        (["--operator", "aten.neg", "--tag", "ForLoop"], "--tag is for samples: leave it out with --operator"),
        (["--inputs", "{}"], "--inputs needs --operator"),
        ([], "there is nothing to replay"),
    ],
)
def test_usage_errors_are_reported_in_one_line(words: list[str], problem: str) -> None:
    assert problem in refusal("opreplay", *words, in_one_line=True)


def test_tensor_of_any_size_is_a_row() -> None:
    frame = replay(operator="aten.neg", inputs=json.dumps({"self": [10**15]}), iterations=1).frame
    assert list(frame["status"]) == ["failed"]
    assert "out of memory" in frame["error"][0]


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["shape", "dtype", "self"]), inner),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(["aten.add", "aten.sum", "aten.cat", "aten.to", "aten.full"]), values, values)
def test_any_configuration_is_accepted_or_refused_in_one_line(operator: str, one: Any, other: Any) -> None:
    with suppress(UserError):
        for signature in signatures(operator, {"self": one, "other": other}, {"tensors": one, "dim": other}):
            assert signature.op.startswith("aten.")


OWN = """
import torch
library = torch.library.Library("myops", "DEF")
library.define("twice(Tensor x) -> Tensor")
library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
"""


@pytest.fixture
def own_operators(tmp_path: Path) -> Path:
    """Return a folder with a module that registers an operator."""
    (tmp_path / "myops.py").write_text(OWN)
    return tmp_path


@pytest.mark.slow
def test_operator_of_an_extension_is_replayed(own_operators: Path) -> None:
    words = ("--operator", "myops.twice", "--extension", "myops", "--inputs", '{"x": [8]}', "--iterations", "1")
    done = succeed("opreplay", *words, "--strict", cwd=own_operators)
    assert "myops.twice.default" in done.stdout


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import os; os.abort()", "its process ended: Aborted"),
        ("import sys; sys.exit(0)", "its process ended: status 0"),
    ],
)
def test_extension_that_cannot_be_imported_is_reported_in_one_line(own_operators: Path, text: str, reason: str) -> None:
    (own_operators / "myops.py").write_text(text)
    words = ("--operator", "myops.twice", "--extension", "myops", "--inputs", '{"x": [8]}')
    error = refusal("opreplay", *words, cwd=own_operators)
    assert error == f"opreplay: error: --extension myops cannot be imported: {reason}\n"
