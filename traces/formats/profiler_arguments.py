"""Arguments of a call as torch's profiler writes them: shapes and types of tensors, the text of all else.

A text is read by the type that the operator's schema has in its place.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from opgrip.traces.formats.nodes.node import (
    DTYPE_OF_CODE,
    DTYPE_OF_ELEMENT,
    LAYOUT_OF_CODE,
    MEMORY_FORMAT_OF_CODE,
)
from opgrip.traces.formats.overloads import Bound, NoOverload, bind, op_of, schemas_of
from opgrip.traces.schema.arguments import TensorSpec, map_leaves, tensors
from opgrip.traces.schema.json_values import LIMIT
from opgrip.traces.schema.tensor_specs import contiguous

DTYPE_OF = {name: dtype for name, dtype in DTYPE_OF_ELEMENT.items() if not name.startswith("c10::q")}
"""Element types by their C++ names; those of quantized ones are not among them, since their scales are not told."""

# c10's enumerations, which the dispatcher has as whole numbers
_ENUMERATIONS: dict[str, dict[str, Any]] = {
    "ScalarTypeType": {str(code): dtype for code, dtype in DTYPE_OF_CODE.items()},
    "LayoutType": {str(code): layout for code, layout in LAYOUT_OF_CODE.items()},
    "MemoryFormatType": {str(code): item for code, item in MEMORY_FORMAT_OF_CODE.items()},
}
_REAL = r"[+-]?(?:\d{1,20}(?:\.\d{0,40})?(?:[eE][+-]?\d{1,4})?|inf|nan)"
NUMBER = re.compile(_REAL)
COMPLEX = re.compile(rf"\(?({_REAL})\+?({_REAL})[ij]\)?")
CUT = "..."
MOST_CHARACTERS = 4000


@dataclass(frozen=True, slots=True)
class Inputs:
    """What an event says of a call's arguments, one item for each parameter of the operator.

    Attributes
    ----------
    texts : of what is no tensor; empty for tensors, for None, and for what the profiler does not write
    """

    types: Sequence[Any]
    shapes: Sequence[Any]
    strides: Sequence[Any]
    texts: Sequence[Any]

    def __len__(self) -> int:
        return len(self.types)


def bind_inputs(name: str, inputs: Inputs, device: str) -> Bound:
    """The call of an overload that an event tells of.

    Parameters
    ----------
    name : `aten::add`, whose overload an event does not tell
    device : of its tensors, and of a new one

    Raises
    ------
    NoOverload : where no overload takes such arguments, or the event does not tell them
    """
    schemas = schemas_of(name)
    if not schemas:
        bind(name, ())
    reasons: list[str] = []
    for schema in schemas:
        parameters = schema.arguments
        if len(parameters) != len(inputs):
            continue
        try:
            values = {item.name: _value(inputs, place, item) for place, item in enumerate(parameters)}
            values = {name: _placed(value, device) for name, value in values.items()}
            bound = bind(op_of(schema), (), values)
        except (ValueError, NoOverload) as error:
            reasons.append(str(error))
            continue
        return _on_device(_without_defaults(bound, schema), parameters, device)
    told = [reason for reason in reasons if reason.startswith("the file")] or reasons
    raise NoOverload(told[0] if told else "no overload takes so many arguments")


def _placed(value: Any, device: str) -> Any:
    return map_leaves(lambda leaf: replace(leaf, device=device) if isinstance(leaf, TensorSpec) else leaf, value)


def _on_device(bound: Bound, parameters: Sequence[Any], device: str) -> Bound:
    """A call that makes a tensor of none makes it on the device that the program ran on."""
    makes = (
        any(item.name == "device" for item in parameters) and next(tensors([bound.args, bound.kwargs]), None) is None
    )
    if not makes or device == "cpu":
        return bound
    return replace(bound, kwargs={**bound.kwargs, "device": torch.device(device)})


def _without_defaults(bound: Bound, schema: Any) -> Bound:
    """The call without the arguments that are their parameters' defaults, as a capture has it."""
    parameters = {item.name: item for item in schema.arguments}
    kwargs = {name: value for name, value in bound.kwargs.items() if not _is_default(parameters[name], value)}
    args = list(bound.args)
    while args and _is_default(schema.arguments[len(args) - 1], args[-1]):
        args.pop()
    return Bound(bound.op, tuple(args), kwargs)


