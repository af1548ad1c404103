"""What a module uses of torch's private interfaces, and what it does where a torch lacks one of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib import import_module
from typing import Any

FOUND = "found"


class PrivatePlaces:
    """The private places of torch that one module uses, each declared once with its fall-back."""

    def __init__(self) -> None:
        self._places: dict[str, tuple[Callable[[], bool], str]] = {}

    def take(self, name: str, fallback: Any, otherwise: str) -> Any:
        """What torch has under a dotted name; `fallback` where it has nothing there. Imports no module.

        Parameters
        ----------
        otherwise : what the fall-back does, in a few words
        """
        self.declare(name, lambda: _at(name) is not None, otherwise)
        thing = _at(name)
        return fallback if thing is None else thing

    def take_later(self, name: str, fallback: Any, otherwise: str) -> Callable[[], Any]:
        """The same for what lies in a module that takes torch long to import: a function that does so."""

        def is_there() -> bool:
            _import_around(name)
            return _at(name) is not None

        # captures ask at each new call
        @cache
        def thing() -> Any:
            return _at(name) if is_there() else fallback

        self.declare(name, is_there, otherwise)
        return thing

    def declare(self, name: str, is_usable: Callable[[], bool], otherwise: str) -> None:
        """Enter a place.

        Parameters
        ----------
        is_usable : tells whether this torch has it in a form that the module can use
        """
        if not otherwise.strip() or name in self._places:
            raise ValueError(f"{name} is declared once, with what is done where a torch lacks it")
        self._places[name] = (is_usable, otherwise)

    def report(self) -> dict[str, str]:
        """For each place `found`, or what is done instead."""
        return {name: FOUND if is_usable() else otherwise for name, (is_usable, otherwise) in self._places.items()}


def _import_around(name: str) -> None:
    """Import the modules in a dotted name."""
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
