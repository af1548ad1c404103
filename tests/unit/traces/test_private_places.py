"""Declarations of private torch APIs, each with the behaviour without it."""

from __future__ import annotations

import pytest

from opgrip.platform.private_apis import FOUND, PrivatePlaces


def test_existing_private_names_are_used_and_missing_ones_replaced() -> None:
    import torch

    places = PrivatePlaces()
    assert places.take("torch.UntypedStorage", None, "nothing") is torch.UntypedStorage
    assert places.take("torch._C._no_such_thing.at_all", 7, "seven") == 7
    assert places.take_later("torch._C._no_such_thing", 8, "eight")() == 8
    assert places.take_later("torch._no_such_module.thing", 9, "nine")() == 9
    assert places.report() == {
        "torch.UntypedStorage": FOUND,
        "torch._C._no_such_thing.at_all": "seven",
        "torch._C._no_such_thing": "eight",
        "torch._no_such_module.thing": "nine",
    }


def test_module_of_a_private_name_is_imported_on_demand() -> None:
    from torch._dynamo.utils import counters

    assert PrivatePlaces().take_later("torch._dynamo.utils.counters", None, "nothing")() is counters


@pytest.mark.parametrize("otherwise", ["", "  "])
def test_private_name_without_a_fallback_is_an_error(otherwise: str) -> None:
    with pytest.raises(ValueError, match=r"torch\._C\._storage_address"):
        PrivatePlaces().take("torch._C._storage_address", None, otherwise)


def test_private_name_that_is_declared_twice_is_an_error() -> None:
    places = PrivatePlaces()
    places.take("torch.Tensor", None, "nothing")
    with pytest.raises(ValueError, match="declared twice"):
        places.take("torch.Tensor", None, "nothing")
