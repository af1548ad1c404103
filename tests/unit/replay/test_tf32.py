"""TF32 products of another mode while eager used float32. No GPU is needed: the CPU replaces it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from opgrip.platform.precisions import read_precision
from opgrip.replay.operators import contexts as tf32
from opgrip.replay.operators.contexts import restored
from opgrip.replay.run.checks.reference import Reference, observe
from opgrip.replay.run.checks.verdicts import ResultVerdict, Tolerance

aten = torch.ops.aten
LOST_BITS = 13
PLACES = "cuda.matmul:{},cudnn.conv:{}"


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if read_precision("cuda.matmul") is None:
        pytest.skip("torch has one precision for all places")
    monkeypatch.setattr(tf32, "KINDS", ("cpu",))


def cut(tensor: Tensor) -> Tensor:
    """Return the part of float32 values that tensor cores read: without the last bits."""
    return (tensor.view(torch.int32) & -(1 << LOST_BITS)).view(torch.float32)


def rounded(tensor: Tensor) -> Tensor:
    return cut(tensor.view(torch.int32).add(1 << (LOST_BITS - 1)).view(torch.float32))


def of_tf32(function: Callable[..., Tensor], how: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda *args: function(*(how(arg.clone()) for arg in args))


def verdict(
    function: Callable[..., Tensor], met: Callable[..., Tensor], args: tuple[Tensor, ...], allowed: str
) -> ResultVerdict:
    op = str(function) if isinstance(function, torch._ops.OpOverload) else None
    with restored({"fp32_precision": PLACES.format(*allowed.split("/"))}):
        return Reference(function, lambda: (args, {}), False, op).check(observe(met, (args, {}), False), Tolerance())


def convolved(image: Tensor, kernel: Tensor) -> Tensor:
    return aten.convolution.default(image, kernel, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)


CALLS = {
    "a product": (aten.mm.default, (torch.randn(64, 256), torch.randn(256, 32)), "tf32/ieee"),
    "a batch of products": (aten.bmm.default, (torch.randn(4, 16, 512), torch.randn(4, 512, 8)), "tf32/ieee"),
    "a convolution": (convolved, (torch.randn(2, 16, 12, 12), torch.randn(8, 16, 3, 3)), "ieee/tf32"),
    "a layer": (lambda x, w: (x @ w).relu().softmax(-1), (torch.randn(64, 128), torch.randn(128, 10)), "tf32/ieee"),
}


@pytest.mark.parametrize("how", [cut, rounded])
@pytest.mark.parametrize("name", CALLS)
def test_tf32_products_are_right_if_torch_allows_tf32(name: str, how: Callable[[Tensor], Tensor]) -> None:
    function, args, allowed = CALLS[name]
    met = of_tf32(function, how)
    assert verdict(function, met, args, allowed).right
    # exact products are right too if eager used TF32
    assert verdict(met, function, args, allowed).right
    forbidden = "/".join(reversed(allowed.split("/")))
    assert not verdict(function, met, args, forbidden).right
    assert not verdict(function, met, args, "ieee/ieee").right


@pytest.mark.parametrize("name", CALLS)
def test_wrong_results_remain_wrong_with_tf32(name: str) -> None:
    function, args, allowed = CALLS[name]

    def one_off(*tensors: Tensor) -> Tensor:
        result = function(*tensors).clone()
        result.view(-1)[7] += 0.1 * result.abs().max()
        return result

    assert not verdict(function, one_off, args, allowed).right
    assert not verdict(function, lambda *tensors: function(*tensors) * 1.01, args, allowed).right


def test_operators_without_products_require_full_precision() -> None:
    args = (torch.randn(100), torch.randn(100))
    assert not verdict(aten.add.Tensor, of_tf32(torch.add, cut), args, "tf32/tf32").right


def test_cpu_has_no_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tf32, "KINDS", ("cuda",))
    function, args, _ = CALLS["a product"]
    assert not verdict(function, of_tf32(function, rounded), args, "tf32/tf32").right
