"""The items of a sample that are known so far, by what they stand for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from opgrip.capture.grip.source.imports import import_of
from opgrip.capture.grip.source.items import BuiltinItem, ClassItem, ImportItem, Item, Piece
from opgrip.capture.grip.source.resolve import Kind, kind_of

_DYNAMIC = ("exec", "__import__")


class ItemTable:
    """The items of one sample, each once."""

    def __init__(self) -> None:
        self._items: dict[object, Item] = {}
        # what is known by its id has to stay
        self._live_objects: list[Any] = []

    @property
    def items(self) -> list[Item]:
        """All of them."""
        return list(self._items.values())

    @property
    def classes(self) -> list[ClassItem]:
        """Those of classes."""
        return [item for item in self._items.values() if isinstance(item, ClassItem)]

    def ensure_item(self, key: object, make: Callable[[], Item]) -> Item:
        """The item that is known by a key, made where there is none yet."""
        if key not in self._items:
            self.remember(key, make())
        return self._items[key]

    def knows_function(self, thing: Any) -> bool:
        """Whether there is an item of a function already."""
        return ("function", id(thing)) in self._items

    def remember(self, key: object, item: Item, thing: Any = None) -> None:
        """Enter an item."""
        self._items[key] = item
        self._live_objects.append(thing)

    def add_refused(self, reason: str) -> Item:
        """An item that cannot be had."""
        item = Item("", "", reason)
        self.remember(item, item)
        return item

    def builtin(self, name: str) -> Item:
        """The item of something that Python has under its name everywhere."""
        item = self.ensure_item(("builtin", name), lambda: BuiltinItem(name, "builtins"))
        if name in _DYNAMIC:
            item.refuse(f"{name}() finds names while it runs")
        return item

    def add_import(self, thing: Any, name: str, attributes: tuple[str, ...], piece: Piece | None) -> Item | None:
        """The item of something that is imported, None for what no import statement gives.

        Parameters
        ----------
        name : that it is used by
        attributes : that are read off it
        piece : that uses it, None for a value
        """
        file = piece.file if piece is not None else None
        package = (piece.namespace.variables.get("__package__") or "") if piece is not None else ""
        statement = import_of(name, attributes, thing, file, package)
        import_item = self._items.get(("import", id(thing)))
        if statement is None or (import_item is not None and statement.alias):
            return import_item
        key = ("import", id(thing)) if statement.alias else ("import", statement.module)
        if key not in self._items:
            self.remember(key, ImportItem(statement.name, statement.module, statement=statement), thing)
        return self._items[key]

    def find_item(self, thing: Any) -> Item | None:
        """The item of a class, function or module within a value, where there is one already."""
        kind = kind_of(thing)
        if kind is Kind.BUILTIN:
            return self._items.get(("builtin", thing.__name__))
        return self._items.get((kind.name.lower(), id(thing)))
