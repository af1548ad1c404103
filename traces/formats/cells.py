"""What a cell of a table means as an argument of an operator, by the argument's type in the operator's schema."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from opgrip.traces.formats.building import fit_values
from opgrip.traces.schema.arguments import TensorSpec
from opgrip.traces.schema.tensor_specs import DTYPES, contiguous
from opgrip.traces.values import ValueModel

MOST_DIMENSIONS = 64
LARGEST = 1 << 62
"""Bound of sizes and whole numbers."""
WORDS: dict[str, dict[str, int]] = {
    "reduction": {"none": 0, "mean": 1, "sum": 2},
    "interpolation_mode": {"bilinear": 0, "nearest": 1, "bicubic": 2},
    "padding_mode": {"zeros": 0, "border": 1, "reflection": 2},
}
"""Words of Python functions for what their operators take as numbers, by the operators' argument."""
DTYPE_OF_NAME = {"mask": torch.bool, "condition": torch.bool, "index": torch.int64, "indices": torch.int64}
"""Dtypes that operators' arguments of these names have."""
SYNONYMS = {"float": "float32", "double": "float64", "half": "float16", "int": "int32", "long": "int64"}
SYNONYMS |= {"short": "int16"}


class Unfit(ValueError):
    """That a cell is no value of an argument's type."""


