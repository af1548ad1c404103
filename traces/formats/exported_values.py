"""Conversion of JSON values in an exported program, including symbolic sizes, which are parsed and never evaluated.

Torch writes sizes as sympy prints them, `2*s0 + 1`, or as sympy builds them,
`Add(Mul(Integer(2), Symbol('s0', integer=True)), Integer(1))`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from opgrip.traces.schema.arguments import TensorSpec
from opgrip.traces.schema.json_values import LIMIT, device_name
from opgrip.traces.schema.tensor_specs import DTYPES, LAYOUTS, MEMORY_FORMATS

MOST_CHARACTERS = 2000
MOST_SIZE = 1 << 62


def _quotient(left: int, right: int) -> int:
    if left % right:
        raise ValueError(f"a size is not an integer: {left}/{right}")
    return left // right


def _power(left: int, right: int) -> int:
    if right < 0:
        raise ValueError(f"a size is not an integer: {left}**{right}")
    if right * left.bit_length() > MOST_SIZE.bit_length():
        raise ValueError("a size has more than 62 bits")
    return int(left**right)


_BINARY: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: lambda left, right: left + right,
    ast.Sub: lambda left, right: left - right,
    ast.Mult: lambda left, right: left * right,
    ast.FloorDiv: lambda left, right: left // right,
    ast.Mod: lambda left, right: left % right,
    ast.Div: _quotient,
    ast.Pow: _power,
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
    """Return the value of a text such as `2*s0 + 1`.

    sizes : values of the names in the expression

    Raise `ValueError` for other expressions, unknown names, and negative values.
    """
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"the expression of a size has more than {MOST_CHARACTERS:,} characters")
    try:
        size = _value(ast.parse(text.strip(), mode="eval").body, sizes)
    except (SyntaxError, RecursionError, MemoryError, KeyError, ZeroDivisionError) as error:
        raise ValueError(f"the expression of a size has no value: {text[:60]!r}") from error
    if size < 0:
        raise ValueError(f"a size is negative: {text[:60]!r} is {size}")
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
            raise ValueError(f"unsupported expression of a size: {ast.unparse(node)[:60]!r}")
    if abs(result) > MOST_SIZE:
        raise ValueError("a size has more than 62 bits")
    return result


LEAST_SIZE = 2  # minimum value of a data-dependent size, even if the program allows a smaller one

MOST_DIMENSIONS = 64  # maximum number of dimensions of a torch tensor
_DTYPES = {
    **dict(enumerate(["uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"], 1)),
    **dict(enumerate(["complex32", "complex64", "complex128", "bool", "bfloat16"], 9)),
    28: "uint16",
    **dict(enumerate(["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"], 29)),
    34: "uint32",
    35: "uint64",
}
_LAYOUTS = {
    **dict(enumerate(["sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc"], 1)),
    6: "_mkldnn",
    7: "strided",
}
_MEMORY_FORMATS = dict(enumerate(["contiguous_format", "channels_last", "channels_last_3d", "preserve_format"], 1))
# pattern of a single name, as sympy prints or builds it
_SYMBOL = re.compile(r"(?:Symbol\(')?([A-Za-z_]\w*)(?:'[^()]*\))?")


class Sizes:
    """Values of the symbolic sizes of an exported program.

    The value of a size is the example (hint) in the program or, without one, the smallest value that the program
    allows.
    """

    def __init__(self, ranges: Any) -> None:
        self.are_open = False
        """True if some size has no example value in the program."""
        self._sizes: dict[str, int] = {}
        self._ranges = ranges if isinstance(ranges, dict) else {}

    def note(self, form: Any) -> None:
        """Keep the example value of a symbolic size that consists of a name; set `are_open` if one has no example."""
        match form:
            case {"as_expr": {"expr_str": str(), **rest}} if rest.get("hint") is None:
                # older versions leave it out
                self.are_open = True
            case {"as_expr": {"expr_str": str() as text, "hint": {"as_int": int() as hint}}}:
                if match := _SYMBOL.fullmatch(text[:200]):
                    self._sizes.setdefault(match[1], hint)

    def of(self, form: Any) -> int:
        """Return the size, stride or offset that a JSON object describes; raise `ValueError` if it is unknown."""
        match form:
            case {"as_int": int() as size}:
                pass
            case {"as_expr": {"hint": {"as_int": int() as size}}}:
                pass
            case {"as_expr": {"expr_str": str() as text}}:
                for name in re.findall(r"[A-Za-z_]\w*", text[:2000]):
                    self._fill(name)
                size = size_of(text, self._sizes)
            case _:
                raise ValueError(f"a size has neither `as_int` nor `as_expr`: {str(form)[:60]}")
        if not 0 <= size < LIMIT >> 1:
            raise ValueError(f"a size is negative or has more than 62 bits: {str(size)[:40]}")
        return int(size)

    def _fill(self, name: str) -> None:
        if name in self._sizes or not re.fullmatch(r"[a-z]+\d+", name):
            return
        least = self._ranges.get(name)
        bounds = [least.get(key) for key in ("min_val", "max_val")] if isinstance(least, dict) else [None, None]
        lowest, highest = (bound if type(bound) is int else None for bound in bounds)
        size = max(LEAST_SIZE, lowest or 0)
        self._sizes[name] = size if highest is None else min(size, highest)


def _of_table(names: Mapping[int, str], table: Mapping[str, Any], problem: str) -> Callable[[Any], Any]:
    def look_up(form: Any) -> Any:
        value = table.get(names.get(form, ""))
        if value is None:
            raise ValueError(f"{problem}: {str(form)[:40]}")
        return value

    return look_up


_dtype_of = _of_table(_DTYPES, DTYPES, "unknown dtype")


def tensor_of(meta: Any, sizes: Sizes, storage: int | None) -> TensorSpec:
    """Return the `TensorSpec` for a tensor's JSON metadata; `storage` is the number of its storage.

    Raise `ValueError` if the metadata cannot be read or are incomplete.
    """
    match meta:
        case {
            "dtype": int() as dtype,
            "sizes": list() as shape,
            "strides": list() as stride,
            "layout": int() as layout,
        }:
            pass
        case _:
            raise ValueError("a tensor has no dtype, sizes, strides or layout")
    if _LAYOUTS.get(layout) != "strided":
        raise ValueError("unsupported: sparse tensor (the file does not have its contents)")
    if len(shape) != len(stride) or len(shape) > MOST_DIMENSIONS:
        raise ValueError(f"a tensor has {len(stride)} strides and {len(shape)} sizes (at most {MOST_DIMENSIONS})")
    return TensorSpec(
        tuple(map(sizes.of, shape)),
        tuple(map(sizes.of, stride)),
        _dtype_of(dtype),
        str(device_of(meta.get("device"))),
        offset=sizes.of(meta.get("storage_offset", {"as_int": 0})),
        requires_grad=meta.get("requires_grad") is True,
        storage=storage,
    )


def device_of(form: Any) -> torch.device:
    """Return the device that a JSON object describes, or raise `ValueError`."""
    kind, index = (form.get("type"), form.get("index")) if isinstance(form, dict) else (None, None)
    if not isinstance(kind, str) or not (index is None or type(index) is int):
        raise ValueError(f"a device has no `type`, or its `index` is not an integer: {str(form)[:60]}")
    try:
        return torch.device(device_name(kind if index is None else f"{kind}:{index}"))
    except RuntimeError as error:
        raise ValueError(f"this torch does not know the device {kind[:40]!r}") from error


def _float(form: Any) -> float:
    if isinstance(form, str) and form in ("Infinity", "-Infinity", "NaN"):
        return float(form)
    if not isinstance(form, int | float):
        raise ValueError(f"expected a number, got {str(form)[:40]!r}")
    return float(form)


def _int(form: Any) -> int:
    if type(form) is not int or not -LIMIT <= form < LIMIT:
        raise ValueError(f"expected a 64-bit integer, got {str(form)[:40]!r}")
    return form


def _of_type(kind: type) -> Callable[[Any], Any]:
    def check(form: Any) -> Any:
        if not isinstance(form, kind):
            raise ValueError(f"expected a {kind.__name__}, got {str(form)[:40]!r}")
        return form

    return check


# functions that read constant arguments, by kind of argument
CONSTANTS: dict[str, Callable[[Any], Any]] = {
    "as_none": lambda form: None,
    "as_int": _int,
    "as_float": _float,
    "as_bool": _of_type(bool),
    "as_string": _of_type(str),
    "as_ints": lambda form: list(map(_int, form)),
    "as_floats": lambda form: list(map(_float, form)),
    "as_bools": lambda form: list(map(_of_type(bool), form)),
    "as_strings": lambda form: list(map(_of_type(str), form)),
    "as_int_lists": lambda form: [list(map(_int, row)) for row in form],
    "as_float_lists": lambda form: [list(map(_float, row)) for row in form],
    "as_complex": lambda form: complex(_float(form["real"]), _float(form["imag"])),
    "as_scalar_type": _dtype_of,
    "as_layout": _of_table(_LAYOUTS, LAYOUTS, "unknown layout"),
    "as_memory_format": _of_table(_MEMORY_FORMATS, MEMORY_FORMATS, "unknown memory format"),
    "as_device": device_of,
}
