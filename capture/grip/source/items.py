"""Items of a sample's module (functions, classes, imports, constants), and the search for all that a function needs."""

from __future__ import annotations

import abc
import ast
import enum
import functools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any, Generic, Protocol, is_typeddict

import torch

from opgrip.capture.grip.source.free_names import (
    Annotation,
    AttributeOwner,
    FreeNames,
    Mention,
    Role,
    Use,
    bound_by,
    names_of,
)
from opgrip.capture.grip.source.live_objects import (
    FunctionDefinition,
    Import,
    Meaning,
    Mentioned,
    Namespace,
    SourceFile,
    Treatment,
    evaluate,
    find_class,
    find_definition,
    first_line,
    import_of,
    is_imported,
    live_import,
    module_of,
    named_in,
    namespace_of,
    namespace_of_class,
    python_function,
    resolve,
    source_module,
    treatment_of,
)
from opgrip.capture.grip.source.values import (
    Inexpressible,
    Refer,
    express,
    express_class,
    is_filled,
    is_literal,
    is_plain,
    lost_defaults,
    made_by_call,
    statement_of,
)
from opgrip.errors import UserError


@dataclass(eq=False, slots=True)
class SampleItem:
    name: str
    module: str
    refusal: str | None = None
    needs: list[SampleItem] = field(default_factory=list)
    early: list[SampleItem] = field(default_factory=list)
    may_need: list[SampleItem] = field(default_factory=list)

    def need(self, item: SampleItem, early: bool = False) -> None:
        self.needs.append(item)
        if early:
            self.early.append(item)

    def refuse(self, reason: str) -> None:
        self.refusal = self.refusal or reason


@dataclass(frozen=True, slots=True)
class Link:
    """A use of an item, by its name, in a piece of source.

    attribute_count : number of attributes that the item's name replaces: 1 if `boxes.area` becomes `area`
    """

    use: Use
    item: SampleItem
    attribute_count: int


@dataclass(eq=False, slots=True)
class Piece:
    """A definition or statement of the original source that the sample includes.

    dropped : decorators that are left out
    """

    file: SourceFile
    node: ast.AST
    namespace: Namespace
    names: FreeNames
    cls: type | None = None
    dropped: tuple[ast.expr, ...] = ()
    defaults: tuple[tuple[ast.expr, Any], ...] = ()
    links: list[Link] = field(default_factory=list)
    absent: set[str] = field(default_factory=set)
    local_imports: list[tuple[ast.ImportFrom, list[tuple[str, SampleItem]]]] = field(default_factory=list)
    hints: list[tuple[Annotation, list[tuple[Use, Meaning]]]] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class BuiltinItem(SampleItem):
    pass


@dataclass(eq=False, slots=True)
class ImportItem(SampleItem):
    statement: Import = field(default_factory=lambda: Import("", None, ""))


@dataclass(eq=False, slots=True)
class ValueItem(SampleItem):
    """A constant: a module-level variable with its value.

    piece : statement to include; None to write the value as source
    """

    value: Any = None
    piece: Piece | None = None
    is_class: bool = False


@dataclass(eq=False, slots=True)
class FunctionItem(SampleItem):
    piece: Piece | None = None
    attributes: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False, slots=True, kw_only=True)
