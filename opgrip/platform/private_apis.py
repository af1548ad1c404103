"""Access to private interfaces of torch, each with a value to use with versions of torch that lack it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib import import_module
from typing import Any

FOUND = "found"


class PrivatePlaces:
    """The private interfaces of torch that a module uses, and for each one, what happens if torch lacks it."""

    def __init__(self) -> None:
        self._places: dict[str, tuple[Callable[[], bool], str]] = {}

    def take(self, name: str, fallback: Any, otherwise: str) -> Any:
        """Return the torch object with a dotted name, or `fallback` if this version of torch lacks it."""
        self.declare(name, lambda: _at(name) is not None, otherwise)
        thing = _at(name)
        return fallback if thing is None else thing

    def take_later(self, name: str, fallback: Any, otherwise: str) -> Callable[[], Any]:
        def is_there() -> bool:
            _import_around(name)
            return _at(name) is not None

        # captures call this for each new signature
        @cache
        def thing() -> Any:
            return _at(name) if is_there() else fallback

        self.declare(name, is_there, otherwise)
        return thing

    def declare(self, name: str, is_usable: Callable[[], bool], otherwise: str) -> None:
        if not otherwise.strip() or name in self._places:
            raise ValueError(f"{name} is declared twice, or without a text on what happens if torch lacks it")
        self._places[name] = (is_usable, otherwise)

    def report(self) -> dict[str, str]:
        return {name: FOUND if is_usable() else otherwise for name, (is_usable, otherwise) in self._places.items()}


def _import_around(name: str) -> None:
    parts = name.split(".")
    with suppress(ImportError):
        for length in range(1, len(parts)):
            import_module(".".join(parts[:length]))


def _at(name: str) -> Any:
    first, *rest = name.split(".")
    thing: Any = sys.modules.get(first)
    for part in rest:
        thing = getattr(thing, part, None)
    return thing
