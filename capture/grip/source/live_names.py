"""Search in the running program for the objects to which free names refer, and for its classes among objects."""

from __future__ import annotations

import ast
import builtins
import enum
import functools
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import Enum
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any, get_origin

import numpy as np
import torch

from opgrip.capture.grip.source.free_names import AttributeOwner, Mention, Use, dotted
from opgrip.capture.grip.source.imports import is_imported, module_of, top_level


class Absent:
    """Type of the marker `ABSENT` for a name that is not bound."""


ABSENT = Absent()
_MOST_LAYERS = 100


class Treatment(Enum):
    """How a sample includes a live object: as a builtin, an import, a function, a class or a value."""

    BUILTIN = "it is there"
    ABSENT = "nothing is bound to the name"
    IMPORT = "imported"
    FUNCTION = "its source is taken in"
    CLASS = "the used part of its source is taken in"
    VALUE = "written as a literal"


@dataclass(frozen=True, slots=True)
class Namespace:
    """The namespaces in which the free names of a piece of source are looked up.

    variables : global variables of the module
    closure : variables of enclosing functions
    """

    module: str
    variables: Mapping[str, Any]
    closure: Mapping[str, Any] = field(default_factory=dict)

    def lookup(self, name: str) -> Any:
        """Return the live object to which a free name refers, or `ABSENT`."""
        for scope in (self.closure, self.variables, vars(builtins)):
            if name in scope:
                return scope[name]
        return ABSENT


@dataclass(frozen=True, slots=True)
class Meaning:
    """The live object to which a free name with its attributes refers.

    attribute_count : number of attributes that lead from a module of the program to `thing`
    rest : the remaining attributes, which are read from `thing`
    """

    treatment: Treatment
    thing: Any
    attribute_count: int
    rest: tuple[str, ...]


def resolve(use: Use, namespace: Namespace) -> Meaning:
    """Return the live object to which a free name with its attributes refers, and how a sample includes it."""
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
    """Return True for a method bound to an object, or to a class that samples do not import."""
    if isinstance(thing, MethodType):
        return True
    # such as `apply` of autograd functions since torch 2.15; for functions in C, `__self__` is a module or a class of
    # torch
    owner = thing.__self__ if isinstance(thing, BuiltinFunctionType) else None
    return isinstance(owner, type) and not is_imported(owner.__module__)


def python_function(thing: Any) -> FunctionType | None:
    """Return the Python function that a callable is or wraps, or None."""
    inner = layers_of(thing)[-1]
    return inner if isinstance(inner, FunctionType) else None


def layers_of(thing: Any) -> list[Any]:
    """Return a callable and everything that it wraps (`__wrapped__`), outermost first."""
    layers = [plain(thing)]
    while len(layers) < _MOST_LAYERS and (inner := wrapped(layers[-1])) is not None:
        layers.append(plain(inner))
    return layers


def is_imported_code(layer: Any) -> bool:
    """Return True if a function, or the class of another callable, belongs to an imported package."""
    if isinstance(layer, FunctionType):
        return is_imported(layer.__globals__.get("__name__") or "")
    return is_imported(type(layer).__module__)


def wrapped(thing: Any) -> Any:
    """Return the callable that a wrapper names as its `__wrapped__`, or None."""
    inner = getattr(thing, "__dict__", {}).get("__wrapped__")
    return inner if callable(inner) else None


def plain(thing: Any) -> Any:
    """Return the function inside wrappers that script, compile or record it; `thing` itself if it is no such
    wrapper.
    """
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
    """Return the namespaces in which names in a class's body are looked up, without the names of the body itself."""
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
    """Return the live object to which an expression such as `a` or `a.b.c` refers; `ABSENT` for other expressions."""
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
    """The attributes that code reads from objects of unknown class."""

    def __init__(self, mentions: Iterable[Mention]) -> None:
        mentions = set(mentions)
        self._all = _Words(mention.attribute for mention in mentions)
        self._of_others = _Words(mention.attribute for mention in mentions if mention.owner is AttributeOwner.ANY)

    def of_others(self, name: str) -> bool:
        """Return True if code reads an attribute `name` from an object other than `self`."""
        return name in self._of_others

    def as_field(self, name: str) -> bool:
        """Return True if code reads an attribute `name` from any object."""
        return name in self._all

    def all_children(self) -> bool:
        """Return True if code iterates over the submodules of torch modules."""
        return any(name in self._all for name in _ALL_CHILDREN)


class Everything(Mentioned):
    """Stands for code that reads every attribute."""

    def __init__(self) -> None:
        super().__init__([Mention(".*", AttributeOwner.ANY)])


class _Words:
    def __init__(self, words: Iterable[str]) -> None:
        self._names = set(words)
        self._patterns = [re.compile(word) for word in self._names if ".*" in word]

    def __contains__(self, name: str) -> bool:
        return name in self._names or any(pattern.fullmatch(name) for pattern in self._patterns)


def named_in(objects: Iterable[Any], mentioned: Mentioned) -> list[type | FunctionType]:
    """Return the classes and functions of the program among objects, and among attributes that code reads from them."""
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
    """Return the strings in nested containers that are valid names in Python."""
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
        # code that is not included may iterate over them
        every = is_imported(getattr(type(thing).forward, "__module__", "")) or mentioned.all_children()
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
