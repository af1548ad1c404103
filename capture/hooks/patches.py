"""Replaces functions where callers look them up, and puts them back in whichever order captures end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_MARK = "_opgrip_patch"


class Patches:
    """The functions that one watch has replaced."""

    def __init__(self) -> None:
        self._all: list[tuple[Any, str, _Patch]] = []

    def replace(self, owner: Any, name: str, watching: Callable[[Callable[..., Any]], Any]) -> None:
        """Put what `watching` makes of an owner's attribute in its place."""
        original = getattr(owner, name)
        patch = _Patch(original)
        wrapper = watching(original)
        setattr(wrapper, _MARK, patch)
        setattr(owner, name, wrapper)
        self._all.append((owner, name, patch))

    def undo(self) -> None:
        """Put back all that was replaced; what another capture has replaced since stays, and passes by this one."""
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
    # of the function itself: functools.wraps copies the mark of what it wraps
    patch = getattr(function, _MARK, None)
    return patch if isinstance(patch, _Patch) and patch.original is not function else None
