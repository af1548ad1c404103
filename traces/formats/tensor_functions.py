"""Functions that the text of an untrusted program may call, applied to meta tensors, numbers and lists.

These are the tensor functions in `configurations/modules.py`, operators whose first argument is a tensor, and the
functions in `CREATING` and `PLAIN`.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from opgrip.errors import one_line
from opgrip.traces.formats.configurations.modules import PIECES, MetaRecording, check_pieces, function_names, on_meta
from opgrip.traces.formats.operator_schemas import operator_name, schemas_of
from opgrip.traces.schema.json_values import LIMIT
from opgrip.traces.schema.tensor_specs import DTYPES, LAYOUTS, MEMORY_FORMATS

MOST_ITEMS = 1000  # maximum number of elements of a list that a program concatenates
OPERATORS: Mapping[type[ast.AST], Callable[..., Any]] = {
    getattr(ast, kind): getattr(operator, name)
    for kind, name in re.findall(
        r"(\w+)=(\w+)",
        "Add=add Sub=sub Mult=mul Div=truediv FloorDiv=floordiv Mod=mod Pow=pow MatMult=matmul BitAnd=and_ BitOr=or_ "
        "BitXor=xor LShift=lshift RShift=rshift Eq=eq NotEq=ne Lt=lt LtE=le Gt=gt GtE=ge USub=neg UAdd=pos "
        "Invert=invert Not=not_ Is=is_ IsNot=is_not",
    )
}
IN_PLACE = {
    ast.Add: operator.iadd,
    ast.Sub: operator.isub,
    ast.Mult: operator.imul,
    ast.Div: operator.itruediv,
    ast.BitAnd: operator.iand,
    ast.BitOr: operator.ior,
}
# functions of torch that create tensors from numbers; torch does not list them as overridable
CREATING = (
    *("arange", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand", "randint", "randn"),
    *("randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros"),
)
# functions on numbers, lists and types, by name
PLAIN: Mapping[str, Callable[..., Any]] = {
    **{function.__name__: function for function in (abs, bool, float, int, len, list, max, min, round, sum, tuple)},
    **{f"math.{name}": getattr(math, name) for name in ("ceil", "exp", "floor", "log", "log2", "prod", "sqrt")},
    "torch.finfo": torch.finfo,
    "torch.iinfo": torch.iinfo,
    "torch.Size": torch.Size,
    "slice": slice,
}
CONSTANTS = {
    **{f"torch.{name}": value for name, value in (*DTYPES.items(), *LAYOUTS.items(), *MEMORY_FORMATS.items())},
    **{f"{space}.{name}": getattr(math, name) for space in ("math", "torch") for name in ("inf", "nan", "pi", "e")},
    "inf": math.inf,
    "nan": math.nan,
}
# tensor methods that create tensors; torch does not list them as overridable
METHODS = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")
SYMBOLS = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift"),
    *("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "ilshift", "irshift"),
    *("eq", "ne", "lt", "le", "gt", "ge", "neg", "invert", "getitem", "setitem"),
)
# tensor methods for which programs use Python operators, by name
OPERATOR_METHODS: Mapping[str, Callable[..., Any]] = {
    f"__{name}__": getattr(operator, f"__{name}__") for name in SYMBOLS
}
# pattern of the paths of functions that are operators, except operators that do not check their arguments
OPERATOR_PATH = re.compile(
    r"torch\.(?:ops\.aten\.(?!_(?:add|remove)_batch_dim|_reshape_alias|_sparse|_nested)\w+(?:\.\w+)?"
    r"|(?:(?:_C\._)?(?:linalg|fft|special)\.)?[a-z]\w*)"
)
WITHOUT_EFFECT = frozenset(
    f"torch.{name}" for name in ("_C._set_grad_enabled", "set_grad_enabled", "_assert_async", "_C._log_api_usage_once")
)
# functions recorded as one operator, because which operators they call depends on the device
WHOLE = {"torch.nn.functional.scaled_dot_product_attention": "aten.scaled_dot_product_attention.default"}


class EndOfReading(ValueError):
    """Raised if a statement fails such that no call after it can be determined."""


def run_function(name: str, recording: MetaRecording, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call the function with a path such as `torch.nn.functional.relu`, and return its result.

    Raise `ValueError` if this function may not run.
    """
    name = re.sub(r"^torch\.functional\.", "torch.", re.sub(r"^torch\._C\._nn\.", "torch.nn.functional.", name))
    if name in WITHOUT_EFFECT:
        return None
    if name.endswith("_enter_autocast"):
        raise EndOfReading("autocast, which changes the dtypes of all later calls")
    if name == "torch.device":
        return torch.device("meta")
    if name == "range":
        if len(args) > 3 or not all(type(item) is int for item in args) or len(range(*args)) > PIECES:
            raise ValueError(f"unsupported: a loop of more than {PIECES:,} steps")
        return range(*args)
    if name in PLAIN:
        return checked(PLAIN[name](*args, **kwargs))
    function = functions().get(name) or _operator_named(name)
    if function is None:
        raise ValueError(f"not a function of tensors that opgrip reads: {name[:100]}")
    check_pieces(name, (args, kwargs))
    args, kwargs = on_meta((args, kwargs))
    if name in WHOLE:
        return recording.whole(WHOLE[name], function, args, kwargs)
    return function(*args, **kwargs)


