"""The items of a sample's module, which item needs which, and the table of those that are known."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from opgrip.capture.grip.source.free_names import Annotation, Names, Use
from opgrip.capture.grip.source.imports import Import, import_of
from opgrip.capture.grip.source.live_names import Kind, Meaning, Namespace, kind_of
from opgrip.capture.grip.source.source_files import SourceFile


@dataclass(eq=False, slots=True)
class Item:
    """Something that a sample's module is to have.

    Attributes
    ----------
    name : that it has where it comes from
    module : where it comes from
    refusal : why it cannot be taken out, None where it can
    needs : what it does not work without
    early : those of `needs` that have to be there when it is defined
    may_need : what it works without, as far as can be told
    """

    name: str
    module: str
    refusal: str | None = None
    needs: list[Item] = field(default_factory=list)
    early: list[Item] = field(default_factory=list)
    may_need: list[Item] = field(default_factory=list)

    def need(self, item: Item, early: bool = False) -> None:
        """Enter what it does not work without."""
        self.needs.append(item)
        if early:
            self.early.append(item)

    def refuse(self, reason: str) -> None:
        """Enter why it cannot be taken out; the first reason counts."""
        self.refusal = self.refusal or reason


@dataclass(frozen=True, slots=True)
class Link:
    """A use of an item in a piece of source.

    Attributes
    ----------
    attribute_count : how many of the use's attributes the item's name stands for, besides the use's name
    """

    use: Use
    item: Item
    attribute_count: int


@dataclass(eq=False, slots=True)
class Piece:
    """A definition or statement that is taken over, and what its free names mean.

    Attributes
    ----------
    cls : the class in whose body it stands
    dropped : decorators that are left out
    defaults : default arguments that are written by their value, since what they name is gone
    absent : free names that nothing is bound to
    local_imports : import statements of the project inside functions, with the names that they bind
    hints : type annotations, with what the names in them mean
    """

    file: SourceFile
    node: ast.AST
    namespace: Namespace
    names: Names
    cls: type | None = None
    dropped: tuple[ast.expr, ...] = ()
    defaults: tuple[tuple[ast.expr, Any], ...] = ()
    links: list[Link] = field(default_factory=list)
    absent: set[str] = field(default_factory=set)
    local_imports: list[tuple[ast.ImportFrom, list[tuple[str, Item]]]] = field(default_factory=list)
    hints: list[tuple[Annotation, list[tuple[Use, Meaning]]]] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class BuiltinItem(Item):
    """What Python has under that name everywhere."""


@dataclass(eq=False, slots=True)
class ImportItem(Item):
    """What is imported."""

    statement: Import = field(default_factory=lambda: Import("", None, ""))


@dataclass(eq=False, slots=True)
class ValueItem(Item):
    """A constant.

    Attributes
    ----------
    piece : the statement that it is taken over from; None where it is written by its value
    is_class : the value is a class that a call of `namedtuple` or `Enum` made
    """

    value: Any = None
    piece: Piece | None = None
    is_class: bool = False


@dataclass(eq=False, slots=True)
class FunctionItem(Item):
    """A function.

    Attributes
    ----------
    attributes : those of its own that are read
    """

    piece: Piece | None = None
    attributes: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False, slots=True, kw_only=True)
class ClassItem(Item):
    """A class.

    Attributes
    ----------
    whole : all of it, where it is not taken by parts
    decorators : those that stay
    bases : the imported classes that it inherits from, itself or by classes that a sample may do without, as the source
        writes them, None where it does not
    is_live : there may be objects of it
    is_made : its constructor may be called
    has_bases : classes that it inherits from and that are imported matter
    """

    cls: type
    file: SourceFile
    node: ast.ClassDef
    whole: Piece | None = None
    decorators: list[Piece] = field(default_factory=list)
    bases: dict[type, Piece | None] = field(default_factory=dict)
    parts: dict[str, PartItem] = field(default_factory=dict)
    is_live: bool = False
    is_made: bool = False
    has_bases: bool = False


@dataclass(eq=False, slots=True)
class PartItem(Item):
    """A method or attribute of a class.

    Attributes
    ----------
    pieces : the statements that define it; none where it is written by its value
    """

    owner: ClassItem | None = None
    pieces: list[Piece] = field(default_factory=list)
    value: Any = None


def unit(item: Item) -> Item:
    """What is defined at the module's top level: the class of a part."""
    return item.owner if isinstance(item, PartItem) and item.owner is not None else item


