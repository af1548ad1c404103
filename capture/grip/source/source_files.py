"""Source of live functions and classes: the file, the definition in it, and the decorators that were applied."""

from __future__ import annotations

import ast
import inspect
import io
import linecache
import sys
import tokenize
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from types import CodeType, FunctionType, MethodType
from typing import Any, TypeAlias

from opgrip.capture.grip.source.free_names import parameters
from opgrip.capture.grip.source.imports import is_imported, module_of
from opgrip.capture.grip.source.live_names import (
    ABSENT,
    Namespace,
    evaluate,
    is_imported_code,
    namespace_of,
    plain,
    python_function,
    wrapped,
)
from opgrip.errors import UserError

Definition: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


@dataclass(frozen=True, eq=False)
class SourceFile:
    """A source file or notebook cell with its syntax tree; `name` is the file name in code objects."""

    name: str
    text: str
    tree: ast.Module = field(repr=False)

    @cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines(keepends=True)

    @cached_property
    def _starts(self) -> list[int]:
        starts = [0]
        for line in self.lines:
            starts.append(starts[-1] + len(line))
        return starts

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        return {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    @cached_property
    def codes(self) -> dict[tuple[str, int], list[CodeType]]:
        """Code objects of the compiled file, by their name and first line."""
        codes: dict[tuple[str, int], list[CodeType]] = {}
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        queue = [compile(self.text, self.name, "exec", flags=flags, dont_inherit=True)]
        for code in queue:
            codes.setdefault((code.co_name, code.co_firstlineno), []).append(code)
            queue += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        return codes

    @cached_property
    def string_lines(self) -> frozenset[int]:
        """Numbers of the lines that begin inside a string other than a docstring; their indentation must not change."""
        inside: set[int] = set()
        opened: list[int] = []
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            kind = tokenize.tok_name[token.type]
            if kind == "STRING":
                inside.update(range(token.start[0] + 1, token.end[0] + 1))
            elif kind in ("FSTRING_START", "TSTRING_START"):
                opened.append(token.start[0])
            elif kind in ("FSTRING_END", "TSTRING_END"):
                inside.update(range(opened.pop() + 1, token.end[0] + 1))
        for node in ast.walk(self.tree):
            doc = docstring_of(node)
            if doc is not None:
                inside.difference_update(range(doc.lineno, (doc.end_lineno or doc.lineno) + 1))
        return frozenset(inside)

    def offset(self, line: int, column: int) -> int:
        """Return the offset in the text for a line and column of the syntax tree, whose columns count bytes."""
        text = self.lines[line - 1]
        if not text.isascii():
            column = len(text.encode()[:column].decode())
        return self._starts[line - 1] + column

    def line_start(self, line: int) -> int:
        return self._starts[line - 1]

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Return the offsets in the text at which a node begins and ends."""
        begin = self.offset(node.lineno, node.col_offset)  # type: ignore[attr-defined]
        return begin, self.offset(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def segment(self, node: ast.AST) -> str:
        begin, end = self.span(node)
        return self.text[begin:end]

    def enclosing(self, node: ast.AST) -> Iterator[Definition]:
        """Yield the functions and classes that contain a node, innermost first."""
        around = self.parents.get(node)
        while around is not None:
            if isinstance(around, (*FUNCTIONS, ast.ClassDef)):
                yield around
            around = self.parents.get(around)

    def is_inside_function(self, node: ast.AST) -> bool:
        return any(isinstance(around, FUNCTIONS) for around in self.enclosing(node))

    def qualified_name(self, node: ast.ClassDef) -> str:
        names = [node.name]
        for around in self.enclosing(node):
            if isinstance(around, ast.ClassDef):
                names.append(around.name)
            else:
                names += ["<locals>", getattr(around, "name", "<lambda>")]
        return ".".join(reversed(names))


def docstring_of(node: ast.AST) -> ast.Constant | None:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module) or not node.body:
        return None
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        return first.value
    return None


def first_line(node: Definition) -> int:
    """Return the line at which a definition begins, which is that of its first decorator."""
    decorators = getattr(node, "decorator_list", None)
    line: int = decorators[0].lineno if decorators else node.lineno
    return line


@lru_cache(maxsize=512)
def _parse(name: str, text: str) -> SourceFile:
    return SourceFile(name, text, ast.parse(text))


def source_file(name: str, module_globals: dict[str, Any] | None, what: str) -> SourceFile:
    """Return the source file or notebook cell with this name in code objects; raise `UserError` if it is not found.

    module_globals : global variables of the module, from whose loader the source may come; None if unknown
    what : noun for the object whose source is searched, for the message
    """
    lines = linecache.getlines(name, module_globals)
    if not lines:
        raise UserError(f"no source was found for {what}", f"{name} cannot be read; define it in a file or a cell")
    try:
        return _parse(name, "".join(lines))
    except SyntaxError as error:
        raise UserError(f"the source of {what} does not parse", f"{name}: {error}") from error


def find_function(function: FunctionType) -> tuple[SourceFile, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda]:
    """Return file and syntax node of a function's definition; raise `UserError` if they are not found."""
    code, what = function.__code__, function.__qualname__
    file = source_file(code.co_filename, function.__globals__, what)
    nodes = [
        node
        for node in ast.walk(file.tree)
        if isinstance(node, FUNCTIONS)
        and first_line(node) == code.co_firstlineno
        and getattr(node, "name", "<lambda>") == code.co_name
        and _takes(code, [one.arg for one in parameters(node.args)])
    ]
    if len(nodes) > 1:
        nodes = [node for node in nodes if isinstance(node, ast.Lambda) and _is_written_at(code, node)]
    if len(nodes) != 1:
        why = "it changed since it was imported" if not nodes else "put each lambda on a separate line"
        raise UserError(f"{what} is not found in line {code.co_firstlineno} of {file.name}", why)
    if not _is_compiled_from(code, file):
        raise UserError(
            f"the source of {what} changed since it was imported", f"run the program with the changed {file.name} again"
        )
    return file, nodes[0]


def _is_compiled_from(code: CodeType, file: SourceFile) -> bool:
    if any(name.startswith("@py") for name in (*code.co_names, *code.co_varnames)):
        return True
    compiled = file.codes.get((code.co_name, code.co_firstlineno), [])
    return any(sorted(one.co_names) == sorted(code.co_names) for one in compiled)


def _takes(code: CodeType, parameters: list[str]) -> bool:
    stars = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + stars]
    # Python mangles names with two leading underscores inside a class
    return len(names) == len(parameters) and all(
        name == parameter or (parameter.startswith("__") and name.endswith(parameter))
        for name, parameter in zip(names, parameters, strict=True)
    )


