"""Packages whose public names are loaded when they are asked for, so that what needs none of them starts at once.

::

    if TYPE_CHECKING:
        from opgrip.traces.table.trace import load as load

    PUBLIC = {"load": "opgrip.traces.table.trace"}
    load_on_demand(__name__)
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class LazyPackage(ModuleType):
    """A package with a table `PUBLIC` of its names and the modules that they are in."""

    def __getattr__(self, name: str) -> Any:
        module = self.__dict__["PUBLIC"].get(name)
        if module is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = getattr(import_module(module), name)
        self.__dict__[name] = value
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        # Python binds a module in its package when it is loaded: a public name of the same letters keeps its meaning
        if not (name in self.__dict__["PUBLIC"] and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*self.__dict__, *self.__dict__["PUBLIC"]})


def load_on_demand(package: str) -> None:
    """Let a package that is being imported load what its `PUBLIC` names when it is asked for."""
    sys.modules[package].__class__ = LazyPackage
