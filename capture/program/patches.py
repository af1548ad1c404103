"""Replacement of functions in modules and classes, now or when their module is loaded."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class LateModules(MetaPathFinder):
    """Import hook that calls `loaded` with each module whose name `is_watched` accepts, after the module was loaded."""

    def __init__(self, is_watched: Callable[[str], bool], loaded: Callable[[ModuleType], None]) -> None:
        self.is_watched = is_watched
        self.loaded = loaded

    def __enter__(self) -> LateModules:
        sys.meta_path.insert(0, self)
        return self

    def __exit__(self, *ignored: object) -> None:
        # the program may have replaced the list
        with suppress(ValueError):
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not self.is_watched(fullname):
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if find is None else find(fullname, path, target)
            if spec is not None:
                if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                    spec.loader = _ReportingLoader(spec.loader, self)
                return spec
        return None


class _ReportingLoader(Loader):
    def __init__(self, loader: Loader, late: LateModules) -> None:
        self.loader = loader
        self.late = late

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # restore the loader first: a module may ask for it while it is loaded
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        module.__loader__ = self.loader
        self.loader.exec_module(module)
        if self.late in sys.meta_path:
            self.late.loaded(module)


_MARK = "_opgrip_patch"


class Patches:
    def __init__(self) -> None:
        self._all: list[tuple[Any, str, _Patch]] = []

    def replace(self, owner: Any, name: str, watching: Callable[[Callable[..., Any]], Any]) -> None:
        """Replace the attribute `name` of a module or class by `watching(attribute)`, which returns a wrapper."""
        original = getattr(owner, name)
        patch = _Patch(original)
        wrapper = watching(original)
        setattr(wrapper, _MARK, patch)
        setattr(owner, name, wrapper)
        self._all.append((owner, name, patch))

    def undo(self) -> None:
        for owner, name, patch in reversed(self._all):
            patch.active = False
            function = getattr(owner, name)
            while (outermost := _patch_of(function)) is not None and not outermost.active:
                function = outermost.original
            setattr(owner, name, function)
        self._all.clear()


class _Patch:
    def __init__(self, original: Any) -> None:
        self.original = original
        self.active = True


def _patch_of(function: Any) -> _Patch | None:
    # the mark must be the function's own: functools.wraps copies the mark of the wrapped function
    patch = getattr(function, _MARK, None)
    return patch if isinstance(patch, _Patch) and patch.original is not function else None