def _is_written_at(code: CodeType, node: ast.Lambda) -> bool:
    body = node.body
    if hasattr(code, "co_positions"):
        return (body.lineno, body.end_lineno, body.col_offset, body.end_col_offset) in set(code.co_positions())
    used = {getattr(part, "id", getattr(part, "attr", None)) for part in ast.walk(body)}
    constants = {part.value for part in ast.walk(body) if isinstance(part, ast.Constant)}
    return used == {*code.co_names, *code.co_freevars, *code.co_varnames} and constants >= {*code.co_consts} - {None}


def find_class(cls: type) -> tuple[SourceFile, ast.ClassDef]:
    """Return file and syntax node of a class's definition; raise `UserError` if they are not found."""
    what = cls.__qualname__
    methods = [thing for thing in map(_plain_function, vars(cls).values()) if thing is not None]
    own = [
        thing for thing in methods if thing.__qualname__.startswith(f"{what}.") and thing.__module__ == cls.__module__
    ]
    for file in _files_of(cls, own):
        nodes = [
            node for node in ast.walk(file.tree) if isinstance(node, ast.ClassDef) and file.qualified_name(node) == what
        ]
        lines = {thing.__code__.co_firstlineno for thing in own if thing.__code__.co_filename == file.name}
        # of several definitions, for example in branches of an `if`, choose the one with the class's methods
        holding = [node for node in nodes if any(node.lineno <= line <= (node.end_lineno or 0) for line in lines)]
        if holding or nodes:
            return file, (holding or nodes)[-1]
    raise UserError(f"no source was found for the class {what}", "define it in a file or a cell")


def _files_of(cls: type, methods: list[FunctionType]) -> Iterator[SourceFile]:
    module = sys.modules.get(cls.__module__)
    names = [thing.__code__.co_filename for thing in methods]
    if getattr(module, "__file__", None):
        names.append(inspect.getsourcefile(module) or "")  # type: ignore[arg-type]
    elif not names:
        # the cell of a notebook class without methods is unknown: take the newest cell that defines the name
        names += [name for name in reversed(linecache.cache) if name.startswith("<") or "ipykernel" in name]
    for name in dict.fromkeys(filter(None, names)):
        with suppress(UserError):
            yield source_file(name, vars(module) if module else None, cls.__qualname__)


