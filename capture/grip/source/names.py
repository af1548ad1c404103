"""What a piece of source takes from outside itself: names, attributes, annotations."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from enum import Enum

from opgrip.capture.grip.source.scopes import FunctionNode


class Role(Enum):
    """What a name is used for."""

    DEFINE = "evaluated where the piece is defined"
    RUN = "evaluated when it runs"
    CHECK = "a class that `isinstance`, `except` or `case` compares with"
    TEXT = "found by its name in a string"


@dataclass(frozen=True, slots=True)
class Use:
    """A free name with the attributes that are read off it: `np.linalg.norm`.

    Attributes
    ----------
    nodes : the name's, then those of the attributes around it, from the inside; empty in an annotation that is a string
    """

    name: str
    attributes: tuple[str, ...]
    nodes: tuple[ast.expr, ...]
    role: Role


class Receiver(Enum):
    """What an attribute is read off."""

    SELF = "the method's object or class"
    SUPER = "super()"
    ANY = "something else"


@dataclass(frozen=True, slots=True)
class Mention:
    """An attribute that is read off something whose class the source does not tell.

    Attributes
    ----------
    attribute : a regular expression, which is just the name but where `getattr` takes an f-string
    """

    attribute: str
    receiver: Receiver


@dataclass(frozen=True, slots=True)
class Annotation:
    """A type annotation, and the free names in it.

    Attributes
    ----------
    holder : what it annotates: a parameter, a function for what it returns, a variable
    """

    holder: ast.arg | FunctionNode | ast.AnnAssign
    expression: ast.expr
    uses: tuple[Use, ...]


@dataclass(slots=True)
class Names:
    """What a piece of source takes from outside itself.

    Attributes
    ----------
    uses : free names, annotations aside
    bound : all names that some scope in it binds
    outer : statements that declare names of the module, or of a function around the piece, with those names
    imports : import statements inside its functions
    words : strings in it that could be names
    makes_own : it calls its object's class: `type(self)(...)`
    calls_self : it calls its object or class: `self(...)`, `cls(...)`
    """

    uses: list[Use] = field(default_factory=list)
    mentions: set[Mention] = field(default_factory=set)
    annotations: list[Annotation] = field(default_factory=list)
    bound: set[str] = field(default_factory=set)
    outer: list[tuple[ast.Global | ast.Nonlocal, frozenset[str]]] = field(default_factory=list)
    imports: list[ast.Import | ast.ImportFrom] = field(default_factory=list)
    words: set[str] = field(default_factory=set)
    makes_own: bool = False
    calls_self: bool = False


def dotted(node: ast.expr) -> tuple[ast.Name, list[ast.Attribute]] | None:
    """The name and attributes of `a.b.c`, from the inside; None for what is no such chain."""
    attributes: list[ast.Attribute] = []
    while isinstance(node, ast.Attribute):
        attributes.append(node)
        node = node.value
    return (node, attributes[::-1]) if isinstance(node, ast.Name) else None
