"""Python's rules of scope: which names a function, class or comprehension binds."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import TypeAlias

FunctionNode: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
Scoped: TypeAlias = FunctionNode | ast.Lambda | ast.ClassDef
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass(slots=True)
class Scope:
    """Names of a function, class or comprehension.

    Attributes
    ----------
    bound : names that are bound in it, `nonlocals` included
    globals : names that are the module's
    nonlocals : names that are those of a function around it
    """

    is_class: bool
    bound: set[str]
    globals: set[str] = field(default_factory=set)
    nonlocals: set[str] = field(default_factory=set)


def bound_by(node: ast.stmt) -> set[str]:
    """The names that a statement binds in the scope that it stands in."""
    scope = Scope(False, set())
    bind(node, scope)
    return scope.bound


def parameters(arguments: ast.arguments) -> list[ast.arg]:
    """All parameters of a function, `*args` and `**kwargs` last."""
    stars = [one for one in (arguments.vararg, arguments.kwarg) if one is not None]
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *stars]


def defaults(arguments: ast.arguments) -> list[ast.expr]:
    """The default arguments of a function."""
    return [*arguments.defaults, *(default for default in arguments.kw_defaults if default is not None)]


def type_parameters(node: ast.AST) -> set[str]:
    """The names of the type parameters that a definition has since Python 3.12."""
    return {parameter.name for parameter in getattr(node, "type_params", ())}


def stored(node: ast.AST) -> set[str]:
    """The names that an expression assigns to."""
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}


def bind(node: ast.AST, scope: Scope) -> None:
    """Enter the names that a statement binds into its scope, without those that scopes inside it bind."""
    if isinstance(node, ast.Name):
        if not isinstance(node.ctx, ast.Load):
            scope.bound.add(node.id)
    elif isinstance(node, ast.Global):
        scope.globals.update(node.names)
    elif isinstance(node, ast.Nonlocal):
        scope.nonlocals.update(node.names)
    elif isinstance(node, ast.alias):
        scope.bound.add(node.asname or node.name.partition(".")[0])
    elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
        scope.bound.add(node.name)
    elif isinstance(node, ast.MatchMapping) and node.rest:
        scope.bound.add(node.rest)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        scope.bound.add(node.name)
        outside: list[ast.AST] = [*node.decorator_list]
        outside += node.bases if isinstance(node, ast.ClassDef) else defaults(node.args)
    elif isinstance(node, ast.Lambda):
        outside = [*defaults(node.args)]
    elif isinstance(node, COMPREHENSIONS):
        # only := binds in the scope around a comprehension
        outside = [part for part in ast.walk(node) if isinstance(part, ast.NamedExpr)]
    else:
        outside = list(ast.iter_child_nodes(node))
    for part in outside:
        bind(part.target if isinstance(part, ast.NamedExpr) and isinstance(node, COMPREHENSIONS) else part, scope)