def _plain_function(attribute: Any) -> FunctionType | None:
    if isinstance(attribute, staticmethod | classmethod):
        attribute = attribute.__func__
    elif isinstance(attribute, property):
        attribute = attribute.fget
    try:
        attribute = inspect.unwrap(attribute) if callable(attribute) else None
    except ValueError:
        return None
    return attribute if isinstance(attribute, FunctionType) else None


@dataclass(frozen=True, slots=True)
class FunctionDefinition:
    """The definition of a live function in its source file.

    function : the function inside all decorators
    dropped : decorators that return the function unchanged, or that a sample leaves out
    """

    function: FunctionType
    file: SourceFile
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    dropped: tuple[ast.expr, ...]


def find_definition(thing: Any) -> FunctionDefinition:
    """Return the definition of a callable, with the decorators that created the callable from its function.

    A wrapper that was not applied as a decorator, as in `fast = cached(slow)`, is replaced by the wrapped function.
    """
    layers = _layers(plain(thing))
    for index in range(len(layers) - 1, -1, -1):
        function = layers[index]
        if not isinstance(function, FunctionType) or (index and is_imported_code(function)):
            continue
        file, node = find_function(function)
        decorators = [] if isinstance(node, ast.Lambda) else node.decorator_list
        wrapping_decorators = _find_wrapping_decorators(layers[:index], decorators, namespace_of(function))
        if wrapping_decorators is not None:
            return FunctionDefinition(
                function, file, node, tuple(one for one in decorators if one not in wrapping_decorators)
            )
    name = getattr(thing, "__qualname__", type(thing).__qualname__)
    raise UserError(
        f"{name} is not a Python function but an object of {type(thing).__qualname__}, whose source was not found"
    )


def _layers(thing: Any) -> list[Any]:
    layers = [thing]
    while len(layers) < 100:
        inner = wrapped(layers[-1])
        if inner is None:
            inner = _wrapped_silently(layers[-1])
        if inner is None:
            break
        layers.append(plain(inner))
    return layers


def _wrapped_silently(layer: Any) -> FunctionType | None:
    # a wrapper without `__wrapped__` holds the function
    if isinstance(layer, FunctionType):
        held = list(namespace_of(layer).closure.values())
    elif is_imported(type(layer).__module__):
        return None
    else:
        held = list(getattr(layer, "__dict__", {}).values())
    for thing in held:
        if not isinstance(thing, FunctionType) or is_imported(module_of(thing) or ""):
            continue
        try:
            _, node = find_function(thing)
        except UserError:
            continue
        decorators = getattr(node, "decorator_list", [])
        if any(_explains(one, layer, namespace_of(thing)) for one in decorators):
            return thing
    return None


def _find_wrapping_decorators(
    layers: list[Any], decorators: list[ast.expr], namespace: Namespace
) -> list[ast.expr] | None:
    wrapping_decorators: list[ast.expr] = []
    for layer in layers:
        reasons = [decorator for decorator in decorators if _explains(decorator, layer, namespace)]
        if not reasons:
            return None
        wrapping_decorators += reasons
    return wrapping_decorators


def _explains(decorator: ast.expr, layer: Any, namespace: Namespace) -> bool:
    live = evaluate(decorator.func if isinstance(decorator, ast.Call) else decorator, namespace)
    if live is ABSENT:
        return False
    if is_imported_code(layer):
        return is_imported(module_of(live) or type(live).__module__) and plain_name(live) not in _MODES
    if isinstance(live, type) and type(layer) is live:
        return True
    if not isinstance(layer, FunctionType):
        return False
    if isinstance(live, type):
        maker = python_function(vars(live).get("__call__"))
    else:
        maker = python_function(live.__func__ if isinstance(live, MethodType) else live)
    if maker is None:
        return False
    file, node = find_function(layer)
    return maker.__code__.co_filename == file.name and any(
        first_line(around) == maker.__code__.co_firstlineno for around in file.enclosing(node)
    )


_MODES = ("torch.jit._script.script", "torch.jit._script.script_if_tracing", "torch.compile")


def plain_name(thing: Any) -> str:
    return f"{module_of(thing)}.{getattr(thing, '__qualname__', '')}"
