"""Decorates functions whose names are known before they are made: those inside others, and those of a script.

The source is compiled again with one more decorator before each of them, a constant that stands for ours. Lines and
columns stay as they were.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

from opgrip.capture.grip.patterns import LOCALS

Decorate = Callable[[Any], Any]

_FUTURE = 0x1FF0000
"""Flags of a code object that a future import sets."""


class CannotDecorate(Exception):
    """A function inside another one that cannot be had, by the reason."""


def decorated_module(source: str | bytes, file: str, is_gripped: Callable[[str], bool], decorate: Decorate) -> CodeType:
    """The code of a module whose functions of wanted qualified names are decorated."""
    tree = ast.parse(source, file)
    mark = _Marks(is_gripped)
    mark.visit(tree)
    return _with_constant(compile(tree, file, "exec", dont_inherit=True), mark.sentinel, decorate)


def decorated_inside(
    function: FunctionType, qualname: str, is_gripped: Callable[[str], bool], decorate: Decorate
) -> CodeType:
    """The code of a function whose inner functions of wanted qualified names are decorated when they are made.

    Parameters
    ----------
    qualname : of the function

    Raises
    ------
    CannotDecorate : where its source is not there, or is not what was loaded
    """
    code = function.__code__
    try:
        lines, first = inspect.getsourcelines(code)
        # below a condition, what is indented stays so, and columns are right
        tree = ast.parse("if True:\n" + "".join(lines)) if lines[0][:1].isspace() else ast.parse("".join(lines))
        above = 2 if lines[0][:1].isspace() else 1
        node = next(item for item in ast.walk(tree) if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef))
    except (OSError, TypeError, SyntaxError, StopIteration) as error:
        raise CannotDecorate("the source around it is not there") from error
    ast.increment_lineno(node, first - above)
    node.decorator_list = []
    marks = _Marks(is_gripped, qualname)
    for item in node.body:
        marks.visit(item)
    new_code = _compile_function(node, code, qualname)
    new_interface = (
        new_code.co_freevars,
        new_code.co_argcount,
        new_code.co_varnames[: new_code.co_argcount],
        new_code.co_firstlineno,
    )
    if new_interface != (code.co_freevars, code.co_argcount, code.co_varnames[: code.co_argcount], node.lineno):
        raise CannotDecorate("the source around it is not what was loaded")
    return _rename_code(_with_constant(new_code, marks.sentinel, decorate), qualname)


def _compile_function(node: ast.FunctionDef | ast.AsyncFunctionDef, code: CodeType, qualname: str) -> CodeType:
    """The code of a function, compiled where it finds the same variables around it."""
    body: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef = node
    owner = qualname.split(".")[-2] if qualname.count(".") else LOCALS
    if owner != LOCALS:
        # names with two underscores before are those of the class
        body = _at(ast.ClassDef(owner, [], [], [node], []), node)
    arguments = [_at(ast.arg(name), node) for name in code.co_freevars]
    outside = ast.Global([body.name])
    statements = [body] if body.name in code.co_freevars else [_at(outside, node), body]
    around = ast.FunctionDef(_AROUND, ast.arguments([], arguments, None, [], [], None, []), statements, [])
    if sys.version_info >= (3, 12):
        around.type_params = []
        if isinstance(body, ast.ClassDef):
            body.type_params = []
    module = ast.Module([_at(around, node)], [])
    flags = code.co_flags & _FUTURE
    whole = compile(ast.fix_missing_locations(module), code.co_filename, "exec", flags=flags, dont_inherit=True)
    return _find(whole, node.name, node.lineno)


_AROUND = "opgrip_around"


def _at(node: Any, where: ast.AST) -> Any:
    return ast.copy_location(node, where)


def _find(code: CodeType, name: str, line: int) -> CodeType:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            if constant.co_name == name and constant.co_firstlineno == line:
                return constant
            if constant.co_name == _AROUND or constant.co_flags & inspect.CO_NEWLOCALS == 0:
                return _find(constant, name, line)
    raise CannotDecorate("the source around it is not what was loaded")


def _rename_code(code: CodeType, qualname: str) -> CodeType:
    """Compiled code with the qualified names that it has in its module."""
    before = f"{_AROUND}.{LOCALS}.{qualname.rpartition(f'{LOCALS}.')[2]}"

    def name(text: str) -> str:
        return qualname + text[len(before) :] if text == before or text.startswith(f"{before}.") else text

    def rename_inner(inner: CodeType) -> CodeType:
        constants = tuple(
            rename_inner(item) if isinstance(item, CodeType) else name(item) if isinstance(item, str) else item
            for item in inner.co_consts
        )
        inner = inner.replace(co_consts=constants)
        # before, a function's qualified name was a constant beside its code
        return inner.replace(co_qualname=name(inner.co_qualname)) if sys.version_info >= (3, 11) else inner

    return rename_inner(code)


def _with_constant(code: CodeType, sentinel: str, value: Any) -> CodeType:
    """Code, and the code in it, with another constant in the place of a text."""
    constants = tuple(
        value
        if item == sentinel and isinstance(item, str)
        else _with_constant(item, sentinel, value)
        if isinstance(item, CodeType)
        else item
        for item in code.co_consts
    )
    return code.replace(co_consts=constants)


class _Marks(ast.NodeVisitor):
    """Puts a constant before each wanted function as its first decorator."""

    sentinel = "opgrip: a decorator stands here"

    def __init__(self, is_gripped: Callable[[str], bool], inside: str = "") -> None:
        self._is_gripped = is_gripped
        self._prefix = f"{inside}.{LOCALS}." if inside else ""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Mark a function, and those in it."""
        self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        """The same for one that is asynchronous."""
        self._function(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Mark a class's methods."""
        self._inside(node, f"{self._prefix}{node.name}.")

    def visit_Lambda(self, node: ast.Lambda) -> None:
        """What a lambda holds has no name."""

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        name = f"{self._prefix}{node.name}"
        if self._is_gripped(name):
            line = node.decorator_list[0] if node.decorator_list else node
            node.decorator_list.insert(0, _at(ast.Constant(self.sentinel), line))
        self._inside(node, f"{name}.{LOCALS}.")

    def _inside(self, node: ast.AST, prefix: str) -> None:
        before, self._prefix = self._prefix, prefix
        self.generic_visit(node)
        self._prefix = before
