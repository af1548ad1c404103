"""Tests of `benchmark`: functions timed on inputs from a Python program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from opgrip.errors import ExistingFileError
from opgrip.replay import Results, benchmark
from opgrip.traces import UserError

FAST = {"iterations": 3, "warmup": 0}


def sigmoid_gelu(x: Tensor) -> Tensor:
    """Return the same function computed by another formula."""
    return x * (1 + torch.erf(x / 2**0.5)) / 2


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def write_and_return(x: Tensor) -> Tensor:
    return x.copy_(torch.softmax(x, -1))


def test_operator_is_timed_on_shapes_with_its_gradients() -> None:
    results = benchmark(
        torch.add, [{"self": (8, 4), "other": (8, 4)}, {"self": (2,), "other": 1}], backward=True, **FAST
    )
    rows = [(row.op, row.shapes, row.direction, row.status) for row in results]
    assert rows == [
        ("torch.add", "input=float32[8,4] other=float32[8,4]", "forward", "ok"),
        ("torch.add", "input=float32[8,4] other=float32[8,4]", "backward", "ok"),
        ("torch.add", "input=float32[2] other=1", "forward", "ok"),
        ("torch.add", "input=float32[2] other=1", "backward", "ok"),
    ]
    assert all(row.median_us for row in results)
    # nothing was captured
    assert {(row.captured_us, row.captured_total_us, row.share) for row in results} == {(None, None, None)}
    (repeated,) = benchmark(torch.add, [[(8, 4), (8, 4)]], repeats=2, **FAST)
    assert repeated.repeats == [3, 3]
    assert repr(results) == "<Results: 2 cases in 4 rows: 4 ok>"


def test_several_functions_run_on_the_same_inputs_in_all_modes() -> None:
    meta = torch.empty(5, 4, device="meta", dtype=torch.bfloat16).t()
    results = list(benchmark([functional.gelu, sigmoid_gelu], [[(8, 5)], [meta]], mode=["eager", "jit"], **FAST))
    assert [(row.shapes, row.mode, row.status) for row in results] == [
        (shapes, mode, "ok")
        for shapes in ("float32[8,5]", "bfloat16[4,5]")
        for _ in range(2)
        for mode in ("eager", "jit")
    ]
    assert [row.op.rpartition(".")[2] for row in results[::2]] == ["gelu", "sigmoid_gelu", "gelu", "sigmoid_gelu"]
    assert results[0].op == "torch.nn.functional.gelu"
    # the eager reference has no ratio
    is_reference = [row.op == "torch.nn.functional.gelu" and row.mode == "eager" for row in results]
    assert [row.ratio is None for row in results] == is_reference
    assert [row.max_abs is None for row in results] == is_reference
    assert all(row.allocated_bytes and row.peak_bytes for row in results)


def test_values_reach_the_function_unchanged() -> None:
    seen: list[object] = []

    def look(x: Tensor, sizes: list[int], *, mask: Tensor, ids: Tensor) -> Tensor:
        seen.append((x.tolist(), sizes, mask.dtype, ids.unique().tolist()))
        return x

    meta = {
        name: torch.empty(20, dtype=kind, device="meta") for name, kind in (("mask", torch.bool), ("ids", torch.long))
    }
    (row,) = benchmark(look, [{"x": torch.tensor([1.5]), "sizes": [2, 3], **meta}], **FAST)
    assert row.status == "ok"
    assert set(map(str, seen)) == {str(([1.5], [2, 3], torch.bool, [0]))}


CANDIDATES: dict[str, tuple[Any, Any, str, str]] = {
    "zeros": (softmax, torch.zeros_like, "wrong", "output 0: 128 of 128 elements differ, by 0.54 (rel 1) at most"),
    "nan": (softmax, lambda x: torch.softmax(x.sqrt(), -1), "wrong", "by inf (rel inf) at most"),
    "in place": (softmax, write_and_return, "ok", "writes into its arguments"),
    "out of place": (write_and_return, softmax, "ok", ""),
    "out argument": (lambda x: None if x.mul_(2) is x else x, lambda x: None, "wrong", "argument 0: 128 of 128"),
    "tuple for tensor": (
        softmax,
        lambda x: (softmax(x), x),
        "wrong",
        "returns a tuple of 2, but the reference returns a",
    ),
    "dictionary": (lambda x: {"a": x, "b": -x}, lambda x: {"b": -x, "a": x}, "ok", ""),
    "other keys": (lambda x: {"a": x}, lambda x: {"b": x}, "wrong", "a dictionary of 1: 'b', but"),
    "promoted": (softmax, lambda x: softmax(x.double()), "wrong", "output 0 is float64, not float32"),
    "integers": (lambda x: (x > 0).int(), lambda x: (x > 1).int(), "wrong", "elements differ, by 1 (rel 1)"),
    "other chance": (
        lambda x: functional.dropout(x + 9),
        lambda x: functional.dropout(x + 9, 0.1),
        "wrong",
        "distribution",
    ),
    "module": (torch.relu, torch.nn.ReLU(), "ok", ""),
    "raises": (softmax, lambda x: 1 // 0, "failed", "ZeroDivisionError"),
    "reference raises": (lambda x: 1 // 0, softmax, "ok", "not compared: the reference failed"),
    "object": (softmax, lambda x: iter(()), "ok", "not compared: there is a tuple_iterator among the results"),
}


@pytest.mark.parametrize("name", CANDIDATES)
def test_candidate_is_compared_with_the_first_function(name: str) -> None:
    reference, candidate, status, message = CANDIDATES[name]
    _, row, last = benchmark([reference, candidate, reference], [[(8, 16)]], threads=1, **FAST)
    assert row.status == status
    assert message in (row.error or row.note)
    if status == "wrong" and "elements differ" in message:
        assert f"by {row.max_abs:.2g} (rel {row.max_rel:.2g})" in row.error
    assert (row.ratio is None) == (status != "ok" or "reference failed" in message)
    # writes of one function never reach the inputs of another
    assert last.status == ("failed" if "reference raises" in name else "ok")


def test_gradients_of_a_candidate_are_compared() -> None:
    results = benchmark(
        [torch.exp, lambda x: x.exp(), lambda x: x.exp().detach() + 0 * x], [[(8,)]], backward=True, **FAST
    )
    assert [(row.direction, row.status) for row in results] == [
        *[("forward", "ok"), ("backward", "ok")] * 2,
        *[("forward", "ok"), ("backward", "wrong")],
    ]
    # for an output gradient of ones, the gradient of softmax is zero
    results = benchmark([softmax, softmax, lambda x: softmax(x).detach() + 0 * x], [[(4, 8)]], backward=True, **FAST)
    assert [row.status for row in results if row.direction == "backward"] == ["ok", "ok", "wrong"]


def test_functions_of_one_name_have_separate_printed_rows(tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    results = benchmark([torch.neg, lambda x: -x, lambda x: x], [[(3,)]], output=output, **FAST)
    assert [row.op for row in results] == ["torch.neg", f"{__name__}.<lambda>", f"{__name__}.<lambda> (2)"]
    assert len({row.key for row in results}) == 3
    *_, reason, summary = str(results).splitlines()
    assert reason.startswith(f"{__name__}.<lambda> (2): wrong: output 0: 3 of 3 elements differ")
    assert summary == repr(results) == "<Results: 3 cases: 2 ok, 1 wrong>"
    assert Results.load(output).frame["ratio"].notna().sum() == 1
    with pytest.raises(ExistingFileError, match=r"exists: choose another name, or replace it with force=True"):
        benchmark(torch.neg, [[(3,)]], output=output, **FAST)


@pytest.mark.parametrize(
    ("functions", "inputs", "words"),
    [
        pytest.param(torch.neg, [], "expected a list with the inputs of each case", id="no inputs"),
        pytest.param(torch.neg, [torch.ones(3)], "for each case, got Tensor", id="a tensor for a case"),
        pytest.param([], [[(3,)]], "no function to time", id="no function"),
        pytest.param({"neg": torch.neg}, [[(3,)]], "expected functions to time, got str", id="a dictionary"),
    ],
)
def test_functions_and_inputs_of_other_types_are_refused(functions: Any, inputs: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        benchmark(functions, inputs, **FAST)


def test_options_of_replay_are_refused_by_benchmark() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'top'"):
        benchmark(torch.neg, [[(3,)]], top=3)
    with pytest.raises(TypeError, match=r"'profile': it is an option of replay\(\) only"):
        benchmark(torch.neg, [[(3,)]], profile=True)
    with pytest.raises(UserError, match="unknown mode 'quick'"):
        benchmark(torch.neg, [[(3,)]], mode="quick")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"rtol": 0.1}, "nothing is compared"),
        ({"atol": 0.1}, "nothing is compared"),
        ({"force": True}, "no output is written"),
        ({"clock_warmup": 2}, "the clock of cpu is not raised"),
        ({"precision": 0.1}, "iterations is given"),
        ({"cache": "program,warm"}, "a function follows no calls"),
        ({"exec_mode": "events"}, "needs the clock of a GPU"),
        ({"tuner": "evolutionary"}, "tuner= needs tune="),
        ({"tune": 4}, "these modes cannot search"),
    ],
)
def test_options_without_effect_are_refused_by_benchmark(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        benchmark(torch.neg, [[(3,)]], **FAST, **options)
    if {"rtol", "atol"} & options.keys():
        benchmark([torch.neg, torch.neg], [[(3,)]], **FAST, **options)
