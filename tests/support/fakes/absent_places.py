"""Module `torch_private.py` as under a torch that lacks all of its private APIs."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from opgrip.platform import private_apis as private_places


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
