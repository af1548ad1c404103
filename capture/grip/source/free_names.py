"""Search for the free names in a piece of source: names that it uses but does not bind."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias


class Role(Enum):
    DEFINE = "evaluated where the piece is defined"
    RUN = "evaluated when it runs"
    CHECK = "a class that `isinstance`, `except` or `case` compares with"
    TEXT = "found by its name in a string"


@dataclass(frozen=True, slots=True)
class Use:
    """A free name and the attributes read from it, as in `np.linalg.norm`."""

    name: str
    attributes: tuple[str, ...]
    nodes: tuple[ast.expr, ...]
    role: Role


class AttributeOwner(Enum):
    SELF = "the method's object or class"
    SUPER = "super()"
    ANY = "something else"


@dataclass(frozen=True, slots=True)
class Mention:
    attribute: str
    owner: AttributeOwner


@dataclass(frozen=True, slots=True)
class Annotation:
    holder: ast.arg | FunctionNode | ast.AnnAssign
    expression: ast.expr
    uses: tuple[Use, ...]


@dataclass(slots=True)
class FreeNames:
    """The free names in a piece of source, with its imports and annotations and the attributes that it reads.

    words : strings in the piece that could be names
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
    """Return the name `a` and the attributes [`b`, `c`] of an expression such as `a.b.c`; None for any other."""
    attributes: list[ast.Attribute] = []
    while isinstance(node, ast.Attribute):
        attributes.append(node)
        node = node.value
    return (node, attributes[::-1]) if isinstance(node, ast.Name) else None


FunctionNode: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
Scoped: TypeAlias = FunctionNode | ast.Lambda | ast.ClassDef
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass(slots=True)
class NameScope:
    is_class: bool
    bound: set[str]
    globals: set[str] = field(default_factory=set)
    nonlocals: set[str] = field(default_factory=set)


def bound_by(node: ast.stmt) -> set[str]:
    scope = NameScope(False, set())
    bind(node, scope)
    return scope.bound


def parameters(arguments: ast.arguments) -> list[ast.arg]:
    stars = [one for one in (arguments.vararg, arguments.kwarg) if one is not None]
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *stars]


def defaults(arguments: ast.arguments) -> list[ast.expr]:
    return [*arguments.defaults, *(default for default in arguments.kw_defaults if default is not None)]


def type_parameters(node: ast.AST) -> set[str]:
    return {parameter.name for parameter in getattr(node, "type_params", ())}


def stored(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}


def bind(node: ast.AST, scope: NameScope) -> None:
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
        # inside a comprehension only := binds names of the enclosing scope
        outside = [part for part in ast.walk(node) if isinstance(part, ast.NamedExpr)]
    else:
        outside = list(ast.iter_child_nodes(node))
    for part in outside:
        bind(part.target if isinstance(part, ast.NamedExpr) and isinstance(node, COMPREHENSIONS) else part, scope)


def names_of(node: ast.AST, is_method: bool = False) -> FreeNames:
    walker = _Walker()
    if is_method and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        first = [*node.args.posonlyargs, *node.args.args][:1]
        walker.self_name = first[0].arg if first else None
    walker.visit(node)
    return walker.names


