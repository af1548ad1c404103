"""Sizes that a graph writes as arithmetic on named ones: worked out step by step, never evaluated.

Torch writes them as sympy prints them, `2*s0 + 1`, or as sympy builds them,
`Add(Mul(Integer(2), Symbol('s0', integer=True)), Integer(1))`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping

MOST_CHARACTERS = 2000
MOST_SIZE = 1 << 62

_BINARY: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: lambda left, right: left + right,
    ast.Sub: lambda left, right: left - right,
    ast.Mult: lambda left, right: left * right,
    ast.FloorDiv: lambda left, right: left // right,
    ast.Mod: lambda left, right: left % right,
}
_FUNCTIONS: dict[str, Callable[[int, int], int]] = {
    "FloorDiv": lambda left, right: left // right,
    "CleanDiv": lambda left, right: left // right,
    "IntTrueDiv": lambda left, right: left // right,
    "CeilDiv": lambda left, right: -(-left // right),
    "Mod": lambda left, right: left % right,
    "PythonMod": lambda left, right: left % right,
    "Max": max,
    "Min": min,
}


def size_of(text: str, sizes: Mapping[str, int]) -> int:
    """What an expression comes to.

    Parameters
    ----------
    sizes : of the names in it

    Raises
    ------
    ValueError : for one that is no such arithmetic, has a name that is not known, or comes to no size
    """
    if len(text) > MOST_CHARACTERS:
        raise ValueError("a size whose expression is too long")
    try:
        size = _value(ast.parse(text.strip(), mode="eval").body, sizes)
    except (SyntaxError, RecursionError, MemoryError, KeyError, ZeroDivisionError) as error:
        raise ValueError("a size that is not known") from error
    if size < 0:
        raise ValueError("a size below zero")
    return size


def _value(node: ast.expr, sizes: Mapping[str, int]) -> int:
    match node:
        case ast.Constant(value=int() as value):
            result = int(value)
        case ast.Name(id=name):
            result = sizes[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            result = -_value(operand, sizes)
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _BINARY:
            result = _BINARY[type(operator)](_value(left, sizes), _value(right, sizes))
        case ast.Call(func=ast.Name(id="Symbol"), args=[ast.Constant(value=str() as name)]):
            result = sizes[name]
        case ast.Call(func=ast.Name(id="Integer"), args=[operand], keywords=[]):
            result = _value(operand, sizes)
        case ast.Call(func=ast.Name(id="Add"), args=operands, keywords=[]):
            result = sum(_value(operand, sizes) for operand in operands)
        case ast.Call(func=ast.Name(id="Mul"), args=operands, keywords=[]):
            result = 1
            for operand in operands:
                result = _value(ast.Constant(value=result), sizes) * _value(operand, sizes)
        case ast.Call(func=ast.Name(id=name), args=[first, second], keywords=[]) if name in _FUNCTIONS:
            result = _FUNCTIONS[name](_value(first, sizes), _value(second, sizes))
        case _:
            raise ValueError("a size that is not known")
    if abs(result) > MOST_SIZE:
        raise ValueError("a size beyond 62 bits")
    return result
