"""Operators named on the command line, and operators that a program registers."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import refusal, run_command, succeed

from opgrip.capture.torch_compat.torch_private import registered_by
from opgrip.errors import UserError
from opgrip.replay import replay
from opgrip.replay.cases.selection import Selection
from opgrip.replay.cases.sources.operator import OperatorSource, target_of
from opgrip.replay.operators.admission import LOOK_FOR
from opgrip.traces import load
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


CUSTOM_OP = """
import torch
@torch.library.custom_op("first::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2
"""
LIBRARY = """
import torch
library = torch.library.Library("_C", "DEF")
library.define("thrice(Tensor x) -> Tensor")
library.impl("thrice", lambda x: x * 3, "CompositeExplicitAutograd")
"""
SCRIPT = """
import sys, torch
import helper
@torch.library.custom_op("own::half", mutates_args=())
def half(x: torch.Tensor) -> torch.Tensor:
    return x / 2
if __name__ == "__main__":
    import mypackage.deep.ops, mypackage._kernels
    x = torch.ones(3)
    half(torch.ops.first.twice(torch.ops._C.thrice(x)))
torch.ones(2, requires_grad=True).sum().backward()
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a program, and the trace that it left in another folder."""
    folder = tmp_path_factory.mktemp("custom")
    package = folder / "my programs" / "mypackage"
    (package / "deep").mkdir(parents=True)
    for file, text in (("__init__.py", ""), ("deep/__init__.py", ""), ("deep/ops.py", CUSTOM_OP)):
        (package / file).write_text(text, encoding="utf-8")
    (package / "_kernels.py").write_text(LIBRARY, encoding="utf-8")
    (package.parent / "helper.py").write_text("open('imported', 'w').close()", encoding="utf-8")
    (package.parent / "train.py").write_text(SCRIPT, encoding="utf-8")
    succeed("opcapture", "-o", "t.jsonl", "--", "my programs/train.py", cwd=folder)
    (folder / "imported").unlink()
    return folder


def rows(folder: Path, *words: str, env: dict[str, str] | None = None) -> dict[str, dict[str, str]]:
    run_command("opreplay", *words, "--iterations", "1", "-f", "-o", "r.json", cwd=folder, env=env)
    found = json.loads((folder / "r.json").read_text(encoding="utf-8"))
    return {row["op"]: row for row in found["results"]}


def test_trace_has_the_module_or_file_that_registered_an_operator(program: Path) -> None:
    origins = {item.op: item.registered_by for item in load(program / "t.jsonl", partial=False).signatures}
    assert origins["own.half.default"] == str(program / "my programs" / "train.py")
    assert origins["first.twice.default"] == "mypackage.deep.ops"
    assert origins["_C.thrice.default"] == "mypackage._kernels"
    assert origins["aten.ones.default"] is None
    hidden = run_command("opgrip", "trace", "redact", "t.jsonl", "-f", "-o", "hidden.jsonl", cwd=program)
    assert hidden.returncode == 0, hidden.stderr
    assert not any(item.registered_by for item in load(program / "hidden.jsonl").signatures)


@pytest.mark.slow
def test_custom_operator_runs_once_its_module_or_file_is_named(program: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(program / "my programs")}
    words: list[str] = ["t.jsonl"]
    script = str(program / "my programs" / "train.py")
    origins = {
        "own.half.default": script,
        "first.twice.default": "mypackage.deep.ops",
        "_C.thrice.default": "mypackage._kernels",
    }
    for op, origin in origins.items():
        row = rows(program, *words, env=env)[op]
        assert row["status"] == "unsupported"
        # a command that runs what only the trace names is not offered, and nothing of it was imported
        assert row["error"] == f"{op} is not trusted: {LOOK_FOR}"
        assert (program / "imported").exists() is (len(words) > 1)
        words += ["--extension", origin]
        row = rows(program, *words, env=env)[op]
        assert row["status"] == "ok", row["error"]
    assert len(words) == 7
    by_op = rows(program, *words, env=env)
    assert {row["status"] for row in by_op.values()} == {"ok"}


def test_module_of_a_triton_operator_is_found() -> None:
    @torch.library.triton_op("own_triton::twice", mutates_args={})
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    assert registered_by(torch.ops.own_triton.twice.default) == __name__
    assert registered_by(torch.ops.aten.add.Tensor) is None
