"""Finds the names that a piece of source takes from outside itself, by Python's rules of scope."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from opgrip.capture.grip.source.names import Annotation, Mention, Names, Receiver, Role, Use, dotted
from opgrip.capture.grip.source.scopes import (
    FunctionNode,
    Scope,
    Scoped,
    bind,
    defaults,
    parameters,
    stored,
    type_parameters,
)


def names_of(node: ast.AST, is_method: bool = False) -> Names:
    """The names that a definition, statement or expression takes from outside itself.

    Parameters
    ----------
    is_method : its first parameter is its object or class
    """
    walker = _Walker()
    if is_method and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        first = [*node.args.posonlyargs, *node.args.args][:1]
        walker.self_name = first[0].arg if first else None
    walker.visit(node)
    return walker.names


class _Walker(ast.NodeVisitor):
    """Collects into `names` while it keeps the scopes that it is in."""

    def __init__(self) -> None:
        self.names = Names()
        self.self_name: str | None = None
        self._scopes: list[Scope] = []
        self._functions = 0
        self._checks = False
        self._annotation: list[Use] | None = None

    # names

    def _scope_of(self, name: str) -> int | None:
        """The index of the scope that binds a name, None where it is free."""
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
        # what a statement itself binds, it does not take
        binds = not self._scopes and not isinstance(node.ctx, ast.Load)
        if not binds and self._scope_of(node.id) is None:
            self._use(node, [])

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and node.value.isidentifier():
            self.names.words.add(node.value)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        chain = dotted(node)
        if chain is None:
            self._mention(node.attr, Receiver.SUPER if _is_super(node.value) else Receiver.ANY)
            self.visit(node.value)
            return
        name, attributes = chain
        scope = self._scope_of(name.id)
        if scope is None:
            self._use(name, attributes)
            return
        of_self = scope == 0 and name.id == self.self_name
        for index, attribute in enumerate(attributes):
            self._mention(attribute.attr, Receiver.SELF if of_self and not index else Receiver.ANY)

    def _mention(self, attribute: str, receiver: Receiver, is_pattern: bool = False) -> None:
        pattern = attribute if is_pattern else re.escape(attribute)
        self.names.mentions.add(Mention(pattern, receiver))

    # calls that look attributes up or compare classes

    def visit_Call(self, node: ast.Call) -> None:
        called = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        if called in ("getattr", "hasattr", "setattr", "delattr", "attrgetter", "methodcaller"):
            self._mention_by_name(called, node.args)
        self.names.makes_own |= _is_class_of_something(node.func)
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
                    self._mention(word, Receiver.SELF if of_self else Receiver.ANY)
            elif isinstance(argument, ast.JoinedStr):
                parts = [
                    re.escape(str(part.value)) if isinstance(part, ast.Constant) else ".*" for part in argument.values
                ]
                self._mention("".join(parts), Receiver.SELF if of_self else Receiver.ANY, is_pattern=True)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if node.type is not None:
            with self._checking(True):
                self.visit(node.type)
        self._visit_all(node.body)

    def visit_MatchClass(self, node: ast.MatchClass) -> None:
        with self._checking(True):
            self.visit(node.cls)
        for attribute in node.kwd_attrs:
            self._mention(attribute, Receiver.ANY)
        self._visit_all([*node.patterns, *node.kwd_patterns])

    @contextmanager
    def _checking(self, checks: bool) -> Iterator[None]:
        before, self._checks = self._checks, checks
        yield
        self._checks = before

    # scopes

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._function(node)

    def _function(self, node: FunctionNode) -> None:
        self._visit_all([*node.decorator_list, *defaults(node.args)])
        types = type_parameters(node)
        if types:
            self._scopes.append(Scope(False, types))
        for parameter in parameters(node.args):
            self._annotate(parameter, parameter.annotation)
        self._annotate(node, node.returns)
        if types:
            self._scopes.pop()
        with self._inside(node, types | {one.arg for one in parameters(node.args)}, node.body):
            self._visit_all(node.body)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._visit_all(defaults(node.args))
        with self._inside(node, {one.arg for one in parameters(node.args)}, [node.body]):
            self.visit(node.body)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._visit_all([*node.decorator_list, *node.bases, *node.keywords])
        with self._inside(node, type_parameters(node), node.body):
            self._visit_all(node.body)

    def visit_ListComp(self, node: ast.ListComp) -> None:
        self._comprehension(node, [node.elt])

    def visit_SetComp(self, node: ast.SetComp) -> None:
        self._comprehension(node, [node.elt])

    def visit_GeneratorExp(self, node: ast.GeneratorExp) -> None:
        self._comprehension(node, [node.elt])

    def visit_DictComp(self, node: ast.DictComp) -> None:
        self._comprehension(node, [node.key, node.value])

    def _comprehension(self, node: ast.AST, results: list[ast.expr]) -> None:
        generators: list[ast.comprehension] = node.generators  # type: ignore[attr-defined]
        # the first is evaluated outside the scope that the comprehension opens
        self.visit(generators[0].iter)
        bound = {name for generator in generators for name in stored(generator.target)}
        self.names.bound |= bound
        self._scopes.append(Scope(False, bound))
        for index, generator in enumerate(generators):
            self._visit_all([*([generator.iter] if index else []), *generator.ifs])
        self._visit_all(results)
        self._scopes.pop()

    @contextmanager
    def _inside(self, node: Scoped, bound: set[str], body: Iterable[ast.AST]) -> Iterator[None]:
        is_class = isinstance(node, ast.ClassDef)
        scope = Scope(is_class, bound)
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
        """Visit what a string in an annotation says, which has no places in the file."""
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

    def visit_Import(self, node: ast.Import) -> None:
        self.names.imports.append(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self.names.imports.append(node)

    def _visit_all(self, nodes: Iterable[ast.AST]) -> None:
        for node in nodes:
            self.visit(node)


def _is_class_of_something(called: ast.expr) -> bool:
    if isinstance(called, ast.Call):
        return isinstance(called.func, ast.Name) and called.func.id == "type"
    return isinstance(called, ast.Attribute) and called.attr == "__class__"


def _quoted_types(expression: ast.AST) -> Iterator[str]:
    """The types in an annotation that are strings; those of `Literal` are values."""
    if isinstance(expression, ast.Constant) and isinstance(expression.value, str):
        yield expression.value
    elif not (isinstance(expression, ast.Subscript) and ast.unparse(expression.value).endswith("Literal")):
        for part in ast.iter_child_nodes(expression):
            yield from _quoted_types(part)


def _is_super(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"
