"""Private torch APIs that capture uses, and its behaviour without them."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from absent_places import is_declared, load_without_places, private_names

from opgrip.capture.torch_compat import compiler_private, torch_private
from opgrip.platform import activity_records
from opgrip.platform.private_apis import FOUND

MODULES = pytest.mark.parametrize(
    "module",
    [torch_private, compiler_private, activity_records],
    ids=lambda module: module.__name__,
)


@MODULES
def test_every_private_name_is_declared_with_its_fallback(module: ModuleType) -> None:
    places = module.private_places()
    assert all(state.strip() for state in places.values())
    public = {"torch.utils._python_dispatch.TorchDispatchMode"}
    assert [name for name in private_names(module) if name not in public and not is_declared(name, places)] == []


@MODULES
def test_torch_without_private_names_reports_the_fallbacks(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = load_without_places(module, monkeypatch)
    places = bare.private_places()
    assert set(places) == set(module.private_places())
    # this API is not found by its name
    assert {name for name, state in places.items() if state == FOUND} <= {"torch.classes.c10d.ReduceOp.op"}


def test_calls_are_distinguished_by_keys_without_private_names(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = load_without_places(torch_private, monkeypatch)
    x = torch.rand(3)
    bare.load_private()
    assert bare.arguments_check((x,)) is None
    assert bare.keywords_check({"dim": 0}) is None
    assert bare.storage_address(x) == bare.storage_address(x[1:]) != bare.storage_address(x + 1)
    assert bare.current_autograd_node() is None
    assert bare.sequence_number() == 0
    assert not load_without_places(compiler_private, monkeypatch).hide_from_compiler(lambda: None)
    assert not bare.is_transformed(x)
    assert not bare.is_transforming()
    with bare.without_modes(), bare.without_functions():
        assert torch.equal(x + 1, 1 + x)


def test_higher_order_operators_are_plain_calls_without_private_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bare = load_without_places(compiler_private, monkeypatch)
    assert not bare.is_higher_order(torch.ops.higher_order.cond)
    assert bare.own_code(torch.ops.higher_order.cond, (), {}) is None
    assert bare.place_of_compiling() is None
