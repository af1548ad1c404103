"""Conversion of a gripped function to the text of a self-contained module, and choice of the names in it."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from keyword import iskeyword
from types import MethodType
from typing import Any

from opgrip.capture.grip.gripped import Gripped
from opgrip.capture.grip.source.classes import ClassParts
from opgrip.capture.grip.source.collect import Collector
from opgrip.capture.grip.source.free_names import Annotation, Role, Use
from opgrip.capture.grip.source.imports import Import, is_imported, is_of_python, top_level
from opgrip.capture.grip.source.items import (
    BuiltinItem,
    ClassItem,
    FunctionItem,
    ImportItem,
    Link,
    PartItem,
    Piece,
    SampleItem,
    ValueItem,
    in_order,
    pieces_of,
    reachable,
    refusals,
)
from opgrip.capture.grip.source.layout import Layout
from opgrip.capture.grip.source.live_names import Everything, Meaning, Treatment, named_in, words_in
from opgrip.errors import UserError


def names_for(items: Iterable[SampleItem]) -> dict[SampleItem, str]:
    """Return a name for each item: its own if no earlier item has it, else its own with its module's name added."""
    items = list(items)
    owners_by_name: dict[str, SampleItem] = {}
    shadowed = _bound_by_users(items)
    names: dict[SampleItem, str] = {}
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


def _candidates(item: SampleItem) -> Iterator[str]:
    name = item.name if item.name.isidentifier() and not iskeyword(item.name) else "function"
    yield name
    longer = f"{name}_{item.module.rpartition('.')[2].strip('_')}"
    yield longer
    yield from (f"{longer}_{number}" for number in count(2))


def _same_package(one: SampleItem, other: SampleItem) -> bool:
    return all(
        isinstance(item, ImportItem) and item.statement.attribute is None and item.statement.alias in ("", item.name)
        for item in (one, other)
    ) and _package(one) == _package(other)


def _package(item: SampleItem) -> str:
    return item.statement.module.partition(".")[0] if isinstance(item, ImportItem) else ""


def _bound_by_users(items: Iterable[SampleItem]) -> Mapping[SampleItem, set[str]]:
    bound: dict[SampleItem, set[str]] = {}
    for item in items:
        for piece in pieces_of(item):
            for link in piece.links:
                bound.setdefault(link.item, set()).update(piece.names.bound)
    return bound


_ANY = Import("typing", "Any", "Any")


def hints_of(
    collector: Collector, included: Iterable[SampleItem]
) -> tuple[frozenset[Annotation], tuple[SampleItem, ...]]:
    """Return the type annotations whose names the sample defines or can import, and the items to add for them.

    Links from the names in these annotations to items are added to the pieces of source.
    """
    included = list(included)
    has = set(included)
    annotations: list[Annotation] = []
    more: dict[SampleItem, None] = {}
    for item in included:
        for piece in pieces_of(item):
            for annotation, uses in piece.hints:
                items = [_find_item(collector, use, meaning, piece, has) for use, meaning in uses]
                if all(one is not None for one in items):
                    annotations.append(annotation)
                    for (use, meaning), one in zip(uses, items, strict=True):
                        assert one is not None
                        more[one] = None
                        piece.links.append(Link(use, one, meaning.attribute_count))
                elif isinstance(annotation.holder, ast.AnnAssign) and isinstance(
                    piece.file.parents.get(annotation.holder), ast.ClassDef
                ):
                    any_item = collector.ensure_item(
                        ("hint", "Any"), lambda: ImportItem("Any", "typing", statement=_ANY)
                    )
                    more[any_item] = None
    return frozenset(annotations), tuple(one for one in more if one not in has)


def _find_item(
    collector: Collector, use: Use, meaning: Meaning, piece: Piece, has: set[SampleItem]
) -> SampleItem | None:
    if meaning.treatment is Treatment.IMPORT:
        return collector.add_import(
            meaning.thing, (use.name, *use.attributes)[meaning.attribute_count], meaning.rest, piece
        )
    item = collector.find_item(meaning.thing) if meaning.treatment is not Treatment.ABSENT else None
    if meaning.treatment is Treatment.BUILTIN:
        return collector.builtin(getattr(meaning.thing, "__name__", use.name))
    return item if item in has else None


@dataclass(frozen=True, slots=True)
class Requirements:
    """Everything that a sample's function needs.

    root : item of the function, or of the method in its class
    items : all items of the sample, the root first
    left_out : reason why a part of a class that may be needed is left out, by `Class.part`
    """

    collector: Collector
    root: SampleItem
    items: tuple[SampleItem, ...]
    left_out: dict[str, str]


@dataclass(frozen=True, slots=True)
class ModuleText:
    """The text of a sample's self-contained module, with what it defines and imports.

    entry : name of its function, such as `delta2bbox` or `Coder.decode`
    classes : names of classes and functions among the arguments, by their original `module:qualname`
    projects : top-level packages and modules whose source is included
    imports : top-level packages that the module imports, without the standard library
    absent : free names that the original code does not bind either
    left_out : as in `Requirements`
    """

    text: str
    entry: str
    classes: dict[str, str]
    projects: frozenset[str]
    imports: frozenset[str]
    absent: frozenset[str]
    left_out: dict[str, str] = field(default_factory=dict)


def take(gripped: Gripped) -> Requirements:
    """Return everything that a gripped function needs; raise `UserError` if a part of it cannot be extracted."""
    collector = Collector(words_in(objects_of(gripped)))
    root, classes = _enter_function(gripped, collector)
    classes.expand(objects_of(gripped), root)
    refused = refusals(collector.items)
    if root in refused:
        raise UserError(f"{gripped.entry} cannot be extracted", _reason(refused[root]))
    items = reachable(root, refused)
    for item in items:
        if isinstance(item, ClassItem):
            # a class comes after all classes that it inherits from
            item.early += [one for one in map(collector.find_item, item.cls.__mro__[1:]) if one in items]
    left_out = {_label(part): _reason(refused[part]) for item in items for part in item.may_need if part in refused}
    return Requirements(collector, root, tuple(items), left_out)


