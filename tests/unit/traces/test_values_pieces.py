"""Sampling in pieces of large tensors whose elements do not matter individually."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from opgrip.traces.values import fit_argument
from opgrip.traces.values.exact import Booleans, Constant, OneHot
from opgrip.traces.values.floats import Floats, Probabilities
from opgrip.traces.values.integers import Integers
from opgrip.traces.values.model import MOST
from opgrip.traces.values.order import Permutation
from opgrip.traces.values.progression import Progression

ADD = "aten.add.Tensor"


class CountingElements(TorchDispatchMode):
    """Counter of the elements that operators process, except operators that return views."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if all(item.alias_info is None for item in func._schema.returns):
            self.elements += sum(value.numel() for value in args if isinstance(value, torch.Tensor))
        return func(*args, **(kwargs or {}))


def test_fitting_does_not_read_all_elements() -> None:
    # a terabyte, of which one row exists
    tensor = torch.randn(1, 300).expand(1 << 30, 300)
    with CountingElements() as counting:
        model = fit_argument(ADD, "self", tensor)
    assert 300 < counting.elements < 10 * MOST
    assert isinstance(model, Floats)
    assert abs(model.mean - tensor[0].mean()) < 0.2


@pytest.mark.parametrize(
    ("tensor", "kind"),
    [
        (torch.zeros(1 << 20), Constant),
        (torch.nn.functional.one_hot(torch.randint(0, 9, (10_000,)), 9), OneHot),
        (torch.rand(1 << 16) < 0.5, Booleans),
        (torch.arange(1 << 16), Progression),
        (torch.arange(100.0).repeat_interleave(1000), Progression),
        (torch.randperm(1 << 16), Permutation),
        (torch.randn(8, 2000).softmax(-1), Probabilities),
        (torch.randn(4, 30_000).softmax(-1), Probabilities),
        (torch.randint(0, 80, (1 << 16,)), Integers),
        (torch.randn(256, 256).relu(), Floats),
    ],
)
def test_kind_of_a_large_tensor_is_found_from_its_pieces(tensor: torch.Tensor, kind: type) -> None:
    model = fit_argument(ADD, "self", tensor)
    assert isinstance(model, kind)
    again = model.draw(tuple(tensor.shape), tensor.dtype, torch.Generator().manual_seed(0))
    assert again.shape == tensor.shape
    assert abs((again == 0).double().mean() - (tensor == 0).double().mean()) < 0.05


def test_fitting_a_mask_of_minus_infinity_does_not_warn() -> None:
    mask = torch.full((128, 128), -math.inf).triu(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(fit_argument(ADD, "self", mask), Floats)
        for values in (torch.tensor([-(2**63), 2**63 - 1]), torch.tensor([-1.7e308, 1.7e308], dtype=torch.float64)):
            assert fit_argument(ADD, "self", values.repeat(500)) is not None


def test_sorted_rows_are_found_from_pieces() -> None:
    model = fit_argument(ADD, "self", torch.randn(500, 100).sort(dim=-1).values)
    assert isinstance(model, Floats)
    assert model.by_row
    assert not fit_argument(ADD, "self", torch.randn(500, 100)).by_row  # type: ignore[union-attr]


@pytest.mark.parametrize(("op", "argument"), [("aten.nonzero.default", "self"), ("aten.masked_select.default", "mask")])
def test_all_elements_are_counted_if_they_determine_an_output_size(op: str, argument: str) -> None:
    mask = torch.zeros(1 << 20, dtype=torch.bool)
    mask[12345] = mask[777777] = True
    model = fit_argument(op, argument, mask)
    assert isinstance(model, Booleans)
    assert model.true == 2
    if op == "aten.nonzero.default":
        model = fit_argument(op, argument, mask.float() * 0.3)
        assert isinstance(model, Floats)
        assert round((1 - model.zeros) * (1 << 20)) == 2