class ClassItem(SampleItem):
    """A class, of which the sample may contain only some methods and attributes.

    is_live : True if objects of the class may exist
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

    def mark_made(self) -> None:
        self.is_live = self.is_made = self.has_bases = True


@dataclass(eq=False, slots=True)
class PartItem(SampleItem):
    owner: ClassItem | None = None
    pieces: list[Piece] = field(default_factory=list)
    value: Any = None


def unit(item: SampleItem) -> SampleItem:
    return item.owner if isinstance(item, PartItem) and item.owner is not None else item


def pieces_of(item: SampleItem) -> list[Piece]:
    if isinstance(item, FunctionItem | ValueItem):
        return [item.piece] if item.piece is not None else []
    if isinstance(item, PartItem):
        return item.pieces
    if isinstance(item, ClassItem):
        bases = [piece for piece in item.bases.values() if piece is not None]
        return [*item.decorators, *bases, *([item.whole] if item.whole is not None else [])]
    return []


def refusals(items: Iterable[SampleItem]) -> dict[SampleItem, list[SampleItem]]:
    """For each item that cannot be extracted, return the items that lead from it to the cause."""
    users: dict[SampleItem, list[SampleItem]] = {}
    ways: dict[SampleItem, list[SampleItem]] = {}
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


def reachable(root: SampleItem, refused: Iterable[SampleItem]) -> list[SampleItem]:
    """Return `root` and all items that it needs directly or through other items, without `refused` ones."""
    refused, reachable_items, queue = set(refused), {root: None}, [root]
    for item in queue:
        for needed in (*item.needs, *(one for one in item.may_need if one not in refused)):
            if needed not in reachable_items:
                reachable_items[needed] = None
                queue.append(needed)
    return list(reachable_items)


_DYNAMIC = ("exec", "__import__")
_FINDING_BY_TEXT = ("eval", "globals")
_OF_EACH_MODULE = ("__name__", "__file__", "__doc__", "__package__", "__spec__", "__builtins__", "__class__")
_USUAL_NAMES = {"numpy": "np", "pandas": "pd"}


# base classes that only matter for type checkers, or that only enforce that methods are defined
NO_BASES: frozenset[Any] = frozenset({object, abc.ABC, Generic, Protocol})

CONSTRUCTORS = ("__new__", "__init__")
_UNUSED_NAMES = """
    __repr__ __str__ __format__ __reduce__ __reduce_ex__ __getstate__ __setstate__ __deepcopy__ __copy__ __del__
    __dir__ __init_subclass__ __class_getitem__ __sizeof__ __subclasshook__
