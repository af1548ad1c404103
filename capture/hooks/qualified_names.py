"""Qualified names of the functions that code objects belong to, which those of Python 3.10 do not tell themselves."""

from __future__ import annotations

import inspect
import linecache
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType
from typing import Any


def qualified_name(code: CodeType, module_globals: dict[str, Any]) -> str:
    """The qualified name of a code object's function; the plain one where Python 3.10 finds no source.

    Parameters
    ----------
    module_globals : of the function, which tell a source that is in no file
    """
    name: str | None = getattr(code, "co_qualname", None)
    if name is not None:
        return name
    linecache.lazycache(code.co_filename, module_globals)
    return _names(code.co_filename).get((code.co_name, code.co_firstlineno), code.co_name)


@lru_cache(maxsize=256)
def _names(file: str) -> dict[tuple[str, int], str]:
    """The qualified names of all functions of a source file, by name and first line."""
    try:
        module = compile("".join(linecache.getlines(file)), file, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return {}
    return dict(_inside(module, ""))


def _inside(code: CodeType, prefix: str) -> Iterator[tuple[tuple[str, int], str]]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            name = f"{prefix}{constant.co_name}"
            yield (constant.co_name, constant.co_firstlineno), name
            is_function = bool(constant.co_flags & inspect.CO_OPTIMIZED)
            yield from _inside(constant, f"{name}.<locals>." if is_function else f"{name}.")
