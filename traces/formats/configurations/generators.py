"""Generators of arguments for the cases of a configuration file."""

from __future__ import annotations

import math
import random
import reprlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch

from opgrip.cli.plugins import Registry
from opgrip.errors import FormatError
from opgrip.traces.formats.building import tensor_of
from opgrip.traces.schema.arguments import TensorSpec
from opgrip.traces.schema.json_values import NAME_LENGTH, device_name
from opgrip.traces.schema.tensor_specs import DTYPES, LAYOUTS, MEMORY_FORMATS
from opgrip.traces.values import ValueModel
from opgrip.traces.values.exact import Booleans
from opgrip.traces.values.floats import Floats
from opgrip.traces.values.integers import Integers


@dataclass(frozen=True, slots=True)
class Arguments:
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ArgumentDraw:
    chance: random.Random
    device: str
    number_of: Callable[[ValueModel], int]


# Function that returns the arguments described by an entry without macros, or raises `ValueError`.
Generate = Callable[[dict[str, Any], ArgumentDraw], Arguments]

GENERATOR = "PyTorch:DefaultDataGenerator"  # generator for entries that do not name one
# generators by the names that files use
generators: Registry[Generate] = Registry("opgrip.traces.formats.configurations", "opgrip.generators")


# dtypes by the names of the format; torch's own names are accepted too
DTYPE_OF = {
    **{name: DTYPES[name] for name in ("uint8", "int8", "int16", "float16", "bfloat16", "bool")},
    "int": torch.int32,
    "long": torch.int64,
    "float": torch.float32,
    "double": torch.float64,
}
DIMENSIONS = 64
ELEMENTS = 1 << 58
WHOLE = 1 << 63
UNEXPANDED = "only the iterator RangeConfigIterator can expand a range"


@generators.register(GENERATOR)
def generate(entry: dict[str, Any], draw: ArgumentDraw) -> Arguments:
    args, kwargs = entry.get("args") or [], entry.get("kwargs") or {}
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        raise ValueError("`args` of an entry is not a list, or its `kwargs` is not a JSON object")
    return Arguments(
        tuple(argument(item, draw) for item in args), {name: argument(item, draw) for name, item in kwargs.items()}
    )


def argument(form: Any, draw: ArgumentDraw) -> Any:
    if not isinstance(form, dict):
        raise ValueError(f"an argument is not a JSON object: {reprlib.repr(form)}")
    kind = form.get("type")
    make = _MAKERS.get(kind) if isinstance(kind, str) else None
    if make is None:
        raise ValueError(f"unknown argument type: {reprlib.repr(kind)}")
    return make(form, draw)


def _tensor(form: dict[str, Any], draw: ArgumentDraw) -> TensorSpec:
    shape, dtype = form.get("shape"), _dtype_of(form.get("dtype"))
    if not isinstance(shape, list) or len(shape) > DIMENSIONS:
        raise ValueError(f"the shape of a tensor is not a list of sizes: {reprlib.repr(shape)}")
    if any(type(size) is not int or not 0 <= size <= ELEMENTS for size in shape):
        raise ValueError(f"{reprlib.repr(shape)} is not a shape of integers; {UNEXPANDED}")
    if math.prod(max(size, 1) for size in shape) > ELEMENTS:
        raise ValueError(f"a tensor of shape {reprlib.repr(shape)} is larger than the address space")
    count = math.prod(shape)
    with_grad = form.get("requires_grad", True)
    if type(with_grad) is not bool:
        raise ValueError(f"requires_grad is neither true nor false: {reprlib.repr(with_grad)}")
    model = value_model(dtype, count, bool(shape))
    tensor = tensor_of(shape, dtype, device=draw.device, requires_grad=with_grad)
    return replace(tensor, values=None if model is None else draw.number_of(model))


@lru_cache(maxsize=1024)
def value_model(dtype: torch.dtype, count: int, is_array: bool) -> ValueModel | None:
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
        raise ValueError(f"unknown dtype: {reprlib.repr(name)}")
    return dtype


def _number(form: dict[str, Any], draw: ArgumentDraw) -> Any:
    if "value" in form:
        return _plain_number(form["value"])
    bounds = form.get("value_range")
    if not isinstance(bounds, list) or len(bounds) != 2:
        raise ValueError(f"an argument of type {form['type']} has neither a `value` nor a `value_range` of two numbers")
    low, high = map(_plain_number, bounds)
    if form["type"] in ("int", "long"):
        if not all(type(bound) is int for bound in (low, high)) or low > high:
            raise ValueError(f"{reprlib.repr(bounds)} is not a range of integers")
        return draw.chance.randint(low, high)
    if not low <= high or not math.isfinite(high - low):
        raise ValueError(f"{reprlib.repr(bounds)} is not a range of numbers")
    return draw.chance.uniform(low, high)


def _plain_number(value: Any) -> Any:
    if not isinstance(value, int | float):
        raise ValueError(f"{reprlib.repr(value)} is not a number; {UNEXPANDED}")
    if isinstance(value, int) and not -WHOLE <= value < WHOLE:
        raise ValueError(f"the integer {reprlib.repr(value)} has more than 64 bits")
    return value


def _bool(form: dict[str, Any], draw: ArgumentDraw) -> bool:
    value = form.get("value")
    if not isinstance(value, int) or value not in (True, False):
        raise ValueError(f"an argument of type bool is neither true nor false: {reprlib.repr(value)}")
    return bool(value)


def _str(form: dict[str, Any], draw: ArgumentDraw) -> str:
    value = form.get("value", "")
    if not isinstance(value, str) or len(value) > NAME_LENGTH:
        raise ValueError(f"expected a string of at most {NAME_LENGTH} characters, got {reprlib.repr(value)}")
    return value


def _device(form: dict[str, Any], draw: ArgumentDraw) -> torch.device:
    try:
        return torch.device(device_name(form.get("value")))
    except (RuntimeError, FormatError) as error:
        raise ValueError(f"unknown device: {reprlib.repr(form.get('value'))}") from error


def _list(form: dict[str, Any], draw: ArgumentDraw) -> list[Any]:
    items = form.get("value")
    if not isinstance(items, list):
        raise ValueError(f"the `value` of an argument of type {form['type']} is not a list: {reprlib.repr(items)}")
    return [argument(item, draw) for item in items]


def _named(names: dict[str, Any]) -> Callable[[dict[str, Any], ArgumentDraw], Any]:
    def find(form: dict[str, Any], draw: ArgumentDraw) -> Any:
        name = form.get("value")
        value = names.get(name.removeprefix("torch.")) if isinstance(name, str) else None
        if value is None:
            raise ValueError(f"unknown {form['type']}: {reprlib.repr(name)}")
        return value

    return find


_MAKERS: dict[str, Callable[[dict[str, Any], ArgumentDraw], Any]] = {
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
