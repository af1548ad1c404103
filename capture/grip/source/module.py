"""From a gripped function to the text of a module that runs alone; and its tags."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from keyword import iskeyword
from types import MethodType
from typing import Any

from opgrip.capture.grip.gripped import Gripped
from opgrip.capture.grip.source.classes import Classes
from opgrip.capture.grip.source.collect import Collector
from opgrip.capture.grip.source.free_names import COMPREHENSIONS, Annotation, Role, Use
from opgrip.capture.grip.source.imports import Import, is_imported, is_of_python, top_level
from opgrip.capture.grip.source.items import (
    BuiltinItem,
    ClassItem,
    FunctionItem,
    ImportItem,
    Item,
    Link,
    PartItem,
    Piece,
    ValueItem,
    in_order,
    pieces_of,
    reachable,
    refusals,
)
from opgrip.capture.grip.source.layout import Layout
from opgrip.capture.grip.source.live_names import Everything, Kind, Meaning, named_in, words_in
from opgrip.capture.grip.source.source_files import find_definition
from opgrip.errors import UserError


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


_ANY = Import("typing", "Any", "Any")


@dataclass(frozen=True, slots=True)
class Hints:
    """What becomes of the annotations of a sample.

    Attributes
    ----------
    annotations : those that stay
    items : what they need besides what the sample has
    """

    annotations: frozenset[Annotation]
    items: tuple[Item, ...]


def hints_of(collector: Collector, included: Iterable[Item]) -> Hints:
    """What becomes of the annotations in the source of a sample's items; their names are linked as others are."""
    included = list(included)
    has = set(included)
    annotations: list[Annotation] = []
    more: dict[Item, None] = {}
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
                elif isinstance(annotation.holder, ast.AnnAssign) and _is_field(piece, annotation.holder):
                    more[
                        collector.ensure_item(("hint", "Any"), lambda: ImportItem("Any", "typing", statement=_ANY))
                    ] = None
    return Hints(frozenset(annotations), tuple(one for one in more if one not in has))


def _find_item(collector: Collector, use: Use, meaning: Meaning, piece: Piece, has: set[Item]) -> Item | None:
    """The item that a name in an annotation stands for, None where the sample does not have it."""
    if meaning.kind is Kind.IMPORT:
        return collector.add_import(
            meaning.thing, (use.name, *use.attributes)[meaning.attribute_count], meaning.rest, piece
        )
    item = collector.find_item(meaning.thing) if meaning.kind is not Kind.ABSENT else None
    if meaning.kind is Kind.BUILTIN:
        return collector.builtin(getattr(meaning.thing, "__name__", use.name))
    return item if item in has else None


def _is_field(piece: Piece, holder: ast.AnnAssign) -> bool:
    return isinstance(piece.file.parents.get(holder), ast.ClassDef)


@dataclass(frozen=True, slots=True)
class Requirements:
    """What a function needs, collected.

    Attributes
    ----------
    root : the function, or the method's place in its class
    items : all that the sample has, the root first
    left_out : why parts of its classes that nothing is known to need are not among them, by `Class.part`
    """

    collector: Collector
    root: Item
    items: tuple[Item, ...]
    left_out: dict[str, str]


@dataclass(frozen=True, slots=True)
class ModuleText:
    """A module that stands alone.

    Attributes
    ----------
    entry : the function in it: `delta2bbox`, `Coder.decode`
    classes : names in it of the classes and functions among the arguments, by `module:qualname` where they come from
    projects : top-level packages and modules whose source was taken in
    imports : top-level packages that it imports, those of Python aside
    absent : free names in it that nothing is bound to where it comes from
    left_out : why parts of its classes that nothing is known to need are not in it, by `Class.part`
    """

    text: str
    entry: str
    classes: dict[str, str]
    projects: frozenset[str]
    imports: frozenset[str]
    absent: frozenset[str]
    left_out: dict[str, str] = field(default_factory=dict)