def lay_out(gripped: Gripped, requirements: Requirements, origin: str) -> ModuleText:
    """Return the text of a module that contains a gripped function and everything it needs.

    origin : description of the function's origin, for the docstring
    """
    annotations, more = hints_of(requirements.collector, requirements.items)
    items = (*requirements.items, *more)
    ordered = in_order(requirements.root, items)
    names = names_for(_by_claim(requirements, items, ordered))
    _check_texts(items, names)
    entry = _entry(gripped, requirements, names)
    layout = Layout(requirements.collector, requirements.root, items, names, annotations)
    text = layout.module(f"{entry} of {origin}, and what it needs.", ordered)
    return ModuleText(
        text,
        entry,
        dict(_argument_names(gripped, requirements, names)),
        frozenset(
            top_level(item.module)
            for item in items
            if isinstance(item, FunctionItem | ClassItem) and not is_imported(item.module)
        ),
        frozenset(
            top_level(item.statement.module)
            for item in items
            if isinstance(item, ImportItem) and not is_of_python(item.statement.module)
        ),
        frozenset(name for item in items for piece in pieces_of(item) for name in piece.absent),
        requirements.left_out,
    )


def owner_of(gripped: Gripped) -> type | None:
    """Return the class of a method, even if it was gripped inside the class's body."""
    path = gripped.entry.rpartition("<locals>.")[2].rpartition(".")[0]
    if gripped.owner is not None or not path:
        return gripped.owner
    for call in gripped.calls:
        for first in call.args[:1]:
            for cls in first.__mro__ if isinstance(first, type) else type(first).__mro__:
                if cls.__qualname__.rpartition("<locals>.")[2] == path:
                    return cls
    thing: Any = sys.modules.get(gripped.function.__module__)
    for name in path.split("."):
        thing = getattr(thing, name, None)
    if not isinstance(thing, type):
        raise UserError(
            f"the class of {gripped.entry} is not found", "grip the method after the program has defined the class"
        )
    return thing


def _enter_function(gripped: Gripped, collector: Collector) -> tuple[SampleItem, ClassParts]:
    function, owner = gripped.function, owner_of(gripped)
    method = gripped.entry.rpartition(".")[2]
    if owner is None:
        classes = ClassParts(collector)
        if isinstance(function, partial):
            root: SampleItem = ValueItem(gripped.name, "", value=function)
            collector.remember(root, root)
            collector.check(function, root, "the function")
            return root, classes
        if isinstance(function, MethodType):
            raise UserError(f"{gripped.entry} is bound to an object", "grip the method of its class instead")
        return collector.function(function, method if method.isidentifier() else gripped.name), classes
    first = [call.args[0] for call in gripped.calls if call.args]
    classes = ClassParts(collector, {owner, *(type(one) for one in first if isinstance(one, owner))})
    provider = next((cls for cls in owner.__mro__ if method in vars(cls)), None)
    if provider is None:
        raise UserError(f"{owner.__qualname__} has no {method}", "name one of its methods")
    root = classes.part(provider, method)
    item = collector.class_item(owner)
    if item is not root:
        root.need(item)
    if isinstance(item, ClassItem) and not isinstance(vars(provider)[method], staticmethod):
        item.is_live = item.has_bases = True
    return root, classes


def objects_of(gripped: Gripped) -> Iterator[Any]:
    """Yield the arguments and results of all recorded calls of a function."""
    for call in gripped.calls:
        yield from (call.args, call.kwargs, call.results)
        if call.after is not None:
            yield call.after


def _reason(way: Sequence[SampleItem]) -> str:
    through = " -> ".join(dict.fromkeys(_label(item) for item in way if item.name))
    return f"{way[-1].refusal} (by way of {through})"


def _label(item: SampleItem) -> str:
    return f"{item.owner.name}.{item.name}" if isinstance(item, PartItem) and item.owner is not None else item.name


def _by_claim(requirements: Requirements, items: tuple[SampleItem, ...], ordered: list[SampleItem]) -> list[SampleItem]:
    root = requirements.root.owner if isinstance(requirements.root, PartItem) else requirements.root
    first: list[SampleItem] = [] if root is None else [root]
    live = [item for item in items if isinstance(item, ClassItem) and item.is_live]
    imports = [item for item in items if isinstance(item, ImportItem)]
    return list(dict.fromkeys([*first, *live, *imports, *ordered, *items]))


def _entry(gripped: Gripped, requirements: Requirements, names: dict[SampleItem, str]) -> str:
    owner = owner_of(gripped)
    if owner is None:
        return names[requirements.root]
    return f"{names[requirements.collector.class_item(owner)]}.{gripped.entry.rpartition('.')[2]}"


def _check_texts(items: Iterable[SampleItem], names: dict[SampleItem, str]) -> None:
    for link in (link for item in items for piece in pieces_of(item) for link in piece.links):
        if link.use.role is Role.TEXT and names[link.item] != link.use.name:
            raise UserError(
                f"{link.use.name} cannot be renamed, because code looks it up by its name",
                "another function of the sample has the same name",
            )


def _argument_names(
    gripped: Gripped, requirements: Requirements, names: dict[SampleItem, str]
) -> Iterator[tuple[str, str]]:
    for thing in named_in(objects_of(gripped), Everything()):
        item = requirements.collector.find_item(thing)
        if item is not None and item in names and not isinstance(item, ImportItem):
            yield f"{thing.__module__}:{thing.__qualname__}", names[item]
