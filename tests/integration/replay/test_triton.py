"""Triton kernels: launches on the CPU by Triton's interpreter, and their replay if the user names their module."""

import importlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from optional import optional
from programs import ROOT, run_command

from opgrip.capture import Capture
from opgrip.replay.cases.selection import FUNCTION, Selection
from opgrip.replay.cases.subgraphs import make_units
from opgrip.replay.operators.lookup import Unsupported, find_operator
from opgrip.traces import Trace, load
from opgrip.traces.schema.arguments import Opaque, TensorSpec
from opgrip.traces.schema.operator_arguments import is_launch, launch_facts, launch_keywords
from opgrip.traces.schema.python_objects import NamedSpec
from opgrip.traces.schema.records import EXTENSION, Signature

X, Y = torch.linspace(0, 1, 100), torch.linspace(1, 2, 100)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    optional("triton")
    yield importlib.import_module("launched_kernels")
    # the module stays loaded because its operator can be registered only once; forget the chosen configuration
    sys.modules["launched_kernels"].count_kernel.cache.clear()


def signatures_of(trace: Trace, name: str) -> list[Any]:
    return [item for item in trace.signatures if item.op == f"launched_kernels:{name}"]


def test_launch_is_a_call_with_grid_constants_options_and_arguments(kernels: ModuleType, tmp_path: Path) -> None:
    expected = kernels.add(X, Y)
    grids = kernels.grids
    with Capture(tmp_path / "t.jsonl") as capture:
        result = kernels.add(X, Y)
    assert torch.equal(result, expected)
    assert capture.dropped == 0
    assert kernels.grids == grids + 1, "the program's function of the grid runs once, as unwatched"
    trace = load(tmp_path / "t.jsonl", partial=False)
    (signature,) = signatures_of(trace, "add_kernel")
    assert is_launch(signature)
    assert [item.shape for item in signature.args[:3]] == [(100,)] * 3
    assert signature.args[3:] == (100, 2.0)
    assert signature.kwargs["grid"] == (4,)
    assert signature.kwargs["constants"] == {"BLOCK": 32, "OUT": torch.float32}
    assert signature.kwargs["options"] == {"num_warps": 2}
    assert launch_facts(signature) == {"grid": (4,), "BLOCK": 32, "OUT": torch.float32, "num_warps": 2}
    assert trace.own_calls["op"].tolist() == ["aten.empty_like.default", "launched_kernels:add_kernel"]
    (call,) = trace.own_calls[trace.own_calls["kind"] == "extension"].to_dict("records")
    assert (call["function"], call["file"]) == ("add", "launched_kernels.py")


def test_chosen_configuration_of_an_autotuned_kernel_is_recorded(kernels: ModuleType, tmp_path: Path) -> None:
    with Capture(tmp_path / "t.jsonl"):
        results = [kernels.count(7) for _ in range(2)]
    assert all(torch.equal(result, torch.arange(1.0, 8)) for result in results)
    trace = load(tmp_path / "t.jsonl", partial=False)
    (signature,) = signatures_of(trace, "count_kernel")
    assert launch_facts(signature).items() >= {"grid": (1,), "EVEN": False, "BLOCK": 32, "num_warps": 2}.items()
    own = trace.own_calls["op"].tolist()
    assert own == ["aten.zeros.default", "launched_kernels:count_kernel"] * 2
    (dropped,) = trace.end.dropped
    assert (dropped.op, dropped.count) == ("launched_kernels:count_kernel", 2)
    assert "autotuner" in dropped.reason


def test_launch_by_an_operator_is_inside_its_call(kernels: ModuleType, tmp_path: Path) -> None:
    expected = kernels.plus(X, Y)
    with Capture(tmp_path / "t.jsonl"):
        result = kernels.plus(X, Y)
    assert torch.equal(result, expected)
    trace = load(tmp_path / "t.jsonl", partial=False)
    launches = trace.calls[trace.calls["op"] == "launched_kernels:add_kernel"]
    assert launches["inside"].tolist() == ["launched_kernels.plus.default"]
    assert trace.own_calls["op"].tolist() == ["launched_kernels.plus.default"]


def test_failing_kernel_raises_its_own_error_and_is_recorded(kernels: ModuleType, tmp_path: Path) -> None:
    def program() -> None:
        kernels.add_kernel[(1,)](X, Y, torch.empty(100), 100, "two", BLOCK=32)

    with pytest.raises(Exception, match=r"str|two") as bare:
        program()
    with Capture(tmp_path / "t.jsonl"), pytest.raises(type(bare.value)) as watched:
        program()
    assert str(watched.value) == str(bare.value)
    (signature,) = signatures_of(load(tmp_path / "t.jsonl"), "add_kernel")
    assert signature.raised is not None


MODULE = "launched_kernels"
KEYWORDS = launch_keywords((4,), {"BLOCK": 32, "OUT": torch.float32}, {"num_warps": 2})


def launch_of(name: str = "add_kernel", module: str = MODULE) -> Signature:
    return Signature(0, EXTENSION, f"{module}:{name}", (), {})


