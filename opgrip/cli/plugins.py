"""Plug-ins, optional packages, and public names imported on first use."""

from __future__ import annotations

import importlib
import pkgutil
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, entry_points, requires
from itertools import chain
from types import ModuleType
from typing import Any, Generic, TypeVar

from opgrip.errors import UserError


class MissingPackageError(UserError):
    """Raised if an optional package is not installed; the hint is the command that installs it."""


def needed(module: str, extra: str = "") -> Any:
    """Import and return a module that loads slowly, or whose package is optional.

    extra : name of the extra of opgrip that lists the package; empty if none does
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        command = install_command(extra) or f"pip install {package}"
        raise MissingPackageError(f"{package} is not installed", command) from error


def install_command(extra: str) -> str:
    packages = _packages_of(extra)
    return f"pip install {' '.join(map(shlex.quote, packages))}" if packages else ""


def _packages_of(extra: str) -> list[str]:
    try:
        requirements = requires("opgrip") or []
    except PackageNotFoundError:
        return []
    packages: list[str] = []
    for requirement in requirements:
        package, _, marker = requirement.partition(";")
        if re.search(rf"""extra == ['"]{re.escape(extra)}['"]""", marker):
            other = re.fullmatch(r"opgrip\[(.+)\]", package.strip())
            packages += chain.from_iterable(map(_packages_of, other[1].split(","))) if other else [package.strip()]
    return packages


T = TypeVar("T")


class Registry(Generic[T]):
    """The plug-ins of one kind, by name; all are imported when one is first requested.

    group : name of the entry-point group in which other packages declare plug-ins, such as `opgrip.modes`
    """

    def __init__(self, package: str | None, group: str) -> None:
        self.package = package
        self.group = group
        self._entries: dict[str, T] = {}
        self._loaded = False

    def register(self, name: str) -> Callable[[T], T]:
        def enter(entry: T) -> T:
            self._entries[name] = entry
            return entry

        return enter

    def names(self) -> list[str]:
        return sorted(self._load())

    def get(self, name: str) -> T | None:
        return self._load().get(name)

    def values(self) -> list[T]:
        return [entry for _, entry in self.items()]

    def items(self) -> Iterator[tuple[str, T]]:
        return iter(sorted(self._load().items()))

    def _load(self) -> dict[str, T]:
        if not self._loaded:
            self._loaded = True
            if self.package is not None:
                package = importlib.import_module(self.package)
                for module in pkgutil.iter_modules(package.__path__, f"{self.package}."):
                    importlib.import_module(module.name)
            for entry_point in _entry_points(tuple(sys.path)).select(group=self.group):
                entry_point.load()
        return self._entries


@lru_cache(maxsize=1)
def _entry_points(search_path: tuple[str, ...]) -> Any:
    # cached by search path, because reading them takes milliseconds
    return entry_points()


class _NamedLikeItsFunction(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        function = self.__name__.rpartition(".")[2]
        raise TypeError(f"{self.__name__} is a package, not a function: use from {self.__name__} import {function}")


def lazy_names(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package, which import its public names on first use (PEP 562)."""

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules[package])
        module = import_module(modules[name])
        value = module if modules[name] == f"{package}.{name}" else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    if package.rpartition(".")[2] in modules:
        sys.modules[package].__class__ = _NamedLikeItsFunction

    return get, lambda: sorted({*vars(sys.modules[package]), *modules})
