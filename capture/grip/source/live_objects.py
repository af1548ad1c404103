"""Live objects of the program to which free names refer, and the source of functions and classes."""

from __future__ import annotations

import ast
import builtins
import enum
import functools
import inspect
import io
import linecache
import re
import sys
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import cache, cached_property, lru_cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias, get_origin

import numpy as np
import torch

from opgrip.capture.grip.source.free_names import AttributeOwner, Mention, Use, dotted, parameters
from opgrip.errors import UserError

_WIDELY_USED = """
    PIL addict attr attrs cv2 einops functorch h5py imageio jax jaxlib joblib jsonschema matplotlib ml_dtypes networkx
    numba numpy onnx onnxruntime onnxscript opt_einsum optree packaging pandas psutil pyarrow pycocotools pydantic
    regex requests rich safetensors scipy seaborn shapely six skimage sklearn sympy tensorflow torch torchaudio
    torchgen torchvision tqdm triton typing_extensions xarray yaml
"""
# top-level packages that samples import, in addition to the standard library
IMPORTED = frozenset(_WIDELY_USED.split())

_LIBRARY = Path(sysconfig.get_path("stdlib")).resolve()


def top_level(module: str) -> str:
    """Return the top-level package of a module: `mmdet` for `mmdet.models.losses`."""
    return module.partition(".")[0]


@cache
def is_of_python(module: str) -> bool:
    """Return True for a module of the standard library, and False for a user's module of the same name."""
    name = top_level(module)
    if name not in sys.stdlib_module_names:
        return False
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is None or Path(file).resolve().is_relative_to(_LIBRARY)


def is_imported(module: str) -> bool:
    """Return True if samples import the module with this full name instead of including its source."""
    is_compiled = str(getattr(sys.modules.get(module), "__file__", "")).endswith(tuple(EXTENSION_SUFFIXES))
    return is_compiled or top_level(module) in IMPORTED or is_of_python(module)


def module_of(thing: Any) -> str | None:
    name = thing.__name__ if isinstance(thing, ModuleType) else getattr(thing, "__module__", None)
    return name if isinstance(name, str) else None


class Absent:
    pass


ABSENT = Absent()
_MOST_LAYERS = 100


class Treatment(Enum):
    BUILTIN = "it is there"
    ABSENT = "nothing is bound to the name"
    IMPORT = "imported"
    FUNCTION = "its source is taken in"
    CLASS = "the used part of its source is taken in"
    VALUE = "written as a literal"


@dataclass(frozen=True, slots=True)
class Namespace:
    module: str
    variables: Mapping[str, Any]
    closure: Mapping[str, Any] = field(default_factory=dict)

    def lookup(self, name: str) -> Any:
        for scope in (self.closure, self.variables, vars(builtins)):
            if name in scope:
                return scope[name]
        return ABSENT


@dataclass(frozen=True, slots=True)
class Meaning:
    """The object to which a free name with its attributes refers.

    attribute_count : number of attributes that lead to `thing`, such as 1 for `boxes.area` if `boxes` is a module
    """

    treatment: Treatment
    thing: Any
    attribute_count: int
    rest: tuple[str, ...]


def resolve(use: Use, namespace: Namespace) -> Meaning:
    """Return the object that a free name with its attributes refers to, and how a sample includes the object."""
    thing, attribute_count = namespace.lookup(use.name), 0
    while isinstance(thing, ModuleType) and not is_imported(thing.__name__) and attribute_count < len(use.attributes):
        thing = getattr(thing, use.attributes[attribute_count], ABSENT)
        attribute_count += 1
    is_builtin = not attribute_count and thing is not ABSENT and vars(builtins).get(use.name, ABSENT) is thing
    return Meaning(
        Treatment.BUILTIN if is_builtin else treatment_of(thing),
        thing,
        attribute_count,
        use.attributes[attribute_count:],
    )


