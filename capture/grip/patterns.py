"""Patterns for the names of functions, and the search and replacement of matching functions."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import CodeType, FunctionType, ModuleType
from typing import Any, cast

from opgrip.errors import UserError

LOCALS = "<locals>"


@dataclass(frozen=True, slots=True)
class Pattern:
    """Pattern for the names of functions, with wildcards as in file names.

    qualname : pattern for qualified names such as `delta2bbox`, `Coder.decode`, `make.<locals>.inner`
    """

    module: str
    qualname: str

    def __str__(self) -> str:
        return f"{self.module}:{self.qualname}"

    def matches_module(self, name: str) -> bool:
        return fnmatchcase(name, self.module)

    def matches(self, qualname: str) -> bool:
        last, pattern_last = qualname.rpartition(".")[2], self.qualname.rpartition(".")[2]
        if last.startswith("__") and last.endswith("__") and not pattern_last.startswith("__"):
            return False
        if LOCALS in qualname and LOCALS not in self.qualname:
            return qualname.replace(f".{LOCALS}", "") == self.qualname
        return fnmatchcase(qualname, self.qualname)


def parse_pattern(text: str) -> Pattern:
    module, colon, qualname = text.partition(":")
    if not (module and colon and qualname) or ":" in qualname:
        raise UserError(
            f"{text!r} is not a pattern for functions", "write module:function, such as 'mmdet.models.*:delta2bbox'"
        )
    return Pattern(module, qualname)


@dataclass(frozen=True, slots=True)
class GripTarget:
    function: FunctionType
    owner: type | None
    qualname: str
    inside: Any = None
    inherited: bool = False


def find_targets(module: ModuleType, patterns: Sequence[Pattern]) -> Iterator[GripTarget]:
    module_patterns = [pattern for pattern in patterns if pattern.matches_module(module.__name__)]
    if module_patterns:
        yield from _in_namespace(vars(module), module.__name__, module_patterns, None, "", set())


def _in_namespace(
    namespace: Any, module: str, patterns: Sequence[Pattern], owner: type | None, prefix: str, visited_ids: set[int]
) -> Iterator[GripTarget]:
    for name, value in list(namespace.items()):
        function = plain_function(value)
        if function is not None and _belongs(function, module):
            qualname = f"{prefix}{name}"
            if any(pattern.matches(qualname) for pattern in patterns):
                yield GripTarget(function, owner, qualname)
            yield from _find_nested(function, qualname, owner, patterns)
        elif issubclass(type(value), type) and _belongs(value, module) and id(value) not in visited_ids:
            visited_ids.add(id(value))
            inner = f"{prefix}{name}."
            yield from _in_namespace(vars(value), value.__module__, patterns, value, inner, visited_ids)
            yield from _find_inherited(value, inner, patterns)


def _find_inherited(cls: type, prefix: str, patterns: Sequence[Pattern]) -> Iterator[GripTarget]:
    for pattern in patterns:
        # without wildcards, which match the class that defines the method as well, or should not match at all
        name = pattern.qualname.rpartition(".")[2]
        if pattern.qualname == prefix + name and name not in vars(cls):
            function = plain_function(inspect.getattr_static(cls, name, None))
            if function is not None:
                yield GripTarget(function, cls, pattern.qualname, inherited=True)


def _find_nested(
    function: FunctionType, qualname: str, owner: type | None, patterns: Sequence[Pattern]
) -> Iterator[GripTarget]:
    around = cast(Any, inspect.unwrap(function))
    if not isinstance(around, FunctionType):
        return
    for inner in nested_names(around.__code__, qualname):
        if any(pattern.matches(inner) for pattern in patterns):
            yield GripTarget(around, owner, inner, inside=around)


def nested_names(code: CodeType, qualname: str) -> Iterator[str]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType) and not constant.co_name.startswith("<"):
            inner = f"{qualname}.{LOCALS}.{constant.co_name}"
            yield inner
            yield from nested_names(constant, inner)


def plain_function(value: Any) -> FunctionType | None:
    # not isinstance, because some objects override `__class__`
    if type(value) in (staticmethod, classmethod):
        value = value.__func__
    return value if type(value) is FunctionType else None


def _belongs(value: Any, module: str) -> bool:
    home = getattr(value, "__module__", None)
    return isinstance(home, str) and (home == module or home.startswith(f"{module}."))


def refusal(function: Any) -> str | None:
    if isinstance(function, type):
        return "it is a class: name the method with entry="
    if not isinstance(function, FunctionType):
        return f"it is a {type(function).__qualname__}, not a Python function"
    plain = inspect.unwrap(function)
    if inspect.isasyncgenfunction(plain) or inspect.iscoroutinefunction(plain):
        return "it is asynchronous: a call returns before the work is done"
    if inspect.isgeneratorfunction(plain):
        return "it is a generator: a call returns before the work is done"
    return None


def loaded_modules() -> list[ModuleType]:
    modules: list[Any] = list(sys.modules.values())
    return [module for module in modules if isinstance(module, ModuleType)]


def rebind(replacements: Mapping[FunctionType, FunctionType], modules: Sequence[ModuleType] | None = None) -> None:
    """Replace functions and methods in the modules and classes that refer to them.

    replacements : new function by old function
    """
    by_id = {id(old): new for old, new in replacements.items()}
    if not by_id:
        return
    # read the namespace directly, because attribute access may make a lazy module load something
    namespaces = [vars(item) for item in modules or loaded_modules() if not item.__name__.startswith(_OWN_PACKAGE)]
    for namespace in namespaces:
        for name, value in list(namespace.items()):
            if (new := by_id.get(id(value))) is not None:
                namespace[name] = new
    for cls in _classes(namespaces):
        for name, value in list(vars(cls).items()):
            new_value = _replace_value(value, by_id)
            if new_value is not None:
                # bypass a `__setattr__` of the metaclass
                type.__setattr__(cls, name, new_value)


def _replace_value(value: Any, by_id: Mapping[int, FunctionType]) -> Any:
    if (new := by_id.get(id(value))) is not None:
        return new
    if type(value) in (staticmethod, classmethod) and (new := by_id.get(id(value.__func__))) is not None:
        return type(value)(new)
    return None


def _classes(namespaces: Sequence[dict[str, Any]]) -> Iterator[type]:
    visited_ids: set[int] = set()
    stack: list[Mapping[str, Any]] = list(namespaces)
    while stack:
        for value in list(stack.pop().values()):
            # not isinstance, because some objects override `__class__`
            if issubclass(type(value), type) and id(value) not in visited_ids and value.__flags__ & HEAP:
                visited_ids.add(id(value))
                stack.append(vars(value))
                yield value


HEAP = 1 << 9  # flag `Py_TPFLAGS_HEAPTYPE` of classes created at run time; classes implemented in C cannot be changed


_OWN_PACKAGE = __name__.rpartition(".")[0]


Decorate = Callable[[Any], Any]

_FUTURE = 0x1FF0000  # code flags that `from __future__` imports set


class CannotDecorate(Exception):
    pass


def decorated_module(source: str | bytes, file: str, is_gripped: Callable[[str], bool], decorate: Decorate) -> CodeType:
    """Compile a module so that it applies `decorate` to the functions that `is_gripped(qualname)` selects."""
    tree = ast.parse(source, file)
    mark = _Marks(is_gripped)
    mark.visit(tree)
    return _with_constant(compile(tree, file, "exec", dont_inherit=True), mark.sentinel, decorate)


def decorated_inside(
    function: FunctionType, qualname: str, is_gripped: Callable[[str], bool], decorate: Decorate
) -> CodeType:
    """Compile a function again so that it applies `decorate` to inner functions that `is_gripped(qualname)` selects."""
    code = function.__code__
    try:
        lines, first = inspect.getsourcelines(code)
        # wrap indented source in an `if`, which keeps indentation and columns
        tree = ast.parse("if True:\n" + "".join(lines)) if lines[0][:1].isspace() else ast.parse("".join(lines))
        above = 2 if lines[0][:1].isspace() else 1
        node = next(item for item in ast.walk(tree) if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef))
    except (OSError, TypeError, SyntaxError, StopIteration) as error:
        raise CannotDecorate("its source is not available") from error
    ast.increment_lineno(node, first - above)
    node.decorator_list = []
    marks = _Marks(is_gripped, qualname)
    for item in node.body:
        marks.visit(item)
    new_code = _compile_function(node, code, qualname)
    names, new_names = (one.co_varnames[: one.co_argcount] for one in (code, new_code))
    if (new_code.co_freevars, new_names, new_code.co_firstlineno) != (code.co_freevars, names, node.lineno):
        raise CannotDecorate("its source has changed since it was loaded")
    return _rename_code(_with_constant(new_code, marks.sentinel, decorate), qualname)


def _compile_function(node: ast.FunctionDef | ast.AsyncFunctionDef, code: CodeType, qualname: str) -> CodeType:
    body: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef = node
    owner = qualname.split(".")[-2] if qualname.count(".") else LOCALS
    if owner != LOCALS:
        # names with two leading underscores are mangled with the class's name
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
    raise CannotDecorate("its source has changed since it was loaded")


def _rename_code(code: CodeType, qualname: str) -> CodeType:
    before = f"{_AROUND}.{LOCALS}.{qualname.rpartition(f'{LOCALS}.')[2]}"

    def name(text: str) -> str:
        return qualname + text[len(before) :] if text == before or text.startswith(f"{before}.") else text

    def rename_inner(inner: CodeType) -> CodeType:
        constants = tuple(
            rename_inner(item) if isinstance(item, CodeType) else name(item) if isinstance(item, str) else item
            for item in inner.co_consts
        )
        inner = inner.replace(co_consts=constants)
        # before Python 3.11 the qualified name was a constant next to the code
        return inner.replace(co_qualname=name(inner.co_qualname)) if sys.version_info >= (3, 11) else inner

    return rename_inner(code)


def _with_constant(code: CodeType, sentinel: str, value: Any) -> CodeType:
    def changed(item: Any) -> Any:
        if isinstance(item, CodeType):
            return _with_constant(item, sentinel, value)
        return value if isinstance(item, str) and item == sentinel else item

    return code.replace(co_consts=tuple(map(changed, code.co_consts)))


class _Marks(ast.NodeVisitor):
    sentinel = "opgrip: placeholder of a decorator"

    def __init__(self, is_gripped: Callable[[str], bool], inside: str = "") -> None:
        self._is_gripped = is_gripped
        self._prefix = f"{inside}.{LOCALS}." if inside else ""

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        name = f"{self._prefix}{node.name}"
        if self._is_gripped(name):
            line = node.decorator_list[0] if node.decorator_list else node
            node.decorator_list.insert(0, _at(ast.Constant(self.sentinel), line))
        self._inside(node, f"{name}.{LOCALS}.")

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._inside(node, f"{self._prefix}{node.name}.")

    def visit_Lambda(self, node: ast.Lambda) -> None:
        """Skip lambdas, because functions inside them have no names."""

    def _inside(self, node: ast.AST, prefix: str) -> None:
        before, self._prefix = self._prefix, prefix
        self.generic_visit(node)
        self._prefix = before