def _is_default(parameter: Any, value: Any) -> bool:
    if not parameter.has_default_value() or isinstance(value, TensorSpec):
        return False
    default = parameter.default_value
    if isinstance(default, list) and isinstance(value, list) and parameter.N and len(default) == 1:
        default = default * parameter.N
    return bool(type(value) is type(default) and value == default)


def _value(inputs: Inputs, place: int, parameter: Any) -> Any:
    """An argument; its tensors are on the processor."""
    kind, text, shape, stride = inputs.types[place], inputs.texts[place], inputs.shapes[place], inputs.strides[place]
    expected, optional = parameter.real_type, False
    if expected.kind() == "OptionalType":
        expected, optional = expected.getElementType(), True
    name = expected.kind()
    if name == "TensorType":
        return None if kind == "" and optional else _tensor(kind, shape, stride)
    if name == "ListType" and expected.getElementType().kind() in ("TensorType", "OptionalType"):
        # the types of its tensors are written nowhere
        if kind != "TensorList" or not isinstance(shape, list) or not isinstance(stride, list):
            raise ValueError(f"the file does not tell its argument {parameter.name}")
        element = next((item for item in inputs.types if isinstance(item, str) and item in DTYPE_OF), "float")
        return [_tensor(element, *item) for item in zip(shape, stride, strict=True)]
    if not isinstance(text, str) or not isinstance(kind, str) or kind in DTYPE_OF or kind == "TensorList":
        raise ValueError("an argument of another type")
    if text:
        return _parsed(text, expected, parameter.name)
    if name == "StringType":
        # the profiler writes no text at all
        if parameter.has_default_value() and isinstance(parameter.default_value, str):
            return parameter.default_value
        raise ValueError(f"the file does not tell its argument {parameter.name}")
    if optional:
        return None
    raise ValueError(f"the file does not tell its argument {parameter.name}")


def _tensor(kind: Any, shape: Any, stride: Any) -> TensorSpec:
    dtype = DTYPE_OF.get(kind) if isinstance(kind, str) else None
    if dtype is None:
        raise ValueError(f"a tensor of type {str(kind)[:40] or 'that the file does not tell'}")
    sizes = _sizes(shape)
    # older profilers write no strides
    steps = contiguous(sizes) if stride is None else _sizes(stride)
    if len(sizes) != len(steps):
        raise ValueError("a tensor that cannot be read")
    return TensorSpec(sizes, steps, dtype, "cpu")


def _sizes(form: Any) -> tuple[int, ...]:
    if not isinstance(form, list) or not all(type(size) is int and 0 <= size < LIMIT >> 1 for size in form):
        raise ValueError("a tensor that cannot be read")
    return tuple(form)


def _parsed(text: str, expected: Any, name: str) -> Any:
    """A value of a type by its text."""
    if CUT in text or len(text) > MOST_CHARACTERS:
        raise ValueError(f"the file cuts its argument {name}")
    if expected.kind() == "ListType":
        if not (text.startswith("[") and text.endswith("]")):
            raise ValueError("an argument of another type")
        items = text[1:-1].split(",") if text != "[]" else []
        return [_scalar(item.strip(), expected.getElementType().kind()) for item in items]
    return _scalar(text.strip(), expected.kind())


def _scalar(text: str, kind: str) -> Any:
    if kind in _ENUMERATIONS:
        value = _ENUMERATIONS[kind].get(text)
        if value is None:
            raise ValueError(f"a {kind.removesuffix('Type')} that this torch has not")
        return value
    if text in ("True", "False"):
        if kind not in ("BoolType", "NumberType"):
            raise ValueError("an argument of another type")
        return text == "True"
    if kind == "NumberType" and (parts := COMPLEX.fullmatch(text)):
        return complex(float(parts[1]), float(parts[2]))
    if not NUMBER.fullmatch(text) or kind not in ("IntType", "SymIntType", "FloatType", "NumberType"):
        raise ValueError("an argument of another type")
    if kind == "FloatType":
        return float(text)
    if not re.fullmatch(r"[+-]?\d+", text):
        if kind != "NumberType":
            raise ValueError("an argument of another type")
        return float(text)
    if abs(int(text)) >= LIMIT:
        raise ValueError("a whole number of more than 64 bits")
    return int(text)
