"""Lists of numbers and texts in Python's notation, as Chakra holds values: parsed, and never evaluated."""

from __future__ import annotations

import ast
from typing import Any

from opgrip.errors import FormatError

MOST_TEXT = 1 << 20
"""Characters of a list, of which each may cost half a KB of memory to parse."""


def parse_list(text: str) -> list[Any]:
    """The list that a text stands for; empty for an empty text.

    Raises
    ------
    FormatError : for a text that is no list of numbers, texts, booleans and such lists
    """
    if not text:
        return []
    if len(text) > MOST_TEXT:
        raise FormatError("values that are too long")
    try:
        value = _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise FormatError("values that cannot be read") from error
    if not isinstance(value, list):
        raise FormatError("values that are no list")
    return value


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str() as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return list(map(_value, items))
        case ast.Name(id="inf" | "nan" as name):
            return float(name)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Name(id="inf")):
            return float("-inf")
    raise FormatError("values that cannot be read")