@pytest.mark.usefixtures("kernels")
def test_recorded_launch_writes_the_results_of_the_program(kernels: ModuleType, tmp_path: Path) -> None:
    with Capture(tmp_path / "t.jsonl"):
        expected = kernels.add(X, Y), kernels.count(7)
    signatures = {item.op: item for item in load(tmp_path / "t.jsonl").signatures}
    out = torch.empty(100)
    signature = signatures[f"{MODULE}:add_kernel"]
    operator = find_operator(signature, [MODULE])
    assert operator.mutates
    operator.function(X, Y, out, *signature.args[3:], **signature.kwargs)
    assert torch.equal(out, expected[0])
    out, tuned = torch.empty(7), len(kernels.times)
    signature = signatures[f"{MODULE}:count_kernel"]
    find_operator(signature, [MODULE]).function(out, *signature.args[1:], **signature.kwargs)
    assert torch.equal(out, expected[1])
    assert len(kernels.times) == tuned, "it is not tuned anew"


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("signature", "reason"),
    [
        (launch_of(module="os"), "not trusted"),
        (launch_of(module="__main__", name="popen"), "not trusted"),
        (launch_of("add"), "no function add"),
        (launch_of("grids"), "no function grids"),
        (launch_of("missing"), "no function missing"),
    ],
)
def test_object_that_is_not_a_kernel_of_a_trusted_module_is_refused(signature: Signature, reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        find_operator(signature, [MODULE])


@pytest.mark.usefixtures("kernels")
def test_kernel_of_the_main_file_is_found_in_a_trusted_module() -> None:
    operator = find_operator(replace(launch_of(), op="__main__:add_kernel"), [MODULE])
    out = torch.zeros(100)
    operator.function(X, Y, out, 100, 2.0, **KEYWORDS)
    assert torch.allclose(out, X + 2 * Y)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"grid": (1 << 40,)}, "the grid of a launch is not"),
        ({"grid": (1, 1, 1, 1)}, "the grid of a launch is not"),
        ({"grid": "4"}, "the grid of a launch is not"),
        ({"grid": (True,)}, "the grid of a launch is not"),
        ({"options": {"ir_override": "/tmp/kernel.ptx"}}, "ir_override"),
        ({"options": {"warmup": 1}}, "warmup"),
        ({"options": {"n": 1}}, "'n'"),
        ({"constants": {"BLOCK": 32}}, "parameters have changed"),
        ({"constants": {"BLOCK": 32, "OUT": torch.float32, "NEW": 1}}, "parameters have changed"),
        ({"constants": {"BLOCK": 32, "OUT": torch.complex64}}, "has no dtype torch.complex64"),
        ({"constants": {"BLOCK": Opaque("numpy.ndarray"), "OUT": torch.float32}}, "numpy.ndarray"),
        ({"constants": {"BLOCK": NamedSpec("os:system"), "OUT": torch.float32}}, "os is not trusted"),
        ({"constants": {"BLOCK": NamedSpec(f"{MODULE}:add"), "OUT": torch.float32}}, "no Triton kernel add"),
    ],
)
def test_launch_with_unsafe_options_is_refused(changes: dict[str, Any], reason: str) -> None:
    out = torch.zeros(100)
    with pytest.raises(Unsupported, match=reason):
        find_operator(launch_of(), [MODULE]).function(X, Y, out, 100, 2.0, **KEYWORDS | changes)
    assert not out.any()


def test_unit_contains_the_launches_of_its_calls(kernels: ModuleType, tmp_path: Path) -> None:
    with Capture(tmp_path / "t.jsonl"):
        expected = kernels.add(X, Y)
    (case,) = make_units(load(tmp_path / "t.jsonl"), Selection(), FUNCTION, [MODULE])
    assert case.op == f"{MODULE}:add"
    assert case.operator is not None
    settings = [leaf for leaf in case.signature.args if not isinstance(leaf, TensorSpec)]
    (result,) = case.operator.function(X, Y, *settings)
    assert torch.equal(result, expected)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_opreplay_runs_launches_of_a_trusted_module(kernels: ModuleType, tmp_path: Path) -> None:
    with Capture(tmp_path / "t.jsonl"):
        kernels.add(X, Y)
    shutil.copy(ROOT / "tests/support/models" / f"{MODULE}.py", tmp_path)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OPGRIP_STORE": ""}
    rows = {}
    for name, options, status in (("trusted", ["--extension", MODULE], 0), ("other", [], 1)):
        words = ["t.jsonl", "--op", "*add_kernel", "--budget", "0.05", "-o", f"{name}.json", *options]
        done = run_command("opreplay", *words, cwd=tmp_path, env=environment)
        assert done.returncode == status, done.stderr
        (rows[name],) = json.loads((tmp_path / f"{name}.json").read_text())["results"]
    assert rows["trusted"]["status"] == "ok"
    shapes = "float32[100] float32[100] float32[100] 100 2.0 grid=[4] BLOCK=32 OUT=float32 num_warps=2"
    assert rows["trusted"]["shapes"] == shapes
    assert rows["other"]["status"] == "unsupported"
    assert "--extension" in rows["other"]["error"]