@dataclass(frozen=True, slots=True)
class CellTensor:
    """A tensor of a cell.

    Attributes
    ----------
    data : its values, where the cell has them
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    data: tuple[float, ...] | None = None

    @property
    def model(self) -> ValueModel | None:
        """What draws its values; None where nothing is known of them."""
        if self.data is None:
            return None
        return fit_values(torch.tensor(self.data, dtype=self.dtype).reshape(self.shape))

    def spec(self, values: int | None = None) -> TensorSpec:
        """Its metadata, with the number of a value model."""
        return TensorSpec(self.shape, contiguous(self.shape), self.dtype, "cpu", values=values)


@dataclass(frozen=True, slots=True)
class Reading:
    """How cells are read.

    Attributes
    ----------
    dtype : of tensors whose argument says nothing else
    dtypes : of tensors by their argument
    lists_are_shapes : a list is a tensor's shape, never a number or numbers
    empty_is_scalar : `[]` is the shape of a tensor without dimensions, rather than a missing value
    numbers_are_tensors : a number is a tensor without dimensions where no number is taken
    """

    dtype: torch.dtype = torch.float32
    dtypes: Mapping[str, torch.dtype] | None = None
    lists_are_shapes: bool = False
    empty_is_scalar: bool = False
    numbers_are_tensors: bool = False

    def dtype_of(self, name: str) -> torch.dtype:
        """Of the tensor that an argument of this name takes."""
        return {**DTYPE_OF_NAME, **(self.dtypes or {})}.get(name, self.dtype)


def is_missing(cell: Any, kind: Any = None) -> bool:
    """Whether a cell says that an argument was not given: null, "", "None", [], false, and lists of one of these.

    Parameters
    ----------
    kind : type of the argument; false is a value of one that is true or false
    """
    inner = cell[0] if isinstance(cell, list) and len(cell) == 1 else cell
    if inner is None or inner == [] or (isinstance(inner, str) and inner in ("", "None", "null")):
        return True
    return inner is False and kind is not None and innermost(kind).kind() != "BoolType"


def innermost(kind: Any) -> Any:
    """The type inside of an optional one."""
    return kind.getElementType() if kind.kind() == "OptionalType" else kind


def value_of(cell: Any, parameter: Any, reading: Reading, first: tuple[int, ...] = ()) -> Any:
    """The argument that a cell stands for: a plain value, a `CellTensor`, or a list of these.

    Parameters
    ----------
    parameter : of the schema
    first : shape of the call's first tensor, whose sizes stand where a list of sizes has none

    Raises
    ------
    Unfit : where it is none of the parameter's type
    """
    kind = innermost(parameter.type)
    name = kind.kind()
    if name == "TensorType":
        return _tensor(cell, parameter.name, reading)
    if name == "ListType":
        return _list(cell, kind.getElementType(), parameter, reading, first)
    if reading.lists_are_shapes and isinstance(cell, list):
        raise Unfit("a shape where no tensor is taken")
    single = cell[0] if isinstance(cell, list) and len(cell) == 1 else cell
    return _scalar(single, name, parameter.name)


def shape_of(cell: Any) -> tuple[int, ...] | None:
    """The sizes that a cell lists; None where it does not."""
    if not isinstance(cell, list) or len(cell) > MOST_DIMENSIONS:
        return None
    sizes = [_whole(item) for item in cell]
    return tuple(size for size in sizes if size is not None) if all(_is_size(size) for size in sizes) else None


def _is_size(size: int | None) -> bool:
    return size is not None and 0 <= size < LARGEST


def _whole(item: Any) -> int | None:
    """A whole number, which may be written as a fraction or as text."""
    if isinstance(item, str):
        return int(item) if re.fullmatch(r" ?-?[0-9]{1,18}", item) else None
    if isinstance(item, float) and math.isfinite(item) and item == int(item) and abs(item) < 1 << 53:
        return int(item)
    return item if type(item) is int and abs(item) < LARGEST else None


def _tensor(cell: Any, name: str, reading: Reading) -> CellTensor:
    dtype = reading.dtype_of(name)
    if isinstance(cell, list) and cell and isinstance(cell[0], list):
        cell, *words = cell
        # the device that they were on may follow
        if not all(isinstance(word, str) for word in words):
            raise Unfit("several lists")
    if cell == [] and not reading.empty_is_scalar:
        raise Unfit("no shape")
    if isinstance(cell, list) and any(type(item) is float for item in cell) and all(map(_is_number, cell)):
        # no sizes: the list has the values themselves
        return CellTensor((len(cell),), dtype, tuple(map(float, cell)))
    shape = shape_of(cell)
    if shape is not None:
        return CellTensor(shape, dtype)
    if reading.numbers_are_tensors and _is_number(cell):
        return CellTensor((), dtype, (cell,))
    raise Unfit("no shape")


def _list(cell: Any, element: Any, parameter: Any, reading: Reading, first: tuple[int, ...]) -> list[Any]:
    kind = innermost(element).kind()
    if kind == "TensorType":
        if not isinstance(cell, list) or not all(isinstance(item, list) for item in cell):
            raise Unfit("no list of shapes")
        return [_tensor(item, parameter.name, reading) for item in cell]
    if reading.lists_are_shapes and isinstance(cell, list):
        raise Unfit("a shape where no tensor is taken")
    items = cell if isinstance(cell, list) else [cell]
    if len(items) > MOST_DIMENSIONS:
        raise Unfit("a list of too many numbers")
    if len(items) == 1 and (parameter.N or 0) > 1:
        items = items * parameter.N
    last = first[-len(items) :] if items else ()
    if len(last) == len(items):
        items = [size if item is None else item for item, size in zip(items, last, strict=True)]
    return [_scalar(item, kind, parameter.name) for item in items]


def _scalar(item: Any, kind: str, name: str) -> Any:
    value: Any = None
    match kind:
        case "IntType" if name == "dtype":
            value = dtype_named(item)
        case "IntType" | "SymIntType":
            value = WORDS[name].get(item) if name in WORDS and isinstance(item, str) else _whole(item)
        case "FloatType" | "NumberType":
            value = _number(item)
        case "BoolType":
            value = {"True": True, "False": False}.get(item) if isinstance(item, str) else item
            value = value if type(value) is bool else None
        case "StringType":
            value = item if isinstance(item, str) else None
    if value is None:
        raise Unfit(f"{str(item)[:40]!r} is no {name}")
    return value


def _number(item: Any) -> float | None:
    if isinstance(item, str):
        try:
            return float(item) if len(item) < 40 else None
        except ValueError:
            return None
    return item if (_is_number(item) and abs(item) < LARGEST) or item in (math.inf, -math.inf) else None


def _is_number(item: Any) -> bool:
    return type(item) in (int, float)


def dtype_named(item: Any) -> torch.dtype | None:
    """The dtype of a name as torch's or as Python's; None for others."""
    return DTYPES.get(SYNONYMS.get(item, item)) if isinstance(item, str) else None
