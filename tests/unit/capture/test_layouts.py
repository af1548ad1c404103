"""Signatures of calls on tensors of unusual layouts, shared only by equal layouts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from unusual_tensors import UNUSUAL, thin

from opgrip.capture.signatures.signatures import call_key, describe_call

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta"),
    pytest.mark.filterwarnings("ignore:.*quantiz"),
]


def no_values(argument: int | str) -> Callable[[torch.Tensor], None]:
    return lambda tensor: None


def key(*tensors: torch.Tensor) -> object:
    return call_key("op", tensors, {})


def spec(*tensors: torch.Tensor) -> object:
    return describe_call(tensors, {}, no_values)


def quantized(scale: float, zero_point: int) -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(3), scale, zero_point, torch.quint8)


def by_channel(*scales: float) -> torch.Tensor:
    return torch.quantize_per_channel(torch.ones(2, 2), torch.tensor(scales), torch.zeros(2), 0, torch.quint8)


def coo(*columns: int, coalesced: bool = False) -> torch.Tensor:
    indices = torch.tensor([[0] * len(columns), columns])
    return torch.sparse_coo_tensor(
        indices, torch.ones(len(columns)), (2, 9), check_invariants=True, is_coalesced=coalesced
    )


DIFFERENT: dict[str, tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor]]] = {
    "number of elements": (lambda: coo(1, 2), lambda: coo(1, 2, 3)),
    "coalesced": (lambda: coo(1, 2), lambda: coo(1, 2, coalesced=True)),
    "sparse dimensions": (lambda: torch.ones(3, 1).to_sparse(1), lambda: torch.ones(3, 1).to_sparse(2)),
    "compressed elements": (lambda: torch.eye(3).to_sparse_csr(), lambda: torch.ones(3, 3).to_sparse_csr()),
    "blocks": (lambda: torch.ones(4, 4).to_sparse_bsr((2, 2)), lambda: torch.ones(4, 4).to_sparse_bsr((1, 4))),
    "scale": (lambda: quantized(0.1, 0), lambda: quantized(0.2, 0)),
    "zero point": (lambda: quantized(0.1, 0), lambda: quantized(0.1, 1)),
    "scales": (lambda: by_channel(0.1, 0.2), lambda: by_channel(0.1, 0.3)),
    "nested sizes": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(4)]),
        lambda: torch.nested.nested_tensor([torch.ones(4), torch.ones(2)]),
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_keys_distinguish_everything_that_signatures_distinguish(name: str) -> None:
    first, second = DIFFERENT[name]
    assert key(first()) != key(second())
    assert spec(first()) != spec(second())


@pytest.mark.parametrize("name", UNUSUAL)
def test_equal_calls_have_one_key(name: str) -> None:
    assert key(UNUSUAL[name]()) == key(UNUSUAL[name]())
    assert spec(UNUSUAL[name]()) == spec(UNUSUAL[name]())


def test_shared_arguments_are_distinguished_from_equal_ones() -> None:
    one, other = thin(5, 6).to_sparse(), thin(5, 6).to_sparse()
    assert key(one, one) != key(one, other)
    assert spec(one, one) != spec(one, other)


def test_opaque_layout_is_recorded_without_its_parts() -> None:
    packed = torch.ones(3).to_mkldnn()
    ((described,), _) = describe_call((packed,), {}, lambda argument: lambda tensor: 0)
    assert (described.layout, described.made_of, described.values) == (packed.layout, None, None)
    assert key(packed) == key(torch.ones(3).to_mkldnn())


def test_pinned_memory_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: tensor.numel() == 4)
    ((plain, pinned, sparse), _) = describe_call(
        (torch.ones(3), torch.ones(4), torch.eye(4).to_sparse()), {}, no_values
    )
    assert (plain.pinned, pinned.pinned, sparse.pinned, sparse.made_of.values.pinned) == (False, True, False, True)