def treatment_of(thing: Any) -> Treatment:
    if thing is ABSENT:
        return Treatment.ABSENT
    name = getattr(thing, "__name__", None)
    if isinstance(name, str) and getattr(builtins, name, ABSENT) is thing:
        return Treatment.BUILTIN
    module = module_of(thing)
    if isinstance(thing, ModuleType):
        return Treatment.IMPORT if is_imported(thing.__name__) else Treatment.VALUE
    if get_origin(thing) is not None:
        return Treatment.VALUE
    if isinstance(thing, type):
        return Treatment.IMPORT if module and is_imported(module) else Treatment.CLASS
    if isinstance(thing, functools.partial) or is_bound(thing):
        return Treatment.VALUE
    if python_function(thing) is not None:
        return Treatment.IMPORT if all(map(is_imported_code, layers_of(thing))) else Treatment.FUNCTION
    if callable(thing) and isinstance(name, str) and is_imported(type(thing).__module__):
        return Treatment.IMPORT
    return Treatment.VALUE


def is_bound(thing: Any) -> bool:
    if isinstance(thing, MethodType):
        return True
    # such as `apply` of autograd functions since torch 2.15; for functions in C, `__self__` is a module or a class of
    # torch
    owner = thing.__self__ if isinstance(thing, BuiltinFunctionType) else None
    return isinstance(owner, type) and not is_imported(owner.__module__)


def python_function(thing: Any) -> FunctionType | None:
    """Return the Python function that a callable is or wraps."""
    inner = layers_of(thing)[-1]
    return inner if isinstance(inner, FunctionType) else None


def layers_of(thing: Any, unmarked: bool = False) -> list[Any]:
    """Return a callable and everything that it wraps, outermost first.

    unmarked : True to look also into wrappers that do not set `__wrapped__`
    """
    layers = [plain(thing)]
    while len(layers) < _MOST_LAYERS:
        inner = wrapped(layers[-1])
        if inner is None and unmarked:
            inner = _wrapped_silently(layers[-1])
        if inner is None:
            break
        layers.append(plain(inner))
    return layers


def is_imported_code(layer: Any) -> bool:
    if isinstance(layer, FunctionType):
        return is_imported(layer.__globals__.get("__name__") or "")
    return is_imported(type(layer).__module__)


def wrapped(thing: Any) -> Any:
    inner = getattr(thing, "__dict__", {}).get("__wrapped__")
    return inner if callable(inner) else None


def plain(thing: Any) -> Any:
    """Return the function inside wrappers of TorchScript, torch.compile and opgrip, or `thing` itself."""
    while True:
        if isinstance(thing, torch.jit.ScriptFunction):
            inner = getattr(thing, "_torchdynamo_inline", None)
        elif "__script_if_tracing_wrapper" in getattr(thing, "__dict__", {}):
            inner = vars(thing)["__original_fn"]
        elif "_torchdynamo_orig_callable" in getattr(thing, "__dict__", {}):
            inner = vars(thing)["_torchdynamo_orig_callable"]
        elif isinstance(thing, FunctionType) and top_level(thing.__globals__.get("__name__") or "") == "opgrip":
            inner = wrapped(thing)
        else:
            return thing
        if inner is None or inner is thing:
            return thing
        thing = inner


def namespace_of(function: FunctionType) -> Namespace:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    closure = {name: _content(cell) for name, cell in cells if name != "__class__"}
    variables = function.__globals__
    return Namespace(variables.get("__name__", function.__module__) or "", variables, closure)


def namespace_of_class(cls: type) -> Namespace:
    closure: dict[str, Any] = {}
    variables: Mapping[str, Any] = vars(sys.modules[cls.__module__]) if cls.__module__ in sys.modules else {}
    for attribute in list(vars(cls).values()):
        function = python_function(getattr(attribute, "__func__", getattr(attribute, "fget", attribute)))
        if function is not None and function.__globals__.get("__name__") == cls.__module__:
            inner = namespace_of(function)
            closure |= inner.closure
            variables = inner.variables
    return Namespace(cls.__module__, variables, closure)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return ABSENT


