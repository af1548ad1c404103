"""The names that the items of a sample's module have in it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from keyword import iskeyword

from opgrip.capture.grip.source.items import BuiltinItem, ImportItem, Item, PartItem, pieces_of


def names_for(items: Iterable[Item]) -> dict[Item, str]:
    """A name for each item: its own where that is free, else with its module's.

    Parameters
    ----------
    items : those that come first keep their names
    """
    items = list(items)
    owners_by_name: dict[str, Item] = {}
    shadowed = _bound_by_users(items)
    names: dict[Item, str] = {}
    reserved = {name for item in items for piece in pieces_of(item) for name in piece.absent}
    for item in items:
        if isinstance(item, BuiltinItem):
            names[item] = item.name
            reserved.add(item.name)
    for item in items:
        if isinstance(item, BuiltinItem | PartItem):
            continue
        for name in _candidates(item):
            owner = owners_by_name.setdefault(name, item) if name not in reserved else None
            if owner is item or (owner is not None and _same_package(owner, item)):
                if name not in shadowed.get(item, ()):
                    names[item] = name
                    break
                if owner is item:
                    del owners_by_name[name]
    return names


def _candidates(item: Item) -> Iterator[str]:
    name = item.name if item.name.isidentifier() and not iskeyword(item.name) else "function"
    yield name
    longer = f"{name}_{item.module.rpartition('.')[2].strip('_')}"
    yield longer
    yield from (f"{longer}_{number}" for number in count(2))


def _same_package(one: Item, other: Item) -> bool:
    """Whether both are imports that bind the name of one package: `import scipy`, `import scipy.optimize`."""
    return all(
        isinstance(item, ImportItem) and item.statement.attribute is None and item.statement.alias in ("", item.name)
        for item in (one, other)
    ) and _package(one) == _package(other)


def _package(item: Item) -> str:
    return item.statement.module.partition(".")[0] if isinstance(item, ImportItem) else ""


def _bound_by_users(items: Iterable[Item]) -> Mapping[Item, set[str]]:
    """The names that are local variables where an item is used, so that it cannot have them."""
    bound: dict[Item, set[str]] = {}
    for item in items:
        for piece in pieces_of(item):
            for link in piece.links:
                bound.setdefault(link.item, set()).update(piece.names.bound)
    return bound
