"""Items of a sample's module (functions, classes, imports, constants), their dependencies, and their order."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import ModuleType
from typing import Any

from opgrip.capture.grip.source.free_names import Annotation, FreeNames, Use
from opgrip.capture.grip.source.live_objects import (
    Meaning,
    Namespace,
    SourceFile,
    Treatment,
    is_imported,
    is_of_python,
    module_of,
    treatment_of,
)

WIDTH = 100  # maximum number of characters in a line of an import statement


@dataclass(frozen=True, slots=True)
class Import:
    """An import statement that binds one name.

    attribute : `Tensor` in `from torch import Tensor`; None for `import torch`
    """

    module: str
    attribute: str | None
    alias: str

    @property
    def name(self) -> str:
        return self.alias or self.module.partition(".")[0]


def import_of(name: str, attributes: Sequence[str], thing: Any, file: SourceFile | None, package: str) -> Import | None:
    plain: Import | None = None
    for statement in _bindings(file).get(name, ()) if file is not None else ():
        for candidate in _read(statement, name, package):
            bound = live_import(candidate.module if candidate.alias else candidate.name, candidate.attribute)
            if bound is not thing or not is_imported(candidate.module):
                continue
            if candidate.alias:
                return candidate
            if candidate.module.split(".")[1:] == list(attributes[: candidate.module.count(".")]):
                plain = candidate if plain is None or len(candidate.module) > len(plain.module) else plain
    return plain or _import_by_object(name, thing)


@lru_cache(maxsize=512)
def _bindings(file: SourceFile) -> dict[str, list[ast.Import | ast.ImportFrom]]:
    statements_by_name: dict[str, list[ast.Import | ast.ImportFrom]] = {}
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Import | ast.ImportFrom) and not file.is_inside_function(node):
            for alias in node.names:
                statements_by_name.setdefault(alias.asname or alias.name.partition(".")[0], []).append(node)
    return statements_by_name


def _read(statement: ast.Import | ast.ImportFrom, name: str, package: str) -> list[Import]:
    imports = []
    for alias in statement.names:
        if isinstance(statement, ast.ImportFrom):
            if (alias.asname or alias.name) == name:
                imports.append(Import(source_module(statement, package), alias.name, name))
        elif alias.asname == name or (alias.asname is None and alias.name == name):
            imports.append(Import(alias.name, None, name))
        elif alias.asname is None and alias.name.startswith(name + "."):
            imports.append(Import(alias.name, None, ""))
    return imports


def source_module(statement: ast.ImportFrom, package: str) -> str:
    """Return the full name of the module in a `from` statement, which may be relative to `package`."""
    if not statement.level:
        return statement.module or ""
    parents = package.split(".")
    parents = parents[: len(parents) - statement.level + 1]
    return ".".join([*parents, *([statement.module] if statement.module else [])])


def live_import(module: str, attribute: str | None) -> Any:
    """Return the loaded module or attribute that an import statement names."""
    if attribute is None:
        return sys.modules.get(module)
    value = getattr(sys.modules.get(module), attribute, None)
    return sys.modules.get(f"{module}.{attribute}") if value is None else value


def _import_by_object(name: str, thing: Any) -> Import | None:
    module = module_of(thing)
    if module is None or not is_imported(module):
        return None
    if isinstance(thing, ModuleType):
        parent, _, last = module.rpartition(".")
        if last == name and parent:
            return Import(parent, last, name)
        return Import(module, None, name)
    own = getattr(thing, "__name__", None)
    if not isinstance(own, str):
        return None
    parts = module.split(".")
    # prefer torch.nn to torch.nn.modules.conv
    for length in range(1, len(parts) + 1):
        prefix = ".".join(parts[:length])
        for attribute in dict.fromkeys((own, name)):
            if getattr(sys.modules.get(prefix), attribute, None) is thing:
                return Import(prefix, attribute, name if attribute != own else own)
    return None


def render(imports: Iterable[Import]) -> str:
    unique_imports = set(imports)
    sections = [{one for one in unique_imports if is_of_python(one.module)}]
    sections.append(unique_imports - sections[0])
    return "\n\n".join("\n".join(_section(section)) for section in sections if section)


def _section(imports: set[Import]) -> list[str]:
    plain = sorted(
        f"import {one.module}" + (f" as {one.alias}" if one.alias not in ("", one.module) else "")
        for one in imports
        if one.attribute is None
    )
    merged: dict[str, list[Import]] = {}
    for one in imports:
        if one.attribute is not None:
            merged.setdefault(one.module, []).append(one)
    return plain + [_from_statement(module, merged[module]) for module in sorted(merged, key=str.lower)]


def _from_statement(module: str, members: list[Import]) -> str:
    names = [
        f"{one.attribute}" + (f" as {one.alias}" if one.alias != one.attribute else "")
        for one in sorted(members, key=lambda one: _member_order(one.attribute or ""))
    ]
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= WIDTH:
        return line
    return "\n".join([f"from {module} import (", *(f"    {name}," for name in names), ")"])


def _member_order(name: str) -> tuple[int, str]:
    return (0 if name.isupper() and len(name) > 1 else 1 if name[:1].isupper() else 2), name.lower()


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


def in_order(root: SampleItem, included: Iterable[SampleItem]) -> list[SampleItem]:
    """Return the items of the module's top level in the order in which the sample defines them."""
    included = list(included)
    units = list(dict.fromkeys(map(unit, included)))
    early: dict[SampleItem, list[SampleItem]] = {one: [] for one in units}
    needs: dict[SampleItem, list[SampleItem]] = {one: [] for one in units}
    for item in included:
        early[unit(item)] += [unit(one) for one in item.early]
        needs[unit(item)] += [unit(one) for one in (*item.needs, *item.may_need)]
    return list(_Order(early, needs).run([unit(root), *units]))


class _Order:
    def __init__(self, early: dict[SampleItem, list[SampleItem]], needs: dict[SampleItem, list[SampleItem]]) -> None:
        self._early = early
        self._needs = needs
        self._open: set[SampleItem] = set()
        self._done: dict[SampleItem, None] = {}

    def run(self, items: Iterable[SampleItem]) -> Iterable[SampleItem]:
        for item in items:
            self._visit(item)
        return self._done

    def _visit(self, item: SampleItem) -> None:
        if item in self._done or item in self._open:
            return
        self._open.add(item)
        for needed in self._early[item]:
            self._visit(needed)
        # a decorator calls its helpers while it decorates
        functions = [needed for needed in self._early[item] if isinstance(needed, FunctionItem)]
        called = [one for needed in functions for one in self._closure(needed, self._needs)]
        for needed in (*called, *self._needs[item]):
            if needed in self._early and not self._open & set(self._closure(needed, self._early)):
                self._visit(needed)
        self._open.discard(item)
        self._done[item] = None

    @staticmethod
    def _closure(item: SampleItem, edges: dict[SampleItem, list[SampleItem]]) -> Iterator[SampleItem]:
        queue, closure = [item], {item}
        for one in queue:
            yield one
            queue += dict.fromkeys(needed for needed in edges.get(one, ()) if needed not in closure)
            closure.update(edges.get(one, ()))


_DYNAMIC = ("exec", "__import__")


class ItemTable:
    def __init__(self) -> None:
        self._items: dict[object, SampleItem] = {}
        # keep objects alive that are looked up by id
        self._live_objects: list[Any] = []

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
