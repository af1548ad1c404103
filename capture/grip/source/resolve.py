"""What a free name means in the program that runs: the live object behind it, and what becomes of that in a sample."""

from __future__ import annotations

import ast
import builtins
import functools
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any, get_origin

import torch

from opgrip.capture.grip.source.imports import is_imported, module_of, top_level
from opgrip.capture.grip.source.names import Use, dotted


class Absent:
    """What a name stands for that nothing bound so far."""


ABSENT = Absent()
_MOST_LAYERS = 100


class Kind(Enum):
    """What becomes of a live object in a sample."""

    BUILTIN = "it is there"
    ABSENT = "nothing is bound to the name"
    IMPORT = "imported"
    FUNCTION = "its source is taken in"
    CLASS = "the used part of its source is taken in"
    VALUE = "written as a literal"


@dataclass(frozen=True, slots=True)
class Namespace:
    """Where the free names of a piece of source are looked up.

    Attributes
    ----------
    module : name of the piece's module
    variables : that module's
    closure : variables of the functions around the piece
    """

    module: str
    variables: Mapping[str, Any]
    closure: Mapping[str, Any] = field(default_factory=dict)

    def lookup(self, name: str) -> Any:
        """The live object that a name stands for, `ABSENT` for none."""
        for scope in (self.closure, self.variables, vars(builtins)):
            if name in scope:
                return scope[name]
        return ABSENT


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a use means.

    Attributes
    ----------
    attribute_count : how many of the use's attributes lead from modules of the project to `thing`
    rest : the attributes after them, which are read off it
    """

    kind: Kind
    thing: Any
    attribute_count: int
    rest: tuple[str, ...]


def resolve(use: Use, namespace: Namespace) -> Meaning:
    """What a free name and the attributes read off it mean."""
    thing, attribute_count = namespace.lookup(use.name), 0
    while isinstance(thing, ModuleType) and not is_imported(thing.__name__) and attribute_count < len(use.attributes):
        thing = getattr(thing, use.attributes[attribute_count], ABSENT)
        attribute_count += 1
    is_builtin = not attribute_count and thing is not ABSENT and vars(builtins).get(use.name, ABSENT) is thing
    return Meaning(
        Kind.BUILTIN if is_builtin else kind_of(thing), thing, attribute_count, use.attributes[attribute_count:]
    )


def kind_of(thing: Any) -> Kind:
    """What becomes of a live object in a sample."""
    if thing is ABSENT:
        return Kind.ABSENT
    name = getattr(thing, "__name__", None)
    if isinstance(name, str) and getattr(builtins, name, ABSENT) is thing:
        return Kind.BUILTIN
    module = module_of(thing)
    if isinstance(thing, ModuleType):
        return Kind.IMPORT if is_imported(thing.__name__) else Kind.VALUE
    if get_origin(thing) is not None:
        return Kind.VALUE
    if isinstance(thing, type):
        return Kind.IMPORT if module and is_imported(module) else Kind.CLASS
    if isinstance(thing, functools.partial) or is_bound(thing):
        return Kind.VALUE
    if python_function(thing) is not None:
        return Kind.IMPORT if all(map(is_imported_code, layers_of(thing))) else Kind.FUNCTION
    if callable(thing) and isinstance(name, str) and is_imported(type(thing).__module__):
        return Kind.IMPORT
    return Kind.VALUE


def is_bound(thing: Any) -> bool:
    """Whether something is a method of an object, or of a class that no sample imports."""
    if isinstance(thing, MethodType):
        return True
    # `apply` of autograd functions since torch 2.15; functions in C have their module or a class of torch there
    owner = thing.__self__ if isinstance(thing, BuiltinFunctionType) else None
    return isinstance(owner, type) and not is_imported(owner.__module__)


def python_function(thing: Any) -> FunctionType | None:
    """The Python function that something callable is or wraps, None where there is none."""
    inner = layers_of(thing)[-1]
    return inner if isinstance(inner, FunctionType) else None


def layers_of(thing: Any) -> list[Any]:
    """Something callable, what it says that it wraps, and so on."""
    layers = [plain(thing)]
    while len(layers) < _MOST_LAYERS and (inner := wrapped(layers[-1])) is not None:
        layers.append(plain(inner))
    return layers


def is_imported_code(layer: Any) -> bool:
    """Whether a function, or the class of another callable, is of an imported package."""
    if isinstance(layer, FunctionType):
        return is_imported(layer.__globals__.get("__name__") or "")
    return is_imported(type(layer).__module__)


def wrapped(thing: Any) -> Any:
    """What a wrapper says that it wraps, None where it says nothing."""
    inner = getattr(thing, "__dict__", {}).get("__wrapped__")
    return inner if callable(inner) else None


def plain(thing: Any) -> Any:
    """A function without what scripts, compiles or watches it: a sample runs under other modes than the program."""
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
    """Where the free names of a function are looked up."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    closure = {name: _content(cell) for name, cell in cells if name != "__class__"}
    variables = function.__globals__
    return Namespace(variables.get("__name__", function.__module__) or "", variables, closure)


def namespace_of_class(cls: type) -> Namespace:
    """Where the names in a class's body are looked up, those of the body itself aside."""
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
    """The live object that a name or `a.b.c` means; `ABSENT` for other expressions."""
    chain = dotted(expression)
    if chain is None:
        return ABSENT
    thing = namespace.lookup(chain[0].id)
    for attribute in chain[1]:
        thing = getattr(thing, attribute.attr, ABSENT)
    return thing
