"""Replaces functions wherever loaded modules and their classes have them, under whatever name, and puts them back."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any

_OWN = __name__.rpartition(".")[0]


def loaded_modules() -> list[ModuleType]:
    """The program's modules."""
    modules: list[Any] = list(sys.modules.values())
    return [module for module in modules if isinstance(module, ModuleType)]


def rebind(replacements: Mapping[FunctionType, FunctionType], modules: Sequence[ModuleType] | None = None) -> None:
    """Put each value of the mapping where its key stands: in modules' namespaces and in classes, as a method too.

    Parameters
    ----------
    modules : where to look; None for all that are loaded
    """
    by_id = {id(old): new for old, new in replacements.items()}
    if not by_id:
        return
    # what is there alone: a lazy module may be asked for a name and load something
    namespaces = [vars(item) for item in modules or loaded_modules() if not item.__name__.startswith(_OWN)]
    for namespace in namespaces:
        for name, value in list(namespace.items()):
            if (new := by_id.get(id(value))) is not None:
                namespace[name] = new
    for cls in _classes(namespaces):
        for name, value in list(vars(cls).items()):
            new_value = _replace_value(value, by_id)
            if new_value is not None:
                # past the ways that a metaclass may have to set attributes
                type.__setattr__(cls, name, new_value)


def _replace_value(value: Any, by_id: Mapping[int, FunctionType]) -> Any:
    if (new := by_id.get(id(value))) is not None:
        return new
    if type(value) in (staticmethod, classmethod) and (new := by_id.get(id(value.__func__))) is not None:
        return type(value)(new)
    return None


def _classes(namespaces: Sequence[dict[str, Any]]) -> Iterator[type]:
    """The classes in namespaces, those inside classes included, each once."""
    visited_ids: set[int] = set()
    stack: list[Mapping[str, Any]] = list(namespaces)
    while stack:
        for value in list(stack.pop().values()):
            # not isinstance, which asks some values what they say they are
            if issubclass(type(value), type) and id(value) not in visited_ids and value.__flags__ & _HEAP:
                visited_ids.add(id(value))
                stack.append(vars(value))
                yield value


_HEAP = 1 << 9
"""Flag of classes that were made while Python ran: those of C cannot be changed."""
