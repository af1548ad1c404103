"""Functions timed on inputs that a Python program gives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from opgrip.replay import benchmark
from opgrip.traces import UserError

FAST = {"iterations": 3, "warmup": 0}


def quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def test_an_operator_is_timed_on_shapes_with_its_gradients() -> None:
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
    assert repr(results) == "<Results: 2 cases in 4 rows: 4 ok>"


def test_several_functions_run_on_the_same_inputs_under_modes() -> None:
    meta = torch.empty(5, 4, device="meta", dtype=torch.bfloat16).t()
    results = benchmark([quick_gelu, functional.gelu], [[(8, 5)], [meta]], mode=["eager", "jit"], **FAST)
    assert [(row.shapes, row.mode, row.status) for row in results] == [
        (shapes, mode, "ok")
        for shapes in ("float32[8,5]", "bfloat16[4,5]")
        for _ in range(2)
        for mode in ("eager", "jit")
    ]
    assert {row.op.rpartition(".")[2] for row in results} == {"quick_gelu", "gelu"}
    assert all((row.ratio is not None) == (row.mode == "jit") for row in results)


def test_values_are_what_they_are_given_as() -> None:
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


def test_a_function_that_fails_costs_its_row_alone() -> None:
    results = benchmark([lambda x: 1 // 0, torch.neg], [[(3,)]], **FAST)
    assert [(row.status, row.error) for row in results] == [
        ("failed", "ZeroDivisionError: integer division or modulo by zero"),
        ("ok", None),
    ]


def test_what_is_not_for_it_is_refused() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'top'"):
        benchmark(torch.neg, [[(3,)]], top=3)
    with pytest.raises(UserError, match="there is nothing to time"):
        benchmark(torch.neg, [])
    with pytest.raises(UserError, match="there is no mode 'quick'"):
        benchmark(torch.neg, [[(3,)]], mode="quick")
