"""Sizes that an ONNX model computes, worked out, and the shapes that follow from them by onnx's own inference.

Exporters write a reshape to half of another tensor's length as nodes that take the length, halve and join it; onnx's
inference over a whole model follows few of these, and is not asked to, since it would follow a bomb of them too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch

MOST_ELEMENTS = 1024
MOST_INPUTS = 64
"""Of a constant that is worked out."""
MOST_NUMBER = 1 << 62

Numbers = list[Any]
Shapes = dict[str, tuple[torch.dtype, tuple[int, ...]]]
Fold = Callable[[list[Numbers], Mapping[str, Any]], Numbers]
"""Values by those of the inputs, and attributes."""


def complete(
    nodes: Any, shapes: Shapes, constants: dict[str, Numbers], read: Callable[[Any], Any], infer: Callable[..., Shapes]
) -> None:
    """Add the shapes and the small constants that follow from those that are there.

    Parameters
    ----------
    nodes : in their order
    read : gives what an attribute holds
    infer : gives the types of a node's results by those of what it takes, and by its constants
    """
    for node in nodes:
        if node.domain not in ("", "ai.onnx") or node.op_type == "Constant":
            continue
        _fold(node, shapes, constants, read)
        names = [name for name in node.input if name]
        if any(name and name not in shapes for name in node.output) and all(name in shapes for name in names):
            for name, shape in infer(node, shapes, constants).items():
                shapes.setdefault(name, shape)


def _fold(node: Any, shapes: Shapes, constants: dict[str, Numbers], read: Callable[[Any], Any]) -> None:
    attributes = {item.name: read(item) for item in node.attribute}
    if len(node.output) != 1 or node.output[0] in constants or not 0 < len(node.input) <= MOST_INPUTS:
        return
    values: Numbers | None = None
    if node.op_type == "Shape" and node.input[0] in shapes:
        values = list(shapes[node.input[0]][1])[attributes.get("start", 0) : attributes.get("end", MOST_NUMBER)]
    elif node.op_type in FOLDS and all(name in constants for name in node.input):
        if any(len(shapes.get(name, (None, ()))[1]) > 1 for name in node.input):
            return
        try:
            values = FOLDS[node.op_type]([constants[name] for name in node.input], attributes)
        except (ValueError, IndexError, TypeError, ZeroDivisionError, OverflowError):
            return
    if values is not None and len(values) <= MOST_ELEMENTS and all(map(_is_small, values)):
        constants[node.output[0]] = values


def _is_small(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < MOST_NUMBER


def _same(inputs: list[Numbers], attributes: Mapping[str, Any]) -> Numbers:
    return inputs[0]


def _concat(inputs: list[Numbers], attributes: Mapping[str, Any]) -> Numbers:
    return [value for values in inputs for value in values]


def _gather(inputs: list[Numbers], attributes: Mapping[str, Any]) -> Numbers:
    data, places = inputs
    return [data[place] for place in places]


def _slice(inputs: list[Numbers], attributes: Mapping[str, Any]) -> Numbers:
    data, (start,), (end,), *rest = inputs
    step = rest[1][0] if len(rest) > 1 else 1
    return data[start:end:step]


def _cast(inputs: list[Numbers], attributes: Mapping[str, Any]) -> Numbers:
    # 6 and 7 are whole numbers of 32 and 64 bits; other types keep the numbers that they are
    return [int(value) for value in inputs[0]] if attributes.get("to") in (6, 7) else inputs[0]


def _range(inputs: list[Numbers], attributes: Mapping[str, Any]) -> Numbers:
    (start,), (end,), (step,) = inputs
    places = range(start, end, step)
    if len(places) > MOST_ELEMENTS:
        raise ValueError("too long")
    return list(places)


def _full(inputs: list[Numbers], attributes: Mapping[str, Any]) -> Numbers:
    count = prod(inputs[0])
    if len(inputs[0]) > 1 or not 0 <= count <= MOST_ELEMENTS:
        raise ValueError("too long")
    return [(attributes.get("value") or [0.0])[0]] * count


def _each(function: Callable[..., Any]) -> Fold:
    """A function of elements; a single one stands for as many as the others have."""

    def fold(inputs: list[Numbers], attributes: Mapping[str, Any]) -> Numbers:
        length = max(map(len, inputs))
        rows = [values * length if len(values) == 1 else values for values in inputs]
        return [function(*items) for items in zip(*rows, strict=True)]

    return fold


def _quotient(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int):
        # towards zero, unlike Python's
        quotient = abs(left) // abs(right)
        return quotient if (left < 0) == (right < 0) else -quotient
    return left / right


FOLDS: dict[str, Fold] = {
    **dict.fromkeys(("Identity", "Reshape", "Squeeze", "Unsqueeze"), _same),
    "Add": _each(lambda left, right: left + right),
    "Cast": _cast,
    "Concat": _concat,
    "ConstantOfShape": _full,
    "Div": _each(_quotient),
    "Equal": _each(lambda left, right: left == right),
    "Gather": _gather,
    "Max": _each(max),
    "Min": _each(min),
    "Mod": _each(lambda left, right: left % right),
    "Mul": _each(lambda left, right: left * right),
    "Neg": _each(lambda value: -value),
    "Range": _range,
    "Slice": _slice,
    "Sub": _each(lambda left, right: left - right),
    "Where": _each(lambda condition, left, right: left if condition else right),
}
