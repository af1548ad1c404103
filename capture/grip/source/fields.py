"""The classes of live objects that code may read off its arguments, and constants as their source writes them."""

from __future__ import annotations

import ast
import enum
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from types import FunctionType
from typing import Any

import numpy as np
import torch

from opgrip.capture.grip.source.decorators import FunctionDefinition
from opgrip.capture.grip.source.imports import is_imported
from opgrip.capture.grip.source.items import Piece
from opgrip.capture.grip.source.names import Mention, Receiver, Role
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


_ALL_CHILDREN = ("children", "modules", "named_children", "named_modules", "apply", "_modules")
_LEAVES = (torch.Tensor, np.ndarray, str, bytes, int, float, complex, type(None))


class Mentioned:
    """Tells whether code reads an attribute of a name off something whose class it does not tell."""

    def __init__(self, mentions: Iterable[Mention]) -> None:
        mentions = set(mentions)
        self._all = _Words(mention.attribute for mention in mentions)
        self._of_others = _Words(mention.attribute for mention in mentions if mention.receiver is Receiver.ANY)

    def of_others(self, name: str) -> bool:
        """Whether it is read off something else than the method's own object."""
        return name in self._of_others

    def as_field(self, name: str) -> bool:
        """Whether it is read off anything."""
        return name in self._all

    def all_children(self) -> bool:
        """Whether modules are gone through without naming them."""
        return any(name in self._all for name in _ALL_CHILDREN)


class Everything(Mentioned):
    """Tells that code reads each attribute."""

    def __init__(self) -> None:
        super().__init__([Mention(".*", Receiver.ANY)])


class _Words:
    """Names and patterns of names."""

    def __init__(self, words: Iterable[str]) -> None:
        self._names = set(words)
        self._patterns = [re.compile(word) for word in self._names if ".*" in word]

    def __contains__(self, name: str) -> bool:
        return name in self._names or any(pattern.fullmatch(name) for pattern in self._patterns)


def named_in(objects: Iterable[Any], mentioned: Mentioned) -> list[type | FunctionType]:
    """Classes and functions, of no imported package, of which or as which objects and what code reads off them are."""
    types_and_functions: dict[type | FunctionType, None] = {}
    objects_by_id: dict[int, Any] = {}
    queue = list(objects)
    for thing in queue:
        if id(thing) in objects_by_id or (isinstance(thing, _LEAVES) and is_imported(type(thing).__module__)):
            continue
        objects_by_id[id(thing)] = thing
        named = thing if isinstance(thing, type | FunctionType) else type(thing)
        if not is_imported(named.__module__ or ""):
            types_and_functions[named] = None
        if named is not thing:
            queue += _list_contents(thing, mentioned)
    return list(types_and_functions)


def words_in(objects: Iterable[Any]) -> set[str]:
    """The strings in containers that could be names."""
    words: set[str] = set()
    objects_by_id: dict[int, Any] = {}
    queue = list(objects)
    for thing in queue:
        if isinstance(thing, str):
            words.update([thing] * thing.isidentifier())
        elif id(thing) not in objects_by_id:
            objects_by_id[id(thing)] = thing
            if isinstance(thing, Mapping):
                queue += thing.values()
            elif isinstance(thing, list | tuple):
                queue += thing
    return words


def _list_contents(thing: Any, mentioned: Mentioned) -> Iterator[Any]:
    """What a container holds, or the fields of an object that code may read."""
    if isinstance(thing, enum.Enum):
        return
    if isinstance(thing, Mapping):
        yield from thing.keys()
        yield from thing.values()
    elif isinstance(thing, list | tuple | AbstractSet):
        yield from thing
    elif isinstance(thing, torch.nn.Module):
        # code that is not taken in may go through them
        every = is_imported(getattr(type(thing).forward, "__module__", "")) or mentioned.all_children()
        # their names may stand in a list, over which `getattr` goes
        words = words_in(value for value in vars(thing).values() if isinstance(value, list | tuple))
        yield from (
            child for name, child in thing.named_children() if every or name in words or mentioned.as_field(name)
        )
    fields = dict(getattr(thing, "__dict__", {}))
    for cls in type(thing).__mro__:
        slots = vars(cls).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(thing, name):
                fields.setdefault(name, getattr(thing, name))
    yield from (value for name, value in fields.items() if mentioned.as_field(name))
