"""Compares what a sample gives with what its function gave."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from opgrip.capture.grip.copies import isolate_from_program
from opgrip.capture.grip.objects import take
from opgrip.traces.schema.arguments import Opaque, TensorSpec
from opgrip.traces.schema.python_objects import (
    ArraySpec,
    ModuleSpec,
    ObjectSpec,
    ScalarSpec,
    SharedSpec,
    children,
    outline,
)


@dataclass(frozen=True, slots=True)
class Sketch:
    """What a call gave, without values: as a trace holds it."""

    tree: Any


def difference(expected: Any, got: Any) -> str | None:
    """Where two results differ, in one line; None where they do not.

    Tensors, arrays and floats are alike within `torch.testing.assert_close`'s tolerances for their dtype; nan is alike
    to nan. Fields of objects that cannot be held are passed over.

    Parameters
    ----------
    expected : live values, or a `Sketch`, of which numbers' types and tensors' shapes and dtypes are compared
    """
    with isolate_from_program():
        tree = expected.tree if isinstance(expected, Sketch) else take(expected).tree
        return _difference(tree, take(got).tree, "the result", not isinstance(expected, Sketch))


def _difference(expected: Any, got: Any, where: str, values: bool) -> str | None:
    if isinstance(expected, TensorSpec | torch.Tensor) and isinstance(got, torch.Tensor):
        return _of_tensors(expected, got, where)
    if type(expected) is type(got) and type(expected) in _NUMBERS and not values:
        return None
    if type(expected) is not type(got):
        return f"{where} is {_short(got)}, not {_short(expected)}"
    if isinstance(expected, float | complex):
        return None if _close(expected, got) else f"{where} is {got!r}, not {expected!r}"
    if isinstance(expected, ScalarSpec) and expected.dtype == got.dtype:
        return None if _close(expected.value, got.value) else f"{where} is {got.value!r}, not {expected.value!r}"
    if isinstance(expected, set | frozenset):
        return None if expected == got else f"{where} is {_short(got)}, not {_short(expected)}"
    inner, its = _inner(expected), _inner(got)
    if inner is None or its is None:
        return None if repr(expected) == repr(got) else f"{where} is {_short(got)}, not {_short(expected)}"
    if inner.keys() != its.keys() or _outline(expected) != _outline(got):
        return f"{where} is {_short(got)}, not {_short(expected)}"
    for name, item in inner.items():
        place = where if name == "" else f"{where}{name}"
        if (inner_difference := _difference(item, its[name], place, values)) is not None:
            return inner_difference
    return None


_NUMBERS = (bool, int, float, complex, ScalarSpec)


def _inner(value: Any) -> dict[str, Any] | None:
    """What stands in a value, by how it is reached."""
    match value:
        case dict():
            return {f"[{key!r}]": item for key, item in value.items()}
        case list() | tuple():
            return {f"[{place}]": item for place, item in enumerate(value)}
        case ObjectSpec(_, fields, content):
            held = {f".{name}": item for name, item in fields.items() if not isinstance(item, Opaque)}
            return held if content is None else held | {"": content}
        case ModuleSpec():
            groups = (value.parameters, value.buffers, value.modules, value.fields)
            named = {f".{name}": item for group in groups for name, item in group.items()}
            return {name: item for name, item in named.items() if not isinstance(item, Opaque)}
    inside = children(value)
    return None if inside is None else {"": inside[0]}


def _outline(value: Any) -> Sequence[object]:
    # what fields there are is told by what stands in them
    return outline(value)[:1]


def _of_tensors(expected: TensorSpec | torch.Tensor, got: torch.Tensor, where: str) -> str | None:
    forms = [(tuple(item.shape), item.dtype) for item in (expected, got)]
    if forms[0] != forms[1]:
        return f"{where} is {_short(got)}, not {_short(expected)}"
    if isinstance(expected, TensorSpec):
        return None
    try:
        torch.testing.assert_close(got.cpu(), expected.cpu(), equal_nan=True)
    except AssertionError as error:
        return f"{where}: {' '.join(str(error).split())}"
    return None


def _close(expected: complex, got: complex) -> bool:
    if expected == got or repr(expected) == repr(got):
        return True
    if isinstance(expected, bool | int) or isinstance(got, bool | int):
        return False
    return not math.isnan(abs(expected)) and abs(expected - got) <= 1e-6 + 1.3e-6 * abs(expected)


def _short(value: Any) -> str:
    if isinstance(value, TensorSpec | torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, ArraySpec):
        return f"an array of {_short(value.tensor)}"
    if isinstance(value, ObjectSpec | ModuleSpec):
        return f"a {value.cls.partition(':')[2]}"
    if isinstance(value, SharedSpec):
        return _short(value.value)
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
