"""How constants are written in the source that they come from."""

from __future__ import annotations

import ast
import threading
from collections.abc import Iterator
from typing import Any

import torch

from opgrip.capture.grip.source.decorators import FunctionDefinition
from opgrip.capture.grip.source.items import Piece
from opgrip.capture.grip.source.names import Role
from opgrip.capture.grip.source.packages import is_imported
from opgrip.capture.grip.source.resolve import ABSENT, Namespace, evaluate, resolve


def statement_of(name: str, piece: Piece) -> ast.Assign | ast.AnnAssign | None:
    """The one statement that binds a variable of the module that a piece is of; None where there is not just one."""
    if name in piece.namespace.closure:
        return None
    statements: list[ast.Assign | ast.AnnAssign] = []
    for node in ast.walk(piece.file.tree):
        if isinstance(node, ast.Name) and node.id == name and not isinstance(node.ctx, ast.Load):
            around = piece.file.parents[node]
            if next(piece.file.enclosing(node), None) is not None:
                continue
            whole = isinstance(around, ast.Assign) and around.targets == [node]
            if not whole and not (isinstance(around, ast.AnnAssign) and around.value is not None):
                return None
            statements.append(around)  # type: ignore[arg-type]
    return statements[0] if len(statements) == 1 else None


def is_literal(statement: ast.Assign | ast.AnnAssign, value: Any) -> bool:
    """Whether a statement assigns a literal, and the variable still has that value."""
    assert statement.value is not None
    try:
        literal = ast.literal_eval(statement.value)
    except (ValueError, TypeError, SyntaxError, MemoryError):
        return False
    return type(literal) is type(value) and repr(literal) == repr(value)


def made_by_call(statement: ast.Assign | ast.AnnAssign, namespace: Namespace, value: Any) -> bool:
    """Whether a statement calls a function of an imported package on literals, which would make the value again.

    That holds for `nn.MSELoss(reduction="none")` and `TypeVar("T")`, not for what the program gave a state since.
    """
    call = statement.value
    if not isinstance(call, ast.Call) or not is_imported(type(value).__module__):
        return False
    if isinstance(value, torch.nn.Module) and any(True for _ in (*value.parameters(), *value.buffers())):
        return False
    maker = evaluate(call.func, namespace)
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    is_made = (isinstance(maker, type) and isinstance(value, maker)) or maker in (threading.Lock, threading.RLock)
    return maker is not ABSENT and is_made and all(map(_is_plain, arguments))


def is_filled(statement: ast.Assign | ast.AnnAssign, value: Any) -> bool:
    """Whether a statement assigns a container that the program has filled since, as it does with caches."""
    return type(value) in (dict, list, set) and statement.value is not None and _is_plain(statement.value)


def _is_plain(argument: ast.expr) -> bool:
    try:
        ast.literal_eval(argument)
    except (ValueError, TypeError, SyntaxError, MemoryError):
        return False
    return True


def lost_defaults(definition: FunctionDefinition, piece: Piece) -> Iterator[tuple[ast.expr, Any]]:
    """Default arguments whose expression would not give their value any more, with that value."""
    arguments = definition.node.args
    positional = zip(reversed(arguments.defaults), reversed(definition.function.__defaults__ or ()), strict=False)
    named = [
        (default, (definition.function.__kwdefaults__ or {}).get(parameter.arg))
        for parameter, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is not None
    ]
    for expression, value in (*positional, *named):
        inside = {id(part) for part in ast.walk(expression)}
        uses = [use for use in piece.names.uses if use.role is Role.DEFINE and id(use.nodes[0]) in inside]
        of_class = vars(piece.cls) if piece.cls is not None else {}
        lost = any(use.name not in of_class and resolve(use, piece.namespace).thing is ABSENT for use in uses)
        live = evaluate(expression, piece.namespace)
        changed = isinstance(expression, ast.Name) and expression.id not in of_class and live is not value
        if lost or changed:
            yield expression, value