class _Walker(ast.NodeVisitor):
    def __init__(self) -> None:
        self.names = FreeNames()
        self.self_name: str | None = None
        self._scopes: list[NameScope] = []
        self._functions = 0
        self._checks = False
        self._annotation: list[Use] | None = None

    # names

    def _scope_of(self, name: str) -> int | None:
        for index in reversed(range(len(self._scopes))):
            scope = self._scopes[index]
            if scope.is_class and index != len(self._scopes) - 1:
                continue
            if name in scope.globals:
                return None
            if name in scope.bound and name not in scope.nonlocals:
                return index
        return None

    def _use(self, name: ast.Name, attributes: list[ast.Attribute]) -> None:
        role = Role.CHECK if self._checks else Role.RUN if self._functions else Role.DEFINE
        words = tuple(attribute.attr for attribute in attributes)
        use = Use(name.id, words, (name, *attributes), role)
        (self.names.uses if self._annotation is None else self._annotation).append(use)

    def visit_Name(self, node: ast.Name) -> None:
        # names that a statement itself binds are not free in it
        if (self._scopes or isinstance(node.ctx, ast.Load)) and self._scope_of(node.id) is None:
            self._use(node, [])

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and node.value.isidentifier():
            self.names.words.add(node.value)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        chain = dotted(node)
        if chain is None:
            self._mention(node.attr, AttributeOwner.SUPER if _is_call_of("super", node.value) else AttributeOwner.ANY)
            self.visit(node.value)
            return
        name, attributes = chain
        scope = self._scope_of(name.id)
        if scope is None:
            self._use(name, attributes)
            return
        of_self = scope == 0 and name.id == self.self_name
        for index, attribute in enumerate(attributes):
            self._mention(attribute.attr, AttributeOwner.SELF if of_self and not index else AttributeOwner.ANY)

    def _mention(self, attribute: str, owner: AttributeOwner, is_pattern: bool = False) -> None:
        pattern = attribute if is_pattern else re.escape(attribute)
        self.names.mentions.add(Mention(pattern, owner))

    # calls that look up attributes or compare classes

    def visit_Call(self, node: ast.Call) -> None:
        called = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        if called in ("getattr", "hasattr", "setattr", "delattr", "attrgetter", "methodcaller"):
            self._mention_by_name(called, node.args)
        self.names.makes_own |= _is_call_of("type", node.func)
        self.names.makes_own |= isinstance(node.func, ast.Attribute) and node.func.attr == "__class__"
        self.names.calls_self |= isinstance(node.func, ast.Name) and node.func.id == self.self_name
        self.visit(node.func)
        compares = called in ("isinstance", "issubclass", "super")
        for index, argument in enumerate(node.args):
            with self._checking(compares and index == (0 if called == "super" else 1)):
                self.visit(argument)
        for keyword in node.keywords:
            self.visit(keyword)

    def _mention_by_name(self, called: str, arguments: list[ast.expr]) -> None:
        looked_up = called.endswith("attr") and len(arguments) > 1
        of_self = looked_up and isinstance(arguments[0], ast.Name) and arguments[0].id == self.self_name
        for argument in arguments[1:2] if looked_up else arguments:
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                for word in argument.value.split("."):
                    self._mention(word, AttributeOwner.SELF if of_self else AttributeOwner.ANY)
            elif isinstance(argument, ast.JoinedStr):
                parts = [
                    re.escape(str(part.value)) if isinstance(part, ast.Constant) else ".*" for part in argument.values
                ]
                self._mention("".join(parts), AttributeOwner.SELF if of_self else AttributeOwner.ANY, is_pattern=True)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if node.type is not None:
            with self._checking(True):
                self.visit(node.type)
        self._visit_all(node.body)

    def visit_MatchClass(self, node: ast.MatchClass) -> None:
        with self._checking(True):
            self.visit(node.cls)
        for attribute in node.kwd_attrs:
            self._mention(attribute, AttributeOwner.ANY)
        self._visit_all([*node.patterns, *node.kwd_patterns])

    @contextmanager
    def _checking(self, checks: bool) -> Iterator[None]:
        before, self._checks = self._checks, checks
        yield
        self._checks = before

    # scopes

    def visit_FunctionDef(self, node: FunctionNode) -> None:
        self._visit_all([*node.decorator_list, *defaults(node.args)])
        types = type_parameters(node)
        self._scopes += [NameScope(False, types)] * bool(types)
        for parameter in parameters(node.args):
            self._annotate(parameter, parameter.annotation)
        self._annotate(node, node.returns)
        del self._scopes[len(self._scopes) - bool(types) :]
        with self._inside(node, types | {one.arg for one in parameters(node.args)}, node.body):
            self._visit_all(node.body)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._visit_all(defaults(node.args))
        with self._inside(node, {one.arg for one in parameters(node.args)}, [node.body]):
            self.visit(node.body)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._visit_all([*node.decorator_list, *node.bases, *node.keywords])
        with self._inside(node, type_parameters(node), node.body):
            self._visit_all(node.body)

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp) -> None:
        self._comprehension(node, [node.elt])

    visit_SetComp = visit_GeneratorExp = visit_ListComp

    def visit_DictComp(self, node: ast.DictComp) -> None:
        self._comprehension(node, [node.key, node.value])

    def _comprehension(self, node: ast.AST, results: list[ast.expr]) -> None:
        generators: list[ast.comprehension] = node.generators  # type: ignore[attr-defined]
        # the first iterable is evaluated outside the scope of the comprehension
        self.visit(generators[0].iter)
        bound = {name for generator in generators for name in stored(generator.target)}
        self.names.bound |= bound
        self._scopes.append(NameScope(False, bound))
        for index, generator in enumerate(generators):
            self._visit_all([*([generator.iter] if index else []), *generator.ifs])
        self._visit_all(results)
        self._scopes.pop()

    @contextmanager
    def _inside(self, node: Scoped, bound: set[str], body: Iterable[ast.AST]) -> Iterator[None]:
        is_class = isinstance(node, ast.ClassDef)
        scope = NameScope(is_class, bound)
        for statement in body:
            bind(statement, scope)
        self.names.bound |= scope.bound - scope.globals - scope.nonlocals
        self._scopes.append(scope)
        self._functions += not is_class
        yield
        self._functions -= not is_class
        self._scopes.pop()

    # statements

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._annotate(node, node.annotation)
        self.visit(node.target)
        if node.value is not None:
            self.visit(node.value)

    def _annotate(self, holder: ast.arg | FunctionNode | ast.AnnAssign, expression: ast.expr | None) -> None:
        if expression is None:
            return
        before, self._annotation = self._annotation, []
        self.visit(expression)
        for text in _quoted_types(expression):
            self._visit_quoted(text)
        self.names.annotations.append(Annotation(holder, expression, tuple(self._annotation)))
        self._annotation = before

    def _visit_quoted(self, text: str) -> None:
        assert self._annotation is not None
        try:
            expression = ast.parse(text.strip(), mode="eval").body
        except SyntaxError:
            return
        inside, self._annotation = self._annotation, []
        self.visit(expression)
        self._annotation = inside + [Use(use.name, use.attributes, (), use.role) for use in self._annotation]

    def visit_Global(self, node: ast.Global) -> None:
        self.names.outer.append((node, frozenset(node.names)))

    def visit_Nonlocal(self, node: ast.Nonlocal) -> None:
        outer = frozenset(name for name in node.names if self._scope_of(name) is None)
        if outer:
            self.names.outer.append((node, outer))

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        self.names.imports.append(node)

    visit_ImportFrom = visit_Import

    def _visit_all(self, nodes: Iterable[ast.AST]) -> None:
        for node in nodes:
            self.visit(node)


def _quoted_types(expression: ast.AST) -> Iterator[str]:
    if isinstance(expression, ast.Constant) and isinstance(expression.value, str):
        yield expression.value
    elif not (isinstance(expression, ast.Subscript) and ast.unparse(expression.value).endswith("Literal")):
        for part in ast.iter_child_nodes(expression):
            yield from _quoted_types(part)


def _is_call_of(name: str, node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