def evaluate(expression: ast.expr, namespace: Namespace) -> Any:
    chain = dotted(expression)
    if chain is None:
        return ABSENT
    thing = namespace.lookup(chain[0].id)
    for attribute in chain[1]:
        thing = getattr(thing, attribute.attr, ABSENT)
    return thing


_ALL_CHILDREN = ("children", "modules", "named_children", "named_modules", "apply", "_modules")
_LEAVES = (torch.Tensor, np.ndarray, str, bytes, int, float, complex, type(None))


class Mentioned:
    def __init__(self, mentions: Iterable[Mention]) -> None:
        mentions = set(mentions)
        self._all = _Words(mention.attribute for mention in mentions)
        self._of_others = _Words(mention.attribute for mention in mentions if mention.owner is AttributeOwner.ANY)

    def of_others(self, name: str) -> bool:
        return name in self._of_others

    def as_field(self, name: str) -> bool:
        return name in self._all


class Everything(Mentioned):
    def __init__(self) -> None:
        super().__init__([Mention(".*", AttributeOwner.ANY)])


class _Words:
    def __init__(self, words: Iterable[str]) -> None:
        self._names = set(words)
        self._patterns = [re.compile(word) for word in self._names if ".*" in word]

    def __contains__(self, name: str) -> bool:
        return name in self._names or any(pattern.fullmatch(name) for pattern in self._patterns)


def named_in(objects: Iterable[Any], mentioned: Mentioned) -> list[type | FunctionType]:
    """Return the program's functions and classes that `objects` contain, and the program's classes of these objects."""
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
    """Return the strings in nested lists, tuples and values of dictionaries that are valid Python identifiers."""
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
    if isinstance(thing, enum.Enum):
        return
    if isinstance(thing, Mapping):
        yield from thing.keys()
        yield from thing.values()
    elif isinstance(thing, list | tuple | AbstractSet):
        yield from thing
    elif isinstance(thing, torch.nn.Module):
        # code that is not included, or iterates over them, may use any
        every = is_imported(getattr(type(thing).forward, "__module__", "")) or any(
            map(mentioned.as_field, _ALL_CHILDREN)
        )
        # a list may contain their names, over which code calls `getattr`
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


Definition: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


