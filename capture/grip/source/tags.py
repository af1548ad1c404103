"""What the source of a function says of how hard it is for a compiler."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import Any

from opgrip.capture.grip.gripped import Gripped
from opgrip.capture.grip.source.decorators import find_definition
from opgrip.capture.grip.source.imports import is_of_python, top_level
from opgrip.capture.grip.source.items import ClassItem, ImportItem, pieces_of, reachable
from opgrip.capture.grip.source.module import Requirements, take
from opgrip.capture.grip.source.scopes import COMPREHENSIONS
from opgrip.errors import UserError

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
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list"):
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
