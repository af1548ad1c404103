"""Arguments cast to another floating-point dtype on request."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from described_calls import HERE, described
from unusual_tensors import NESTED, QUANTIZED, SPARSE

from opgrip.replay.inputs.inputs import Inputs
from opgrip.replay.operators.lookup import Unsupported


def made(*args: Any, dtype: torch.dtype = torch.bfloat16) -> tuple[Any, ...]:
    specs, models = described(*args)
    inputs = Inputs(specs, {}, models, HERE, seed=0, dtype=dtype)
    assert inputs.nbytes == Inputs.bytes_needed(specs, {}, dtype)
    return inputs.make()[0]


def test_floats_are_cast_with_their_strides_and_other_dtypes_are_kept() -> None:
    weight = torch.randn(8, 6)[2:, ::2].t()
    args = made(weight, weight.double(), torch.arange(3), torch.ones(2, dtype=torch.bool), weight.to(torch.complex64))
    assert [tensor.dtype for tensor in args[:2]] == [torch.bfloat16] * 2
    assert [tensor.dtype for tensor in args[2:]] == [torch.int64, torch.bool, torch.complex64]
    assert (args[0].stride(), args[0].storage_offset()) == (weight.stride(), weight.storage_offset())
    assert args[0].untyped_storage().nbytes() == 2 * 47


def test_cast_values_are_the_nearest() -> None:
    (again,) = made(torch.tensor([0.1, 3.0, -7.25, math.inf]))
    assert torch.equal(again, torch.tensor([0.1, 3.0, -7.25, math.inf]).bfloat16())


def test_overflowing_values_become_the_largest_finite_one() -> None:
    lowest = torch.finfo(torch.float32).min
    mask, fill, all_of_it = made(
        torch.tensor([0.0, lowest, -math.inf]), lowest, torch.full((100,), lowest), dtype=torch.float16
    )
    assert mask.tolist() == [0.0, -65504.0, -math.inf]
    assert fill == -65504.0
    assert bool(all_of_it.isfinite().all())


def test_views_of_one_memory_share_it_after_a_cast() -> None:
    base = torch.zeros(4, 6)
    whole, row = made(base, base[1:2, 2:])
    row.fill_(7)
    assert float(whole.sum()) == 28


def test_memory_viewed_as_several_dtypes_is_not_cast() -> None:
    base = torch.zeros(4, 6)
    with pytest.raises(Unsupported, match="as several dtypes"):
        made(base, base.view(torch.int32))
    with pytest.raises(Unsupported, match="as several dtypes"):
        made(base, base.view(torch.complex64))
    kept = torch.zeros(4, dtype=torch.int32)
    assert [tensor.dtype for tensor in made(kept, kept.view(torch.int8))] == [torch.int32, torch.int8]


def test_dtype_arguments_follow_the_cast() -> None:
    x = torch.ones(3)
    assert made(x, torch.float32, torch.float64, torch.int64)[1:] == (torch.bfloat16, torch.float64, torch.int64)
    assert made(torch.arange(3), torch.float32)[1] == torch.bfloat16
    assert made(3, torch.int64) == (3, torch.int64)


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")
@pytest.mark.parametrize("name", ["coo", "csr", "bsr", "batch of csr"])
def test_values_of_sparse_tensors_are_cast(name: str) -> None:
    (again,) = made(SPARSE[name]())
    assert (again.dtype, again.layout) == (torch.bfloat16, SPARSE[name]().layout)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_cast() -> None:
    (again,) = made(NESTED["transposed"]())
    assert again.dtype == again.values().dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore:.*quantiz")
def test_quantized_and_8_bit_tensors_are_not_cast() -> None:
    quantized, small = made(QUANTIZED["quint8"](), torch.ones(3).to(torch.float8_e5m2))
    assert (quantized.dtype, small.dtype) == (torch.quint8, torch.float8_e5m2)


def test_only_floating_point_dtypes_are_accepted() -> None:
    with pytest.raises(ValueError, match="is not a floating-point dtype"):
        made(torch.ones(3), dtype=torch.int8)
