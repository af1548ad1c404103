"""Sample calls made from an operator's schema, where its arguments are tensors and plain values."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

from opgrip.capture.operators.categories import CUSTOM, SCHEMA
from opgrip.capture.operators.entry import Arguments, Entry
from opgrip.capture.operators.registered import is_custom, name_of

SHAPES = ((4, 4), (2, 4, 8, 8), (3,), (2, 4, 8), (2, 4, 8, 8, 8), ())
"""Of tensors, tried in turn, all tensors of a call alike."""
FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
WHOLE = (torch.int64, torch.bool)
WHOLE_NAMES = ("ind", "offset", "length", "repeats", "target", "pivot", "seqlen", "label")
"""Beginnings and parts of the names of arguments that are whole numbers."""
BOOL_NAMES = ("mask", "condition")
NUMBERS: dict[str, tuple[Any, ...]] = {
    "IntType": (1, 0, 2),
    "SymIntType": (1, 0, 2),
    "FloatType": (0.5, 1.0),
    "NumberType": (1, 0.5),
    "ComplexType": (1.0,),
    "BoolType": (False, True),
    "SymBoolType": (False,),
}
"""By kind of argument, the values that are tried in turn for those that have no default."""
LISTED = {"IntType", "SymIntType", "FloatType", "BoolType", "NumberType", "TensorType"}
LENGTHS = (2, 1, 3, 4)
"""Of lists, tried in turn."""


class NoSamples(Exception):
    """That no arguments of an operator can be made, by the reason."""


def schema_entry(function: Any) -> Entry:
    """An operator whose samples are made from its schema."""
    is_whole = all(_is_number_tensor(argument.name) for argument in function._schema.arguments if _holds_tensor(argument))
    return Entry(
        name=name_of(function),
        categories=frozenset({CUSTOM if is_custom(function) else SCHEMA}),
        function=function,
        dtypes=lambda device: WHOLE[:1] if is_whole else (*FLOATING, *WHOLE),
        differentiable=lambda device: frozenset(FLOATING),
        samples=lambda device, dtype, wants_grad: schema_samples(function, device, dtype, wants_grad),
    )


def check_schema(function: Any) -> None:
    """Raise `NoSamples` where an operator takes what is no tensor and no plain value, or gives none."""
    for argument in function._schema.arguments:
        if not argument.has_default_value():
            _check_kind(argument.type, argument.name)


def schema_samples(function: Any, device: str, dtype: torch.dtype, wants_grad: bool) -> Iterator[Arguments]:
    """Arguments that may be right: all tensors of a shape, numbers and lists that are small."""
    arguments = [item for item in function._schema.arguments if not item.has_default_value()]
    numbers = sorted({kind for item in arguments for kind in _kinds(item.type) if kind in NUMBERS})
    lengths = LENGTHS if any("ListType" in _kinds(item.type) for item in arguments) else LENGTHS[:1]
    for shape, length, *values in product(SHAPES, lengths, *(NUMBERS[kind] for kind in numbers)):
        value_of_kind = dict(zip(numbers, values, strict=True))
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for item in arguments:
            value = _value(item.type, item.name, shape, length, value_of_kind, device, dtype, wants_grad)
            if item.kwarg_only:
                kwargs[item.name] = value
            else:
                args.append(value)
        yield tuple(args), kwargs


def _value(
    kind: Any,
    name: str,
    shape: tuple[int, ...],
    length: int,
    numbers: dict[str, Any],
    device: str,
    dtype: torch.dtype,
    wants_grad: bool,
) -> Any:
    rest = (name, shape, length, numbers, device, dtype, wants_grad)
    match kind.kind():
        case "TensorType":
            return _tensor(name, shape, device, dtype, wants_grad)
        case "ListType":
            return [_value(kind.getElementType(), *rest) for _ in range(length)]
        case "OptionalType":
            # what has no default is told as often as not
            return _value(kind.getElementType(), *rest) if "TensorType" in _kinds(kind) else None
        case "DeviceObjType":
            return torch.device(device)
        case other:
            return numbers[other]


def _tensor(name: str, shape: tuple[int, ...], device: str, dtype: torch.dtype, wants_grad: bool) -> torch.Tensor:
    if name.startswith(BOOL_NAMES) or name.endswith("mask"):
        return torch.rand(shape, device=device) > 0.5
    if _is_number_tensor(name):
        return torch.randint(0, 2, shape, device=device)
    if not dtype.is_floating_point:
        return torch.randint(0, 2, shape, device=device).to(dtype)
    return torch.rand(shape, device=device).to(dtype).requires_grad_(wants_grad)


def _is_number_tensor(name: str) -> bool:
    return any(part in name for part in WHOLE_NAMES)


def _holds_tensor(argument: Any) -> bool:
    return "TensorType" in _kinds(argument.type)


def _kinds(kind: Any) -> tuple[str, ...]:
    name = kind.kind()
    return (name, *_kinds(kind.getElementType())) if name in ("ListType", "OptionalType") else (name,)


def _check_kind(kind: Any, name: str) -> None:
    *around, inner = _kinds(kind)
    if "OptionalType" in around:
        return
    if inner == "DeviceObjType" or inner in NUMBERS or inner == "TensorType":
        return
    raise NoSamples(f"no samples of its argument {name}, {kind.annotation_str}")