def take(gripped: Gripped) -> Requirements:
    """All that a function needs.

    Raises
    ------
    UserError : where something of that cannot be taken out, with the reason
    """
    collector = Collector(words_in(objects_of(gripped)))
    root, classes = _enter_function(gripped, collector)
    classes.expand(objects_of(gripped), root)
    refused = refusals(collector.items)
    if root in refused:
        raise UserError(f"{gripped.entry} cannot be taken out", _reason(refused[root]))
    items = reachable(root, refused)
    for item in items:
        if isinstance(item, ClassItem):
            # a class stands after those that it inherits from, even past others between them
            item.early += [one for one in map(collector.find_item, item.cls.__mro__[1:]) if one in items]
    left_out = {_label(part): _reason(refused[part]) for item in items for part in item.may_need if part in refused}
    return Requirements(collector, root, tuple(items), left_out)


def lay_out(gripped: Gripped, requirements: Requirements, origin: str) -> ModuleText:
    """The text of a module that holds a function and all that it needs.

    Parameters
    ----------
    origin : where the function comes from, in words
    """
    hints = hints_of(requirements.collector, requirements.items)
    items = (*requirements.items, *hints.items)
    ordered = in_order(requirements.root, items)
    names = names_for(_by_claim(requirements, items, ordered))
    _check_texts(items, names)
    entry = _entry(gripped, requirements, names)
    layout = Layout(requirements.collector, requirements.root, items, names, hints.annotations)
    text = layout.module(f"{entry} of {origin}, and what it needs.", ordered)
    return ModuleText(
        text,
        entry,
        dict(_argument_names(gripped, requirements, names)),
        frozenset(top_level(item.module) for item in items if _is_source(item)),
        frozenset(
            top_level(item.statement.module)
            for item in items
            if isinstance(item, ImportItem) and not is_of_python(item.statement.module)
        ),
        frozenset(name for item in items for piece in pieces_of(item) for name in piece.absent),
        requirements.left_out,
    )


def owner_of(gripped: Gripped) -> type | None:
    """The class of a method, also of one that was gripped inside the class's body."""
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
        raise UserError(f"the class of {gripped.entry} is not found", "grip it after the class is made")
    return thing


def _enter_function(gripped: Gripped, collector: Collector) -> tuple[Item, Classes]:
    """The item of the function itself."""
    function, owner = gripped.function, owner_of(gripped)
    method = gripped.entry.rpartition(".")[2]
    if owner is None:
        classes = Classes(collector)
        if isinstance(function, partial):
            root: Item = ValueItem(gripped.name, "", value=function)
            collector.remember(root, root)
            collector.check(function, root, "the function")
            return root, classes
        if isinstance(function, MethodType):
            raise UserError(f"{gripped.entry} is bound to an object", "grip it on its class")
        return collector.function(function, method if method.isidentifier() else gripped.name), classes
    first = [call.args[0] for call in gripped.calls if call.args]
    classes = Classes(collector, {owner, *(type(one) for one in first if isinstance(one, owner))})
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
    """What the calls took and gave."""
    for call in gripped.calls:
        yield from (call.args, call.kwargs, call.results)
        if call.after is not None:
            yield call.after


def _reason(way: Sequence[Item]) -> str:
    """Why an item is refused, by the way from it to the one that is to blame."""
    through = " -> ".join(dict.fromkeys(_label(item) for item in way if item.name))
    return f"{way[-1].refusal} (by way of {through})"


def _label(item: Item) -> str:
    return f"{item.owner.name}.{item.name}" if isinstance(item, PartItem) and item.owner is not None else item.name


def _by_claim(requirements: Requirements, items: tuple[Item, ...], ordered: list[Item]) -> list[Item]:
    """The items in the order in which they may choose their names."""
    root = requirements.root.owner if isinstance(requirements.root, PartItem) else requirements.root
    first: list[Item] = [] if root is None else [root]
    live = [item for item in items if isinstance(item, ClassItem) and item.is_live]
    imports = [item for item in items if isinstance(item, ImportItem)]
    return list(dict.fromkeys([*first, *live, *imports, *ordered, *items]))


