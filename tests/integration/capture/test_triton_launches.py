"""Tests of launches of Triton kernels on the CPU, by Triton's interpreter."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from optional import optional

from opgrip.capture import Capture
from opgrip.traces import Trace, load
from opgrip.traces.schema.operator_arguments import is_launch, launch_facts

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
