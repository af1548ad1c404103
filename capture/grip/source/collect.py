"""Search for everything that a function needs: from its free names to live objects, from these to their source, and so
on.

Each needed object becomes an item (see `items.py`), which holds pieces of source to include. An item that cannot be
included, for example a value that cannot be written as source, is refused with a reason, and so is everything that
needs it. Classes are added without their parts; `classes.py` adds these.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from opgrip.capture.grip.source.free_names import Mention, Role, Use, names_of
from opgrip.capture.grip.source.imports import is_imported, live_import, module_of, source_module
from opgrip.capture.grip.source.items import (
    BuiltinItem,
    ClassItem,
    FunctionItem,
    ItemTable,
    Link,
    Piece,
    SampleItem,
    ValueItem,
)
from opgrip.capture.grip.source.live_names import (
    Meaning,
    Treatment,
    namespace_of,
    python_function,
    resolve,
    treatment_of,
)
from opgrip.capture.grip.source.source_files import FunctionDefinition, find_class, find_definition
from opgrip.capture.grip.source.values import (
    Inexpressible,
    Refer,
    express,
    express_class,
    is_filled,
    is_literal,
    lost_defaults,
    made_by_call,
    statement_of,
)
from opgrip.errors import UserError

_FINDING_BY_TEXT = ("eval", "globals")
_OF_EACH_MODULE = ("__name__", "__file__", "__doc__", "__package__", "__spec__", "__builtins__", "__class__")
_USUAL_NAMES = {"numpy": "np", "pandas": "pd"}


class Collector(ItemTable):
    """Collects the items of one sample: everything that the sample must contain or import.

    words : strings in arguments that code may use to find functions by name

    mentions : attributes read from objects of unknown class, each with the piece and the item that read it
    class_reads : attributes read from a class, each with the item that reads it, and True if the item's definition
        reads it
    """

    def __init__(self, words: Iterable[str] = ()) -> None:
        super().__init__()
        self.words = frozenset(words)
        self.mentions: list[tuple[Mention, Piece, SampleItem]] = []
        self.class_reads: list[tuple[ClassItem, str, SampleItem, bool]] = []

    # from source to names

    def scan(self, piece: Piece, item: SampleItem) -> None:
        """Add items for everything that a piece of source needs; refuse `item`, to which the piece belongs, if that
        fails.
        """
        left_out = (*piece.dropped, *(node for node, _ in piece.defaults))
        skipped = {id(part) for node in left_out for part in ast.walk(node)}
        uses = [use for use in piece.names.uses if id(use.nodes[0]) not in skipped and use.name not in _OF_EACH_MODULE]
        # imports come first, so that helpers which import the same thing under another name use this name
        for use in sorted(uses, key=lambda use: resolve(use, piece.namespace).treatment is not Treatment.IMPORT):
            self._link(use, piece, item)
        self.mentions += [(_mangled(mention, piece), piece, item) for mention in piece.names.mentions]
        for statement in piece.names.imports:
            self._add_local_import(statement, piece, item)
        if any(isinstance(link.item, BuiltinItem) and link.item.name in _FINDING_BY_TEXT for link in piece.links):
            self._link_words(piece, item)
        for annotation in piece.names.annotations:
            meanings = [(use, resolve(use, piece.namespace)) for use in annotation.uses]
            piece.hints.append((annotation, meanings))

    def _link(self, use: Use, piece: Piece, item: SampleItem) -> None:
        early = use.role is Role.DEFINE
        if early and piece.cls is not None and use.name in vars(piece.cls):
            own = self.class_item(piece.cls)
            if isinstance(own, ClassItem):
                self.class_reads.append((own, use.name, item, False))
            return
        meaning = resolve(use, piece.namespace)
        needed = self._item_of(meaning, use, piece)
        if needed is None:
            piece.absent.add(use.name)
            return
        item.need(needed, early)
        piece.links.append(Link(use, needed, meaning.attribute_count))
        if not isinstance(needed, ClassItem):
            return
        needed.has_bases |= not meaning.rest or use.role is Role.CHECK
        if meaning.rest:
            self.class_reads.append((needed, meaning.rest[0], item, early))
        elif use.role is not Role.CHECK:
            needed.mark_made()

    def _link_words(self, piece: Piece, item: SampleItem) -> None:
        for word in sorted(piece.names.words | self.words):
            use = Use(word, (), (), Role.TEXT)
            meaning = resolve(use, piece.namespace)
            if meaning.treatment in (Treatment.FUNCTION, Treatment.CLASS):
                needed = self._item_of(meaning, use, piece)
                assert needed is not None
                item.need(needed)
                piece.links.append(Link(use, needed, 0))
                if isinstance(needed, ClassItem):
                    needed.mark_made()

    def _add_local_import(self, statement: ast.Import | ast.ImportFrom, piece: Piece, item: SampleItem) -> None:
        if isinstance(statement, ast.Import):
            names = [alias.name for alias in statement.names if live_import(alias.name, None) is not None]
            if not all(map(is_imported, names)):
                item.refuse(f"{item.name} imports {', '.join(names)} and not names from it")
            return
        module = source_module(statement, piece.namespace.variables.get("__package__") or "")
        objects = [(alias, live_import(module, alias.name)) for alias in statement.names]
        # no recorded call executed an import of a module that is not loaded
        if is_imported(module) or any(thing is None for _, thing in objects):
            return
        bound = []
        for alias, thing in objects:
            name = alias.asname or alias.name
            use = Use(name, (), (ast.Name(name),), Role.RUN)
            needed = self._item_of(Meaning(treatment_of(thing), thing, 0, ()), use, piece)
            if needed is not None:
                item.need(needed)
                bound.append((name, needed))
                if isinstance(needed, ClassItem):
                    needed.mark_made()
        piece.local_imports.append((statement, bound))

    # from live objects to items

    def _item_of(self, meaning: Meaning, use: Use, piece: Piece) -> SampleItem | None:
        thing, name = meaning.thing, (use.name, *use.attributes)[meaning.attribute_count]
        if meaning.treatment is Treatment.ABSENT:
            path = ".".join((use.name, *use.attributes))
            return self.add_refused(f"{path} does not exist") if meaning.attribute_count else None
        if meaning.treatment is Treatment.BUILTIN:
            return self.builtin(getattr(thing, "__name__", name))
        # the gripped function itself is included even if its package is normally imported
        if meaning.treatment is Treatment.FUNCTION or ("function", id(thing)) in self._items:
            return self.function(thing, name, meaning.rest[:1])
        if meaning.treatment is Treatment.CLASS:
            return self.class_item(thing)
        imported = self.add_import(thing, name, meaning.rest, piece)
        if imported is not None:
            return imported
        if isinstance(thing, ModuleType):
            return self.add_refused(f"the module {thing.__name__} is used as a value")
        if meaning.treatment is Treatment.IMPORT:
            return self.add_refused(f"{name} of {module_of(thing)} cannot be imported by name")
        return self._value(thing, name, piece, meaning.attribute_count)

    def function(self, thing: Any, name: str, attributes: tuple[str, ...] = ()) -> SampleItem:
        """Return the item for a Python function, with or without decorators; a new item is added with all that it
        needs.

        name : name by which the using code refers to the function; a new item gets this name
        attributes : attributes that are read from the function
        """
        key = ("function", id(thing))
        item = self._items.get(key)
        if item is None:
            item = FunctionItem(name, getattr(python_function(thing), "__module__", None) or "")
            self.remember(key, item, thing)
            self._take_function(item, thing)
        own = getattr(thing, "__dict__", {})
        for attribute in attributes:
            if attribute in own and isinstance(item, FunctionItem):
                item.attributes[attribute] = own[attribute]
                self.check(own[attribute], item, f"{name}.{attribute}")
        return item

    def _take_function(self, item: FunctionItem, thing: Any) -> None:
        if hasattr(thing, "registry") and hasattr(thing, "dispatch"):
            item.refuse(f"{item.name} uses functools.singledispatch, whose functions register themselves")
            return
        try:
            definition = find_definition(thing)
        except UserError as error:
            item.refuse(str(error))
            return
        if not definition.file.is_inside_function(definition.node):
            item.name = getattr(definition.node, "name", item.name)
        item.piece = self.function_piece(definition, item)
        self.scan(item.piece, item)

    def function_piece(self, definition: FunctionDefinition, item: SampleItem, cls: type | None = None) -> Piece:
        """Return the source of a function as a piece that belongs to `item`.

        Default arguments that refer to names which no longer exist are written as values.

        cls : class whose body contains the function, or None
        """
        namespace = namespace_of(definition.function)
        is_method = cls is not None and not isinstance(vars(cls).get(definition.function.__name__), staticmethod)
        names = names_of(definition.node, is_method)
        piece = Piece(definition.file, definition.node, namespace, names, cls, definition.dropped)
        piece.defaults = tuple(lost_defaults(definition, piece))
        for _, value in piece.defaults:
            self.check(value, item, "a default argument")
        return piece

    def class_item(self, cls: type) -> SampleItem:
        """Return the item for a class; `classes.py` adds methods and attributes to a new item later."""
        key = ("class", id(cls))
        if key in self._items:
            return self._items[key]
        try:
            file, node = find_class(cls)
        except UserError as error:
            item: SampleItem = ValueItem(cls.__name__, cls.__module__, value=cls, is_class=True)
            self.remember(key, item, cls)
            try:
                express_class(cls, self.referring(item))
            except Inexpressible:
                item.refuse(str(error))
            return item
        item = ClassItem(name=cls.__name__, module=cls.__module__, cls=cls, file=file, node=node)
        self.remember(key, item, cls)
        return item

    # values

    def _value(self, thing: Any, name: str, piece: Piece, attribute_count: int) -> SampleItem:
        key = ("value", name, id(thing))
        if key in self._items:
            return self._items[key]
        item = ValueItem(name, piece.namespace.module, value=thing)
        self.remember(key, item, thing)
        statement = None if attribute_count else statement_of(name, piece)
        if statement is not None and not is_literal(statement, thing):
            try:
                express(thing, self.referring(item))
                return item
            except Inexpressible:
                stays = made_by_call(statement, piece.namespace, thing) or is_filled(statement, thing)
                statement = statement if stays else None
        if statement is None:
            self.check(thing, item, "the value")
            return item
        item.piece = Piece(piece.file, statement, piece.namespace, names_of(statement))
        self.scan(item.piece, item)
        return item

    def check(self, value: Any, item: SampleItem, what: str) -> None:
        """Add items for the objects to which a value refers; refuse `item` if the value cannot be written as source.

        what : noun for the value in the reason
        """
        try:
            express(value, self.referring(item))
        except Inexpressible as error:
            item.refuse(f"{what} of {item.name} is {error}, which cannot be written as source")

    def referring(self, user: SampleItem) -> Refer:
        """Return a function that returns the name of an object in the sample, and notes that the item `user` needs
        it.
        """

        def refer(thing: Any) -> str:
            item = self.of_value(thing)
            if item is None:
                raise Inexpressible(f"{thing!r}")
            user.need(item, early=True)
            return item.name

        return refer

    def of_value(self, thing: Any) -> SampleItem | None:
        """Return the item for a class, function or module that a value contains, or None if it cannot be included."""
        treatment, name = treatment_of(thing), getattr(thing, "__name__", "").rpartition(".")[2]
        if treatment is Treatment.BUILTIN:
            return self.builtin(thing.__name__)
        if treatment is Treatment.FUNCTION:
            return self.function(thing, name)
        if treatment is Treatment.CLASS:
            item = self.class_item(thing)
            if isinstance(item, ClassItem):
                item.mark_made()
            return item
        return self.add_import(thing, _USUAL_NAMES.get(name, name), (), None)


def _mangled(mention: Mention, piece: Piece) -> Mention:
    name = mention.attribute
    if piece.cls is None or not name.startswith("__") or name.endswith("__"):
        return mention
    return Mention(f"_{piece.cls.__name__.lstrip('_')}{name}", mention.owner)
