"""The generator of PyTorch's types: numbers, strings, lists, and tensors of random values.

Floats are drawn evenly from 0 to 1, whole numbers from -10 to 9, half of booleans are true; a tensor without dimensions
is drawn from -10 to 10.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from opgrip.errors import FormatError
from opgrip.traces.formats.configurations.generators.generator import Arguments, Draw, generators
from opgrip.traces.schema.arguments import TensorSpec
from opgrip.traces.schema.json_values import device_name
from opgrip.traces.schema.limits import NAME_LENGTH
from opgrip.traces.schema.tensor_specs import DTYPES, LAYOUTS, MEMORY_FORMATS, contiguous
from opgrip.traces.values import ValueModel
from opgrip.traces.values.booleans import Booleans
from opgrip.traces.values.floats import Floats
from opgrip.traces.values.integers import Integers

DTYPE_OF = {
    "uint8": torch.uint8,
    "int8": torch.int8,
    "int16": torch.int16,
    "int": torch.int32,
    "long": torch.int64,
    "float": torch.float32,
    "double": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "bool": torch.bool,
}
"""dtypes by the names that the format has for them; torch's own names are taken too."""
DIMENSIONS = 64
ELEMENTS = 1 << 58
WHOLE = 1 << 63
UNEXPANDED = "ranges are expanded by RangeConfigIterator"


@generators.register("PyTorch:DefaultDataGenerator")
def generate(entry: dict[str, Any], draw: Draw) -> Arguments:
    """Each argument by its type."""
    args, kwargs = entry.get("args") or [], entry.get("kwargs") or {}
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        raise ValueError("arguments that are no list and no object")
    return Arguments(
        tuple(argument(item, draw) for item in args), {name: argument(item, draw) for name, item in kwargs.items()}
    )


def argument(form: Any, draw: Draw) -> Any:
    """The argument that an object with a `type` describes; raises `ValueError` where it describes none."""
    if not isinstance(form, dict):
        raise ValueError("an argument that is no object")
    kind = form.get("type")
    make = _MAKERS.get(kind) if isinstance(kind, str) else None
    if make is None:
        raise ValueError(f"an argument of type {reprlib.repr(kind)}, which there is not")
    return make(form, draw)


def _tensor(form: dict[str, Any], draw: Draw) -> TensorSpec:
    shape, dtype = form.get("shape"), _dtype_of(form.get("dtype"))
    if not isinstance(shape, list) or len(shape) > DIMENSIONS:
        raise ValueError("a tensor whose shape is no list of sizes")
    if any(type(size) is not int or not 0 <= size <= ELEMENTS for size in shape):
        raise ValueError(f"{reprlib.repr(shape)} is no shape: {UNEXPANDED}")
    if math.prod(max(size, 1) for size in shape) > ELEMENTS:
        raise ValueError("a tensor larger than memory that can be addressed")
    count = math.prod(shape)
    with_grad = form.get("requires_grad", True)
    if type(with_grad) is not bool:
        raise ValueError("a requires_grad that is not true or false")
    model = value_model(dtype, count, bool(shape))
    return TensorSpec(
        tuple(shape),
        contiguous(tuple(shape)),
        dtype,
        draw.device,
        requires_grad=with_grad and (dtype.is_floating_point or dtype.is_complex),
        values=None if model is None else draw.number_of(model),
    )


@lru_cache(maxsize=1024)
def value_model(dtype: torch.dtype, count: int, is_array: bool) -> ValueModel | None:
    """What the elements of a tensor are drawn from; None where it has none, or its dtype no numbers."""
    if not count:
        return None
    if dtype == torch.bool:
        return Booleans(count // 2, count)
    if dtype.is_floating_point or dtype.is_complex:
        low, high = (0.0, 1.0) if is_array else (-10.0, 10.0)
        std = (high - low) / math.sqrt(12)
        return Floats((low + high) / 2, std, low, high, 0.0, 0.0, 0.0, 0.0, shape="uniform")
    try:
        signed = torch.iinfo(dtype).min < 0
    except TypeError:
        return None
    low, high = (-10, 9) if signed else (0, 9)
    return Integers([], low, high, count, ascending=False, distinct=min(count, high - low + 1))


def _dtype_of(name: Any) -> torch.dtype:
    plain = name.removeprefix("torch.") if isinstance(name, str) else ""
    dtype = DTYPE_OF.get(plain, DTYPES.get(plain))
    if dtype is None:
        raise ValueError(f"a dtype {reprlib.repr(name)}, which there is not")
    return dtype


def _number(form: dict[str, Any], draw: Draw) -> Any:
    """A number that stands there, or one of a range."""
    if "value" in form:
        return _plain_number(form["value"])
    bounds = form.get("value_range")
    if not isinstance(bounds, list) or len(bounds) != 2:
        raise ValueError("a number without a value and a range of two")
    low, high = map(_plain_number, bounds)
    if form["type"] in ("int", "long"):
        if not all(type(bound) is int for bound in (low, high)) or low > high:
            raise ValueError(f"{reprlib.repr(bounds)} is no range of whole numbers")
        return draw.chance.randint(low, high)
    if not low <= high or not math.isfinite(high - low):
        raise ValueError(f"{reprlib.repr(bounds)} is no range of numbers")
    return draw.chance.uniform(low, high)


def _plain_number(value: Any) -> Any:
    if not isinstance(value, int | float):
        raise ValueError(f"{reprlib.repr(value)} is no number: {UNEXPANDED}")
    if isinstance(value, int) and not -WHOLE <= value < WHOLE:
        raise ValueError("a whole number of more than 64 bits")
    return value


def _bool(form: dict[str, Any], draw: Draw) -> bool:
    value = form.get("value")
    if not isinstance(value, int) or value not in (True, False):
        raise ValueError(f"{reprlib.repr(value)} is not true or false")
    return bool(value)


def _str(form: dict[str, Any], draw: Draw) -> str:
    value = form.get("value", "")
    if not isinstance(value, str) or len(value) > NAME_LENGTH:
        raise ValueError("a string that is none, or a very long one")
    return value


def _device(form: dict[str, Any], draw: Draw) -> torch.device:
    try:
        return torch.device(device_name(form.get("value")))
    except (RuntimeError, FormatError) as error:
        raise ValueError(f"{reprlib.repr(form.get('value'))} is no device") from error


def _list(form: dict[str, Any], draw: Draw) -> list[Any]:
    items = form.get("value")
    if not isinstance(items, list):
        raise ValueError("a list without its items")
    return [argument(item, draw) for item in items]


def _named(names: dict[str, Any]) -> Callable[[dict[str, Any], Draw], Any]:
    def find(form: dict[str, Any], draw: Draw) -> Any:
        name = form.get("value")
        value = names.get(name.removeprefix("torch.")) if isinstance(name, str) else None
        if value is None:
            raise ValueError(f"a {form['type']} {reprlib.repr(name)}, which there is not")
        return value

    return find


_MAKERS: dict[str, Callable[[dict[str, Any], Draw], Any]] = {
    "tensor": _tensor,
    "float": _number,
    "double": _number,
    "int": _number,
    "long": _number,
    "none": lambda form, draw: None,
    "bool": _bool,
    "str": _str,
    "device": _device,
    "dtype": lambda form, draw: _dtype_of(form.get("value")),
    "layout": _named(LAYOUTS),
    "memory_format": _named(MEMORY_FORMATS),
    "genericlist": _list,
    "tuple": lambda form, draw: tuple(_list(form, draw)),
}