def pieces_of(item: Item) -> list[Piece]:
    """The source that an item is made of, the parts of a class aside."""
    if isinstance(item, FunctionItem | ValueItem):
        return [item.piece] if item.piece is not None else []
    if isinstance(item, PartItem):
        return item.pieces
    if isinstance(item, ClassItem):
        bases = [piece for piece in item.bases.values() if piece is not None]
        return [*item.decorators, *bases, *([item.whole] if item.whole is not None else [])]
    return []


def refusals(items: Iterable[Item]) -> dict[Item, list[Item]]:
    """The items that cannot be taken out, each with the way from it to the one that is to blame, itself included."""
    users: dict[Item, list[Item]] = {}
    ways: dict[Item, list[Item]] = {}
    for item in items:
        for needed in item.needs:
            users.setdefault(needed, []).append(item)
        if item.refusal is not None:
            ways[item] = [item]
    queue = list(ways)
    for item in queue:
        for user in users.get(item, ()):
            if user not in ways:
                ways[user] = [user, *ways[item]]
                queue.append(user)
    return ways


def reachable(root: Item, refused: Iterable[Item]) -> list[Item]:
    """All that an item needs or may need and that can be taken out, itself included."""
    refused, reachable_items, queue = set(refused), {root: None}, [root]
    for item in queue:
        for needed in (*item.needs, *(one for one in item.may_need if one not in refused)):
            if needed not in reachable_items:
                reachable_items[needed] = None
                queue.append(needed)
    return list(reachable_items)


def in_order(root: Item, included: Iterable[Item]) -> list[Item]:
    """The items in an order in which each stands after what its definition needs, and helpers before their users."""
    included = list(included)
    units = list(dict.fromkeys(map(unit, included)))
    early: dict[Item, list[Item]] = {one: [] for one in units}
    needs: dict[Item, list[Item]] = {one: [] for one in units}
    for item in included:
        early[unit(item)] += [unit(one) for one in item.early]
        needs[unit(item)] += [unit(one) for one in (*item.needs, *item.may_need)]
    return list(_Order(early, needs).run([unit(root), *units]))


class _Order:
    """Visits what an item needs before it, without ever putting it before what its definition needs."""

    def __init__(self, early: dict[Item, list[Item]], needs: dict[Item, list[Item]]) -> None:
        self._early = early
        self._needs = needs
        self._open: set[Item] = set()
        self._done: dict[Item, None] = {}

    def run(self, items: Iterable[Item]) -> Iterable[Item]:
        for item in items:
            self._visit(item)
        return self._done

    def _visit(self, item: Item) -> None:
        if item in self._done or item in self._open:
            return
        self._open.add(item)
        for needed in self._early[item]:
            self._visit(needed)
        # a decorator calls its helpers when it decorates
        called = [one for needed in self._early[item] if isinstance(needed, FunctionItem) for one in self._all(needed)]
        for needed in (*called, *self._needs[item]):
            if needed in self._early and not self._open & set(self._all_early(needed)):
                self._visit(needed)
        self._open.discard(item)
        self._done[item] = None

    def _all(self, item: Item) -> Iterator[Item]:
        return self._closure(item, self._needs)

    def _all_early(self, item: Item) -> Iterator[Item]:
        return self._closure(item, self._early)

    @staticmethod
    def _closure(item: Item, edges: dict[Item, list[Item]]) -> Iterator[Item]:
        closure = {item: None}
        queue = [item]
        for one in queue:
            yield one
            new = [needed for needed in edges.get(one, ()) if needed not in closure]
            closure.update(dict.fromkeys(new))
            queue += dict.fromkeys(new)


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
