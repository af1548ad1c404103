"""Tests that operators behave on drawn values as on recorded ones."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from redrawn import drawn, fitted, read_again

from opgrip.traces.values import fit, value_model_from_json, value_model_to_json, value_models
from opgrip.traces.values.exact import Booleans, Constant, Exact, OneHot

DTYPES = [torch.float16, torch.bfloat16, torch.complex64, torch.int8, torch.uint64, torch.bool, torch.float8_e5m2]


def test_doubles_and_the_largest_integers_are_kept_exactly() -> None:
    for tensor in (
        torch.tensor([math.pi, 1e300, 5e-324], dtype=torch.float64),
        torch.tensor([2**64 - 1, 2**63, 0], dtype=torch.uint64),
        torch.tensor([-(2**63), 2**63 - 1]),
        torch.tensor([complex(math.nan, math.inf), 1j], dtype=torch.complex128),
    ):
        assert torch.equal(drawn(fitted(tensor, Exact), tensor).view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_small_tensor_of_any_dtype_is_kept_exactly(dtype: torch.dtype) -> None:
    tensor = torch.tensor([0, 1, 1, 0]).to(dtype)
    assert torch.equal(drawn(fitted(tensor, Exact), tensor).view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [0, 1])
def test_constant_of_any_dtype_is_kept_exactly(dtype: torch.dtype, value: int) -> None:
    tensor = torch.full((20, 30), value).to(dtype)
    assert torch.equal(drawn(fitted(tensor, Constant), tensor).view(torch.uint8), tensor.view(torch.uint8))


@given(st.integers(65, 5000), st.floats(0.01, 0.99), st.floats(0, 0.99), st.integers(0, 9))
@settings(deadline=None)
def test_booleans_keep_their_count_and_number_of_runs(count: int, share: float, stay: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    # runs of equal values, longer the more likely an element equals the one before
    pieces = (torch.rand(count, generator=generator) >= stay).cumsum(0)
    tensor = (torch.rand(count + 1, generator=generator) < share)[pieces]
    tensor[0], tensor[-1] = True, False
    model = fitted(tensor, Booleans)
    assert fit(drawn(model, tensor)) == model


@given(st.integers(20, 400), st.integers(2, 100), st.sampled_from([torch.bool, torch.int64, torch.float16]))
@settings(deadline=None)
def test_one_hot_rows_stay_one_hot_in_their_classes(rows: int, classes: int, dtype: torch.dtype) -> None:
    at = torch.randint(0, classes, (rows,), generator=torch.Generator().manual_seed(rows)) // 2
    at[0], at[-1] = 0, 1
    tensor = torch.nn.functional.one_hot(at, classes).to(dtype)
    if tensor.numel() <= 64:
        return
    again = drawn(fitted(tensor, OneHot), tensor)
    assert bool((again.float().sum(-1) == 1).all())
    assert torch.equal(again.float().sum(0), tensor.float().sum(0))


def test_fitting_draws_no_random_number_and_changes_nothing() -> None:
    tensors = [torch.randn(300), torch.randint(0, 9, (300,)), torch.rand(300, 4), torch.rand(300) > 0.5]
    tensors += [torch.randperm(300), torch.randn(40, 40).softmax(-1), torch.eye(20), torch.arange(300)]
    before = [tensor.clone() for tensor in tensors]
    state = torch.get_rng_state()
    for tensor in tensors:
        fit(tensor, requested_kinds=value_models.names())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, old) for tensor, old in zip(tensors, before, strict=True))


def test_drawing_uses_only_its_generator() -> None:
    tensors = [torch.randn(300).relu(), torch.randint(0, 9, (300,)), torch.rand(300) > 0.5, torch.randperm(300)]
    state = torch.get_rng_state()
    for tensor in tensors:
        model = fit(tensor)
        assert model is not None
        assert torch.equal(drawn(model, tensor, 3), drawn(model, tensor, 3))
        assert not torch.equal(drawn(model, tensor, 3), drawn(model, tensor, 4))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("view", ["transposed", "expanded", "stepped", "conjugated"])
def test_view_is_fitted_by_its_elements(view: str) -> None:
    tensor = torch.randn(40, 40, dtype=torch.complex64 if view == "conjugated" else torch.float32)
    shown = {
        "transposed": lambda: tensor.T,
        "expanded": lambda: tensor[:, :1].expand(40, 40),
        "stepped": lambda: tensor[::2, ::3],
        "conjugated": lambda: tensor.conj(),
    }[view]()
    assert fit(shown) == fit(shown.resolve_conj().contiguous())


OLD = {
    "exact": {"data": [1, 2.5]},
    "booleans": {"true": 3, "total": 10},
    "integers": {"frequent": [[7, 5]], "low": 0, "high": 9, "others": 60, "ascending": True},
    "boxes": {"first": 0, "low": [0] * 4, "high": [9.5] * 4, "whole": [False] * 4},
    "floats": {"mean": 0, "std": 1, "low": -2, "high": 2, "zeros": 0.5, "nan": 0, "inf": 0, "minus_inf": 0},
}


@pytest.mark.parametrize("name", OLD)
def test_model_of_the_first_format_is_read_and_drawn(name: str) -> None:
    model = value_model_from_json({"type": "values", "id": 3, "model": name, "later": {"unheard": "of"}, **OLD[name]})
    assert model.draw((13, 4), torch.float32, torch.Generator()).shape == (13, 4)
    assert read_again(model) == model
    assert OLD[name].items() <= value_model_to_json(model).items()
