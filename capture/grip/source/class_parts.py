"""What an attribute of a class is, and who may use it."""

from __future__ import annotations

import abc
import ast
import enum
import functools
from typing import Any, Generic, Protocol, is_typeddict

import torch

from opgrip.capture.grip.source.constants import is_literal
from opgrip.capture.grip.source.items import Piece
from opgrip.capture.grip.source.packages import is_imported
from opgrip.capture.grip.source.resolve import evaluate, python_function
from opgrip.capture.grip.source.scopes import bound_by

NO_BASES: frozenset[Any] = frozenset({object, abc.ABC, Generic, Protocol})
"""Classes that one inherits from for the sake of type checkers, or to be kept from leaving methods out."""

CONSTRUCTORS = ("__new__", "__init__")
_UNUSED_NAMES = """
    __repr__ __str__ __format__ __reduce__ __reduce_ex__ __getstate__ __setstate__ __deepcopy__ __copy__ __del__
    __dir__ __init_subclass__ __class_getitem__ __sizeof__ __subclasshook__
"""
_UNUSED = frozenset(_UNUSED_NAMES.split())
"""Special methods that results do not depend on."""

_PLAIN_CLASSES = (type("", (), {}), type("", (abc.ABC,), {}))
_OF_TYPING = ("__annotations__", "__orig_bases__", "__parameters__", "__slots__")
_OF_EACH_CLASS = frozenset({name for cls in _PLAIN_CLASSES for name in vars(cls)} | {*_OF_TYPING})


def is_taken(cls: type) -> bool:
    """Whether a class's source is taken in rather than imported."""
    return not is_imported(cls.__module__)


def is_whole(cls: type) -> bool:
    """Whether a class is what its body says as a whole, as enums, dataclasses and named tuples are."""
    made_of_fields = {"__dataclass_fields__", "__attrs_attrs__"} & vars(cls).keys() or hasattr(cls, "_field_defaults")
    return bool(made_of_fields) or issubclass(cls, enum.Enum) or is_typeddict(cls)


def provider_of(mro: tuple[type, ...], name: str) -> type | None:
    """The class of an order of resolution that an attribute comes from; None for what each class has."""
    return next((cls for cls in mro if name in vars(cls)), None) if name not in _OF_EACH_CLASS else None


def is_special(cls: type, name: str) -> bool:
    """Whether an attribute is a special method that its class defines and that Python may call."""
    if not (name.startswith("__") and name.endswith("__")) or name in _UNUSED:
        return False
    functions = [python_function(one) for one in functions_of(vars(cls)[name])]
    return any(one is not None and one.__qualname__.rpartition(".")[0] == cls.__qualname__ for one in functions)


def overrides(cls: type, name: str) -> bool:
    """Whether an imported class may call a method that it leaves to those that inherit from it.

    Modules have too many of these; of them, only `forward` is called unseen.
    """
    bases = [base for base in cls.__mro__ if not is_taken(base) and base not in NO_BASES]
    return torch.nn.Module not in bases and not name.startswith("__") and any(name in vars(base) for base in bases)


def functions_of(attribute: Any) -> list[Any]:
    """The functions that a class's attribute is made of."""
    if isinstance(attribute, property):
        return [one for one in (attribute.fget, attribute.fset, attribute.fdel) if one is not None]
    for name in ("__func__", "func"):
        inner = getattr(attribute, name, None)
        if inner is not None and not isinstance(attribute, functools.partial):
            return [inner]
    return [attribute] if python_function(attribute) is not None else []


def makes_descriptor(decorator: ast.expr, piece: Piece, value: Any) -> bool:
    """Whether a decorator makes a method a property, a static method or the like."""
    if isinstance(decorator, ast.Attribute) and decorator.attr in ("setter", "getter", "deleter"):
        return True
    decorator_object = evaluate(decorator, piece.namespace)
    return (
        isinstance(decorator_object, type)
        and isinstance(value, decorator_object)
        and is_imported(decorator_object.__module__)
    )


def defines(node: ast.stmt, name: str, cls: type) -> bool:
    """Whether a statement of a class's body gives an attribute of that name a value."""
    if isinstance(node, ast.AnnAssign) and node.value is None:
        return False
    # inside a class, Python puts the class's name before those that begin with two underscores
    prefix = f"_{cls.__name__.lstrip('_')}__"
    return bool({name, name.replace(prefix, "__", 1) if name.startswith(prefix) else name} & bound_by(node))


def has_changed(node: ast.Assign | ast.AnnAssign, value: Any) -> bool:
    """Whether a statement assigns a literal, and the attribute has another value by now."""
    try:
        ast.literal_eval(node.value)  # type: ignore[arg-type]
    except (ValueError, TypeError, SyntaxError):
        return False
    return not is_literal(node, value)
