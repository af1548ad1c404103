"""Array views of tensors, which leave the tensors unchanged."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from opgrip.traces.values import value_models
from opgrip.traces.values.model import array_of, fit

REAL = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
REAL += [torch.float16, torch.float32, torch.float64]
WIDE = [torch.uint16, torch.uint32, torch.uint64]
COMPLEX = [torch.complex64, torch.complex128]
VIEWS = {
    "whole": lambda tensor: tensor,
    "transposed": lambda tensor: tensor.t(),
    "every second row": lambda tensor: tensor[::2],
    "columns": lambda tensor: tensor[:, 1:3],
    "expanded": lambda tensor: tensor[:, :1].expand(-1, 7),
    "one element": lambda tensor: tensor[1, 1],
    "empty": lambda tensor: tensor[:0],
}


def filled(dtype: torch.dtype, rows: int = 6, columns: int = 5) -> torch.Tensor:
    return torch.arange(rows * columns).sub(7).reshape(rows, columns).to(dtype)


def is_resizable(tensor: torch.Tensor) -> bool:
    return bool(tensor.untyped_storage().resizable())


@given(st.sampled_from([*REAL, *WIDE, *COMPLEX]), st.sampled_from(sorted(VIEWS)))
def test_array_equals_that_of_torch_and_the_tensor_remains_resizable(dtype: torch.dtype, view: str) -> None:
    tensor = VIEWS[view](filled(dtype))
    array = array_of(tensor)
    assert is_resizable(tensor)
    assert not (array.size and array.flags.writeable)
    expected = tensor.numpy()
    assert array.dtype == expected.dtype
    assert array.shape == expected.shape
    assert np.array_equal(array, expected)
    if tensor.numel():
        assert np.shares_memory(array, expected)


def test_array_keeps_its_memory_alive() -> None:
    array = array_of(torch.full((1 << 20,), 7.0))
    gc.collect()
    torch.full((1 << 20,), 8.0)
    assert (array == 7.0).all()


def test_freed_memory_is_not_accessed() -> None:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="freed"):
        array_of(tensor)


@pytest.mark.parametrize("exact", [True, False], ids=["all", "pieces"])
@pytest.mark.parametrize("dtype", [*REAL, *WIDE, torch.bfloat16, *COMPLEX], ids=str)
def test_tensor_remains_resizable_after_fitting(dtype: torch.dtype, exact: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    draws: list[Any] = [
        filled(dtype),
        filled(dtype, 100, 100),
        torch.randint(0, 100, (100, 100), generator=generator).to(dtype),
        torch.rand(100, 100, generator=generator).mul(40).to(dtype),
        torch.randperm(10_000, generator=generator).to(dtype),
        torch.arange(10_000).div(3).to(dtype),
    ]
    for tensor in draws:
        for view in (tensor, tensor.t()):
            fit(view, value_models.names(), exact)
            assert is_resizable(tensor)
