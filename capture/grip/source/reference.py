"""Samples that name their function where it is installed, instead of holding its code."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import FunctionType
from typing import Any

from opgrip.capture.grip.gripped import Gripped
from opgrip.capture.grip.source.fields import Everything, named_in
from opgrip.capture.grip.source.imports import Import, render
from opgrip.capture.grip.source.module import ModuleText, objects_of, owner_of
from opgrip.capture.grip.source.packages import is_imported, top_level
from opgrip.errors import UserError


def reference_text(gripped: Gripped, origin: str) -> ModuleText:
    """The text of a module that imports a function, and the classes and functions among its arguments.

    Raises
    ------
    UserError : where it cannot be imported by its name
    """
    owner = owner_of(gripped)
    target = owner if owner is not None else gripped.function
    first = _import_of(target, gripped.entry)
    entry = first.name if owner is None else f"{first.name}.{gripped.entry.rpartition('.')[2]}"
    classes = {
        f"{thing.__module__}:{thing.__qualname__}": thing
        for thing in _list_project_objects(gripped)
        if thing is not target
    }
    imports = {name: _import_of(thing, name) for name, thing in classes.items()}
    names = [first.name, *dict.fromkeys(one.name for one in imports.values())]
    if len(names) < 1 + len(imports):
        raise UserError(f"{gripped.entry} takes objects of two classes of one name", "grip it without by_reference")
    exported = ", ".join(f'"{name}"' for name in sorted(names))
    text = f'"""{entry} of {origin}, where that is installed."""\n\n{render([first, *imports.values()])}\n\n'
    return ModuleText(
        f"{text}__all__ = [{exported}]\n",
        entry,
        {name: one.name for name, one in imports.items()},
        frozenset(),
        frozenset(top_level(one.module) for one in (first, *imports.values())),
        frozenset(),
    )


def _import_of(thing: Any, what: str) -> Import:
    module, qualname = str(thing.__module__), str(thing.__qualname__)
    if module == "__main__" or "." in qualname:
        raise UserError(f"{what} cannot be imported by its name", "grip it without by_reference")
    live = getattr(sys.modules.get(module), qualname, None)
    if getattr(live, "__qualname__", None) != qualname:
        raise UserError(f"{module} has no {qualname}", "grip it without by_reference")
    return Import(module, qualname, qualname)


def _list_project_objects(gripped: Gripped) -> Iterable[type | FunctionType]:
    return [thing for thing in named_in(objects_of(gripped), Everything()) if not is_imported(thing.__module__ or "")]
