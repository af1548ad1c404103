"""Private torch APIs that capture and replay use, and their behaviour without them."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from opgrip.capture.torch_compat import compiler_private, torch_private
from opgrip.platform import activity_records
from opgrip.platform import private_apis as private_places
from opgrip.platform.private_apis import FOUND
from opgrip.replay.operators import torch_private as replay_private
from opgrip.replay.operators.lookup import Unsupported

MODULES = pytest.mark.parametrize(
    "module",
    [torch_private, compiler_private, activity_records, replay_private],
    ids=lambda module: module.__name__,
)


def load_without_places(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return a second copy of a module, loaded as if torch lacked all private APIs."""
    monkeypatch.setattr(private_places, "_at", lambda name: None)
    spec = importlib.util.spec_from_file_location(f"{module.__name__}_bare", str(module.__file__))
    assert spec is not None
    assert spec.loader is not None
    bare = importlib.util.module_from_spec(spec)
    # dataclasses look their module up
    monkeypatch.setitem(sys.modules, spec.name, bare)
    spec.loader.exec_module(bare)
    return bare


def private_names(module: ModuleType) -> Iterator[str]:
    """Yield the private names of torch that a module's code reads itself, such as `torch._C._dispatch_keys`."""
    for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if name.startswith("torch.") and any(part.startswith("_") for part in name.split(".")) and "__" not in name:
                yield name
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch."):
            for alias in node.names:
                if "._" in f"{node.module}.{alias.name}":
                    yield f"{node.module}.{alias.name}"


def is_declared(name: str, places: dict[str, str]) -> bool:
    """Return True if a dotted name is a key of `places`, the declared private APIs, a parent or an attribute of one."""
    return any(place == name or place.startswith(f"{name}.") or name.startswith(f"{place}.") for place in places)


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


def test_higher_order_operators_are_plain_calls_without_private_names(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = load_without_places(compiler_private, monkeypatch)
    assert not bare.is_higher_order(torch.ops.higher_order.cond)
    assert bare.own_code(torch.ops.higher_order.cond, (), {}) is None
    assert bare.place_of_compiling() is None


def test_modes_that_need_a_missing_private_name_are_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = load_without_places(replay_private, monkeypatch)
    bare.compile_in_this_process()
    assert "inductor" in bare.dynamo_backends()
    with pytest.raises(Unsupported, match="what dynamo compiled"):
        bare.graphs_compiled()
    with pytest.raises(Unsupported, match="AOTInductor"):
        bare.packaged(None, "nowhere", make=True)
    assert bare.traced_backward(lambda x: [x], [torch.ones(1)], lambda results: None) is None