def checked(value: Any) -> Any:
    """Return a value; raise `ValueError` if it is a number that does not fit in 64 bits."""
    if isinstance(value, int) and not -LIMIT <= value < LIMIT:
        raise ValueError("the program computes an integer of more than 64 bits")
    return value


def operated(function: Callable[..., Any], *operands: Any) -> Any:
    """Return the result of a Python operator such as `+` on tensors or numbers, or the concatenation of lists.

    function : the operator as a function of the module `operator`
    """
    if any(isinstance(operand, torch.Tensor) for operand in operands):
        return function(*operands)
    if function in (operator.is_, operator.is_not, operator.eq, operator.ne, operator.not_):
        return function(*operands)
    if function is operator.add and all(isinstance(operand, list | tuple) for operand in operands):
        if sum(map(len, operands)) > MOST_ITEMS:
            raise ValueError(f"a concatenation of lists has more than {MOST_ITEMS:,} elements")
    elif not all(isinstance(operand, bool | int | float | complex) for operand in operands):
        kinds = ", ".join(type(operand).__name__ for operand in operands)
        raise ValueError(f"unsupported: the operator {function.__name__} of {kinds}")
    elif function in (operator.pow, operator.lshift) and isinstance(operands[1], int) and abs(operands[1]) > 64:
        raise ValueError("the program computes an integer of more than 64 bits")
    try:
        return checked(function(*operands))
    except (ArithmeticError, TypeError) as error:
        raise ValueError(one_line(error)) from error


@lru_cache
def functions() -> Mapping[str, Callable[..., Any]]:
    """Return the tensor functions that may run, by path; paths of methods begin with `torch.Tensor.`."""
    of_modules = {
        f"torch.nn.functional.{name}": item
        for name, item in vars(torch.nn.functional).items()
        if getattr(item, "__module__", "") == "torch.nn.functional" and callable(item) and not name.startswith("_")
    }
    creating = {f"torch.{name}": getattr(torch, name) for name in CREATING}
    methods = {f"torch.Tensor.{name}": getattr(torch.Tensor, name) for name in METHODS}
    return {**of_modules, **function_names(), **creating, **methods}


def _operator_named(name: str) -> Any:
    """Return the operator for a path such as `torch.ops.aten.add.Tensor` or `torch.linalg.norm`.

    The result is None if there is no such operator, or if its first argument is not a tensor.
    """
    if not OPERATOR_PATH.fullmatch(name):
        return None
    path = operator_name(name).replace("::", ".")
    schemas = schemas_of(path)
    if not schemas or not schemas[0].arguments or "Tensor" not in str(schemas[0].arguments[0].type):
        return None
    packet, _, overload = path.removeprefix("aten.").partition(".")
    overloads = getattr(torch.ops.aten, packet)
    return getattr(overloads, overload) if overload else overloads