def _entry(gripped: Gripped, requirements: Requirements, names: dict[Item, str]) -> str:
    owner = owner_of(gripped)
    if owner is None:
        return names[requirements.root]
    return f"{names[requirements.collector.class_item(owner)]}.{gripped.entry.rpartition('.')[2]}"


def _check_texts(items: Iterable[Item], names: dict[Item, str]) -> None:
    """Raise `UserError` where something that is found by its name in a string has another name in the sample."""
    for link in (link for item in items for piece in pieces_of(item) for link in piece.links):
        if link.use.role is Role.TEXT and names[link.item] != link.use.name:
            raise UserError(f"{link.use.name} is found by its name", "another function of the sample has that name")


def _argument_names(gripped: Gripped, requirements: Requirements, names: dict[Item, str]) -> Iterator[tuple[str, str]]:
    for thing in named_in(objects_of(gripped), Everything()):
        item = requirements.collector.find_item(thing)
        if item is not None and item in names and not isinstance(item, ImportItem):
            yield f"{thing.__module__}:{thing.__qualname__}", names[item]


def _is_source(item: Item) -> bool:
    if isinstance(item, FunctionItem | ClassItem):
        return not is_imported(item.module)
    return False


FOR_LOOP, IF_ELSE, CONTAINERS = "ForLoop", "IfElseBranch", "BuiltInDataStructure"
CUSTOMIZED, THIRD_PARTY = "Customized", "ThirdPartyCodes"

_OF_TORCH = ("torch", "functorch", "torchgen")
_MAKERS = ("list", "dict", "set", "tuple", "zip", "append", "extend")
"""Functions and methods that make or fill containers."""


def source_tags(function: Callable[..., Any]) -> frozenset[str]:
    """Tags of a function by its syntax tree and those of its helpers; by its own alone where they cannot be had."""
    name = getattr(function, "__qualname__", "function")
    try:
        return tags_of(take(Gripped(function, None, name.rpartition(".")[2], "function", frozenset(), ())))
    except UserError:
        pass
    try:
        return frozenset(_tags_of_node(find_definition(function).node))
    except UserError:
        return frozenset()


def tags_of(requirements: Requirements) -> frozenset[str]:
    """Tags of a function by the source of all that it does not work without."""
    # what may be called is not: `may_need` is passed by
    needed = [item for item in requirements.items if item in _certain(requirements)]
    tags = {tag for item in needed for piece in pieces_of(item) for tag in _tags_of_node(piece.node)}
    if any(isinstance(item, ClassItem) for item in needed):
        tags.add(CUSTOMIZED)
    modules = {item.statement.module for item in needed if isinstance(item, ImportItem)}
    if any(top_level(module) not in _OF_TORCH and not is_of_python(module) for module in modules):
        tags.add(THIRD_PARTY)
    return frozenset(tags)


def _certain(requirements: Requirements) -> set[Any]:
    every = {needed for item in requirements.items for needed in item.may_need}
    return set(reachable(requirements.root, every))


def _tags_of_node(node: ast.AST) -> Iterator[str]:
    for part in _code_in(node):
        if isinstance(part, (ast.For, ast.AsyncFor, ast.While, *COMPREHENSIONS)):
            yield FOR_LOOP
        if isinstance(part, ast.If | ast.IfExp | ast.Match):
            yield IF_ELSE
        if _is_container(part):
            yield CONTAINERS


def _code_in(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run: annotations and decorators do not."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _code_in(child)


def _is_container(node: ast.AST) -> bool:
    """Whether code makes or fills a list, tuple, set or dictionary of more than literals."""
    if isinstance(node, ast.Call):
        called = node.func
        return getattr(called, "id", getattr(called, "attr", "")) in _MAKERS and bool(node.args)
    if isinstance(node, ast.Return):
        return isinstance(node.value, ast.Tuple)
    if isinstance(node, ast.List | ast.Set):
        return isinstance(getattr(node, "ctx", ast.Load()), ast.Load) and not all(map(_is_literal, node.elts))
    if isinstance(node, ast.Dict):
        return not all(map(_is_literal, node.values))
    return isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp)


def _is_literal(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) or (isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant))