@dataclass(frozen=True, eq=False)
class SourceFile:
    """A source file or notebook cell with its syntax tree; `name` is its name in code objects."""

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
        codes: dict[tuple[str, int], list[CodeType]] = {}
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        queue = [compile(self.text, self.name, "exec", flags=flags, dont_inherit=True)]
        for code in queue:
            codes.setdefault((code.co_name, code.co_firstlineno), []).append(code)
            queue += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        return codes

    @cached_property
    def string_lines(self) -> frozenset[int]:
        """Numbers of the lines that begin inside a string other than a docstring."""
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
        begin = self.offset(node.lineno, node.col_offset)  # type: ignore[attr-defined]
        return begin, self.offset(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def segment(self, node: ast.AST) -> str:
        begin, end = self.span(node)
        return self.text[begin:end]

    def enclosing(self, node: ast.AST) -> Iterator[Definition]:
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
    decorators = getattr(node, "decorator_list", None)
    line: int = decorators[0].lineno if decorators else node.lineno
    return line


@lru_cache(maxsize=512)
def _parse(name: str, text: str) -> SourceFile:
    return SourceFile(name, text, ast.parse(text))


def source_file(name: str, module_globals: dict[str, Any] | None, what: str) -> SourceFile:
    lines = linecache.getlines(name, module_globals)
    if not lines:
        raise UserError(
            f"no source was found for {what}", f"{name} cannot be read; define {what} in a file or a notebook cell"
        )
    try:
        return _parse(name, "".join(lines))
    except SyntaxError as error:
        raise UserError(f"the source of {what} does not parse", f"{name}: {error}") from error


def find_function(function: FunctionType) -> tuple[SourceFile, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda]:
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
        why = "the file has changed since it was imported" if not nodes else "put each lambda on a separate line"
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
    raise UserError(f"no source was found for the class {what}", "define it in a file or a notebook cell")


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
    function: FunctionType
    file: SourceFile
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    dropped: tuple[ast.expr, ...]


def find_definition(thing: Any) -> FunctionDefinition:
    layers = layers_of(thing, unmarked=True)
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


@dataclass(frozen=True, slots=True)
class Import:
    """An import statement that binds one name.

    attribute : `Tensor` in `from torch import Tensor`; None for `import torch`
    """

    module: str
    attribute: str | None
    alias: str

    @property
    def name(self) -> str:
        return self.alias or self.module.partition(".")[0]


def import_of(name: str, attributes: Sequence[str], thing: Any, file: SourceFile | None, package: str) -> Import | None:
    plain: Import | None = None
    for statement in _bindings(file).get(name, ()) if file is not None else ():
        for candidate in _read(statement, name, package):
            bound = live_import(candidate.module if candidate.alias else candidate.name, candidate.attribute)
            if bound is not thing or not is_imported(candidate.module):
                continue
            if candidate.alias:
                return candidate
            if candidate.module.split(".")[1:] == list(attributes[: candidate.module.count(".")]):
                plain = candidate if plain is None or len(candidate.module) > len(plain.module) else plain
    return plain or _import_by_object(name, thing)


@lru_cache(maxsize=512)
def _bindings(file: SourceFile) -> dict[str, list[ast.Import | ast.ImportFrom]]:
    statements_by_name: dict[str, list[ast.Import | ast.ImportFrom]] = {}
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Import | ast.ImportFrom) and not file.is_inside_function(node):
            for alias in node.names:
                statements_by_name.setdefault(alias.asname or alias.name.partition(".")[0], []).append(node)
    return statements_by_name


def _read(statement: ast.Import | ast.ImportFrom, name: str, package: str) -> list[Import]:
    imports = []
    for alias in statement.names:
        if isinstance(statement, ast.ImportFrom):
            if (alias.asname or alias.name) == name:
                imports.append(Import(source_module(statement, package), alias.name, name))
        elif alias.asname == name or (alias.asname is None and alias.name == name):
            imports.append(Import(alias.name, None, name))
        elif alias.asname is None and alias.name.startswith(name + "."):
            imports.append(Import(alias.name, None, ""))
    return imports


def source_module(statement: ast.ImportFrom, package: str) -> str:
    """Return the full name of the module in a `from` statement, which may be relative to `package`."""
    if not statement.level:
        return statement.module or ""
    parents = package.split(".")
    parents = parents[: len(parents) - statement.level + 1]
    return ".".join([*parents, *([statement.module] if statement.module else [])])


def live_import(module: str, attribute: str | None) -> Any:
    """Return the loaded module or attribute that an import statement names."""
    if attribute is None:
        return sys.modules.get(module)
    value = getattr(sys.modules.get(module), attribute, None)
    return sys.modules.get(f"{module}.{attribute}") if value is None else value


def _import_by_object(name: str, thing: Any) -> Import | None:
    module = module_of(thing)
    if module is None or not is_imported(module):
        return None
    if isinstance(thing, ModuleType):
        parent, _, last = module.rpartition(".")
        if last == name and parent:
            return Import(parent, last, name)
        return Import(module, None, name)
    own = getattr(thing, "__name__", None)
    if not isinstance(own, str):
        return None
    parts = module.split(".")
    # prefer torch.nn to torch.nn.modules.conv
    for length in range(1, len(parts) + 1):
        prefix = ".".join(parts[:length])
        for attribute in dict.fromkeys((own, name)):
            if getattr(sys.modules.get(prefix), attribute, None) is thing:
                return Import(prefix, attribute, name if attribute != own else own)
    return None