"""
_UNUSED = frozenset(_UNUSED_NAMES.split())  # special methods that do not affect results

_PLAIN_CLASSES = (type("", (), {}), type("", (abc.ABC,), {}))
_OF_TYPING = ("__annotations__", "__orig_bases__", "__parameters__", "__slots__")
_OF_EACH_CLASS = frozenset({name for cls in _PLAIN_CLASSES for name in vars(cls)} | {*_OF_TYPING})


def is_taken(cls: type) -> bool:
    return not is_imported(cls.__module__)


def is_whole(cls: type) -> bool:
    made_of_fields = {"__dataclass_fields__", "__attrs_attrs__"} & vars(cls).keys() or hasattr(cls, "_field_defaults")
    return bool(made_of_fields) or issubclass(cls, enum.Enum) or is_typeddict(cls)


def provider_of(mro: tuple[type, ...], name: str) -> type | None:
    return next((cls for cls in mro if name in vars(cls)), None) if name not in _OF_EACH_CLASS else None


def is_special(cls: type, name: str) -> bool:
    if not (name.startswith("__") and name.endswith("__")) or name in _UNUSED:
        return False
    functions = [python_function(one) for one in functions_of(vars(cls)[name])]
    return any(one is not None and one.__qualname__.rpartition(".")[0] == cls.__qualname__ for one in functions)


def overrides(cls: type, name: str) -> bool:
    bases = [base for base in cls.__mro__ if not is_taken(base) and base not in NO_BASES]
    # modules have too many such methods
    return torch.nn.Module not in bases and not name.startswith("__") and any(name in vars(base) for base in bases)


def functions_of(attribute: Any) -> list[Any]:
    if isinstance(attribute, property):
        return [one for one in (attribute.fget, attribute.fset, attribute.fdel) if one is not None]
    for name in ("__func__", "func"):
        inner = getattr(attribute, name, None)
        if inner is not None and not isinstance(attribute, functools.partial):
            return [inner]
    return [attribute] if python_function(attribute) is not None else []


def makes_descriptor(decorator: ast.expr, piece: Piece, value: Any) -> bool:
    if isinstance(decorator, ast.Attribute) and decorator.attr in ("setter", "getter", "deleter"):
        return True
    decorator_object = evaluate(decorator, piece.namespace)
    return (
        isinstance(decorator_object, type)
        and isinstance(value, decorator_object)
        and is_imported(decorator_object.__module__)
    )


def defines(node: ast.stmt, name: str, cls: type) -> bool:
    if isinstance(node, ast.AnnAssign) and node.value is None:
        return False
    # Python mangles names with two leading underscores
    prefix = f"_{cls.__name__.lstrip('_')}__"
    return bool({name, name.replace(prefix, "__", 1) if name.startswith(prefix) else name} & bound_by(node))


def has_changed(node: ast.Assign | ast.AnnAssign, value: Any) -> bool:
    return node.value is not None and is_plain(node.value) and not is_literal(node, value)


def _mangled(mention: Mention, piece: Piece) -> Mention:
    name = mention.attribute
    if piece.cls is None or not name.startswith("__") or name.endswith("__"):
        return mention
    return Mention(f"_{piece.cls.__name__.lstrip('_')}{name}", mention.owner)


class Collector:
    """Collects the items of one sample: everything that the sample must contain or import.

    own : classes of the objects whose method is the sample
    """

    def __init__(self, words: Iterable[str] = (), own: Iterable[type] = ()) -> None:
        self._items: dict[object, SampleItem] = {}
        # keep objects alive that are looked up by id
        self._live_objects: list[Any] = []
        self.words = frozenset(words)
        self.mentions: list[tuple[Mention, Piece, SampleItem]] = []
        self.class_reads: list[tuple[ClassItem, str, SampleItem, bool]] = []
        self._own = frozenset(own)
        self._reads = 0

    @property
    def items(self) -> list[SampleItem]:
        return list(self._items.values())

    @property
    def classes(self) -> list[ClassItem]:
        return [item for item in self._items.values() if isinstance(item, ClassItem)]

    def ensure_item(self, key: object, make: Callable[[], SampleItem]) -> SampleItem:
        if key not in self._items:
            self.remember(key, make())
        return self._items[key]

    def remember(self, key: object, item: SampleItem, thing: Any = None) -> None:
        self._items[key] = item
        self._live_objects.append(thing)

    def add_refused(self, reason: str) -> SampleItem:
        item = SampleItem("", "", reason)
        self.remember(item, item)
        return item

    def builtin(self, name: str) -> SampleItem:
        item = self.ensure_item(("builtin", name), lambda: BuiltinItem(name, "builtins"))
        if name in _DYNAMIC:
            item.refuse(f"it calls {name}(), which looks up names while it runs")
        return item

    def add_import(self, thing: Any, name: str, attributes: tuple[str, ...], piece: Piece | None) -> SampleItem | None:
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

    def find_item(self, thing: Any) -> SampleItem | None:
        kind = treatment_of(thing)
        if kind is Treatment.BUILTIN:
            return self._items.get(("builtin", thing.__name__))
        return self._items.get((kind.name.lower(), id(thing)))

    # from source to names

    def scan(self, piece: Piece, item: SampleItem) -> None:
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
                item.refuse(
                    f"{item.name} contains `import {', '.join(names)}`, but a sample can only replace `from` imports"
                )
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
            return self.add_refused(f"code uses the module {thing.__name__} itself, not only its attributes")
        if meaning.treatment is Treatment.IMPORT:
            return self.add_refused(f"{name} of {module_of(thing)} cannot be imported by name")
        return self._value(thing, name, piece, meaning.attribute_count)

    def function(self, thing: Any, name: str, attributes: tuple[str, ...] = ()) -> SampleItem:
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
        namespace = namespace_of(definition.function)
        is_method = cls is not None and not isinstance(vars(cls).get(definition.function.__name__), staticmethod)
        names = names_of(definition.node, is_method)
        piece = Piece(definition.file, definition.node, namespace, names, cls, definition.dropped)
        piece.defaults = tuple(lost_defaults(definition, names, namespace, cls))
        for _, value in piece.defaults:
            self.check(value, item, "a default argument")
        return piece

    def class_item(self, cls: type) -> SampleItem:
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
        statement = None if attribute_count else statement_of(name, piece.file, piece.namespace)
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
        try:
            express(value, self.referring(item))
        except Inexpressible as error:
            item.refuse(f"{what} of {item.name} is {error}, which cannot be written as source")

    def referring(self, user: SampleItem) -> Refer:
        def refer(thing: Any) -> str:
            item = self.of_value(thing)
            if item is None:
                raise Inexpressible(f"{thing!r}")
            user.need(item, early=True)
            return item.name

        return refer

    def of_value(self, thing: Any) -> SampleItem | None:
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

    # methods and attributes of classes

    def meet(self, thing: type | FunctionType, user: SampleItem) -> None:
        item = self.function(thing, thing.__name__) if isinstance(thing, FunctionType) else self.class_item(thing)
        self._needs(user, item)
        if isinstance(item, ClassItem):
            item.is_live = item.has_bases = True

    def part(self, cls: type, name: str) -> SampleItem:
        item = self.class_item(cls)
        if not isinstance(item, ClassItem) or is_whole(cls):
            if isinstance(item, ClassItem):
                item.is_live = True
            return item
        if name not in item.parts:
            part = item.parts[name] = PartItem(name, cls.__module__, owner=item)
            part.need(item)
            self.remember(("part", id(cls), name), part)
            self._take(part, cls, item)
        return item.parts[name]

    def _take(self, part: PartItem, cls: type, item: ClassItem) -> None:
        value = vars(cls)[part.name]
        statements = [node for node in item.node.body if defines(node, part.name, cls)]
        try:
            part.pieces = list(self._pieces(statements, value, part, cls, item))
        except UserError as error:
            part.refuse(str(error))
        if part.pieces:
            for piece in part.pieces:
                self.scan(piece, part)
        else:
            part.value = value
            self.check(value, part, f"{cls.__name__}.{part.name}")

    def _pieces(
        self, statements: list[ast.stmt], value: Any, part: PartItem, cls: type, item: ClassItem
    ) -> Iterator[Piece]:
        namespace = namespace_of_class(cls)
        functions = {
            (inner.__code__.co_filename, inner.__code__.co_firstlineno): function
            for function in functions_of(value)
            if (inner := python_function(function)) is not None
        }
        all_definitions = all(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in statements)
        for node in statements:
            if all_definitions and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                function = functions.get((item.file.name, first_line(node)))
                if function is None:
                    continue
                definition = find_definition(function)
                piece = self.function_piece(definition, part, cls)
                piece.dropped = tuple(one for one in definition.dropped if not makes_descriptor(one, piece, value))
                yield piece
            elif not isinstance(node, ast.Assign | ast.AnnAssign) or not has_changed(node, value):
                yield Piece(item.file, node, namespace, names_of(node), cls)

    # attributes that may be read

    def expand(self, objects: Iterable[Any], root: SampleItem) -> None:
        objects = list(objects)
        before = (-1, -1)
        while (now := self._size()) != before:
            before = now
            self._read_off_classes()
            mentioned = Mentioned(mention for mention, _, _ in self.mentions)
            for thing in named_in(objects, mentioned):
                self.meet(thing, root)
            for item in self.classes:
                if item.is_live or item.has_bases:
                    self._take_bases(item)
                if item.is_live:
                    self._take_live(item, mentioned)
            self._take_own()

    def _size(self) -> tuple[int, int]:
        flags = sum(item.is_live + item.is_made + item.has_bases for item in self.classes)
        return len(self.items), flags

    def _read_off_classes(self) -> None:
        reads = self.class_reads
        while self._reads < len(reads):
            item, name, user, early = reads[self._reads]
            self._reads += 1
            cls = provider_of(item.cls.__mro__, name)
            if cls is None or is_imported(cls.__module__):
                # an inherited function that creates objects, such as the `apply` of autograd functions
                item.mark_made()
                continue
            user.need(self.part(cls, name), early)
            if cls is not item.cls:
                user.need(self.class_item(cls), early)
            if isinstance(vars(cls)[name], classmethod):
                item.mark_made()

    def _take_bases(self, item: ClassItem) -> None:
        meta = type(item.cls)
        if not is_imported(meta.__module__):
            self.meet(meta, item)
        if is_whole(item.cls):
            self._take_whole(item)
            return
        for between in map(self.find_item, item.cls.__mro__[1:]):
            if isinstance(between, ClassItem):
                between.has_bases = True
        if item.bases:
            return
        for cls in filter(is_taken, item.cls.__mro__):
            written_as = self._base_expressions(cls)
            for base in cls.__bases__:
                if is_imported(base.__module__) and base not in NO_BASES:
                    item.bases[base] = written_as.get(base)
        for base, piece in item.bases.items():
            if piece is not None:
                self.scan(piece, item)
            elif (base_item := self.of_value(base)) is not None:
                item.need(base_item, early=True)
        self._take_decorators(item)

    def _base_expressions(self, cls: type) -> dict[type, Piece]:
        item = self.class_item(cls)
        if not isinstance(item, ClassItem):
            return {}
        namespace = namespace_of_class(cls)
        # type arguments of a generic class matter only to type checkers
        plain = (one.value if isinstance(one, ast.Subscript) else one for one in item.node.bases)
        base_objects = ((evaluate(one, namespace), one) for one in plain)
        pieces = ((base, Piece(item.file, one, namespace, names_of(one))) for base, one in base_objects)
        return {base: piece for base, piece in pieces if isinstance(base, type)}

    def _take_decorators(self, item: ClassItem) -> None:
        namespace = namespace_of_class(item.cls)
        for decorator in item.node.decorator_list:
            if self._stays(decorator, item.cls):
                piece = Piece(item.file, decorator, namespace, names_of(decorator))
                item.decorators.append(piece)
                self.scan(piece, item)

    @staticmethod
    def _stays(decorator: ast.expr, cls: type) -> bool:
        # decorators of the program usually register classes, and are dropped
        decorator_object = evaluate(
            decorator.func if isinstance(decorator, ast.Call) else decorator, namespace_of_class(cls)
        )
        return is_imported(module_of(decorator_object) or "opgrip")

    def _take_whole(self, item: ClassItem) -> None:
        if item.whole is not None:
            return
        dropped = tuple(one for one in item.node.decorator_list if not self._stays(one, item.cls))
        namespace = namespace_of_class(item.cls)
        item.whole = Piece(item.file, item.node, namespace, names_of(item.node), dropped=dropped)
        self.scan(item.whole, item)

    def _take_live(self, item: ClassItem, mentioned: Mentioned) -> None:
        cls = item.cls
        for name in {name for base in filter(is_taken, cls.__mro__) for name in vars(base)}:
            provider = provider_of(cls.__mro__, name)
            if provider is None or is_imported(provider.__module__):
                continue
            if name in CONSTRUCTORS:
                if item.is_made:
                    self._needs(item, self.part(provider, name))
            elif name == "forward" and issubclass(cls, torch.nn.Module) and cls not in self._own:
                self._needs(item, self.part(provider, name))
            elif mentioned.of_others(name) or is_special(provider, name) or overrides(cls, name):
                part = self.part(provider, name)
                if part not in item.may_need:
                    item.may_need.append(part)

    def _take_own(self) -> None:
        for mention, piece, user in tuple(self.mentions):
            if piece.cls is None or mention.owner is AttributeOwner.ANY:
                continue
            for cls in self._own_classes(piece.cls):
                mro = cls.__mro__
                if mention.owner is AttributeOwner.SUPER:
                    mro = mro[mro.index(piece.cls) + 1 :]
                names = {name for base in mro for name in vars(base) if re.fullmatch(mention.attribute, name)}
                for name in names:
                    self._needs_from(mro, name, user)
        for item in self.classes:
            for part in list(item.parts.values()):
                for piece in part.pieces:
                    self._take_calls(piece, item, part)

    def _take_calls(self, piece: Piece, item: ClassItem, part: PartItem) -> None:
        is_class_method = isinstance(vars(item.cls).get(part.name), classmethod)
        for cls in self._own_classes(item.cls):
            own_item = self.class_item(cls)
            if piece.names.makes_own or (piece.names.calls_self and is_class_method):
                if isinstance(own_item, ClassItem):
                    own_item.mark_made()
            elif piece.names.calls_self and issubclass(cls, torch.nn.Module):
                self._needs_from(cls.__mro__, "forward", part)

    def _own_classes(self, cls: type) -> list[type]:
        # classes of the objects that can be `self` in a method of `cls`
        live = [item.cls for item in self.classes if item.is_live and cls in item.cls.__mro__]
        return live or [cls]

    def _needs_from(self, mro: tuple[type, ...], name: str, user: SampleItem) -> None:
        provider = provider_of(mro, name)
        if provider is not None and is_taken(provider):
            self._needs(user, self.part(provider, name))

    @staticmethod
    def _needs(user: SampleItem, needed: SampleItem) -> None:
        if needed is not user and needed not in user.needs:
            user.need(needed)
