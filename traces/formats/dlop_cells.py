"""Rows of DLOP-Bench's tables, and conversion of their cells to arguments, by the argument's type in the operator's
schema.
"""

from __future__ import annotations

import ast
import csv
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from opgrip.traces.formats.building import fit_values
from opgrip.traces.formats.configurations.generators import Arguments
from opgrip.traces.formats.configurations.modules import MetaRecording, Recorded
from opgrip.traces.io.foreign_files import ForeignFile
from opgrip.traces.schema.arguments import TensorSpec
from opgrip.traces.schema.tensor_specs import DTYPES, contiguous
from opgrip.traces.values import ValueModel

MOST_BYTES = 4 << 20  # maximum size in bytes of a file; the largest known one has 0.7 MB
MOST_COLUMNS = 256
MOST_CALLS, MOST_ALL_CALLS = 100_000, 10_000_000  # maximum number of calls of a line, and of all lines of a CSV file
CSV_COLUMNS = ("id", "source_neural_network", "num_of_calls", "parameters")
MOST_DIMENSIONS = 64
LARGEST = 1 << 62  # maximum of sizes and integers
# numbers of operators, by the words that Python functions accept for them, by argument
WORDS: dict[str, dict[str, int]] = {
    "reduction": {"none": 0, "mean": 1, "sum": 2},
    "interpolation_mode": {"bilinear": 0, "nearest": 1, "bicubic": 2},
    "padding_mode": {"zeros": 0, "border": 1, "reflection": 2},
}
# dtypes by the names of operators' arguments
DTYPE_OF_NAME = {"mask": torch.bool, "condition": torch.bool, "index": torch.int64, "indices": torch.int64}
SYNONYMS = {"float": "float32", "double": "float64", "half": "float16", "int": "int32", "long": "int64"}
SYNONYMS |= {"short": "int16"}


class Unfit(ValueError):
    """Raised if a cell cannot be converted to the type of its argument."""


@dataclass(frozen=True, slots=True)
class TableRow:
    """One configuration of an operator.

    cells : values by column
    network : model in which the operator is called with these values, or "" if the file does not name it
    """

    cells: dict[str, Any]
    count: int = 1
    network: str = ""


def rows_of_json(file: ForeignFile) -> Iterator[TableRow]:
    """Yield the rows of a table that has a list of values per column."""
    form = file.parse(file.content(MOST_BYTES))
    if not isinstance(form, dict) or not all(isinstance(cells, list) for cells in form.values()):
        raise file.damage("it is not a JSON object of lists")
    if len(form) > MOST_COLUMNS:
        raise file.refusal(f"it has more than {MOST_COLUMNS} columns")
    for place in range(max(map(len, form.values()), default=0)):
        yield TableRow({column: cells[place] if place < len(cells) else None for column, cells in form.items()})


def rows_of_csv(file: ForeignFile, name: str) -> Iterator[TableRow]:
    """Yield the rows of a CSV file with `CSV_COLUMNS`; `parameters` is a table with one row, as Python prints it.

    name : operator of the file, for which damaged lines are counted
    """
    calls = 0
    for line in file.content(MOST_BYTES).decode(errors="replace").splitlines()[1:]:
        if not line.strip():
            continue
        try:
            row = _csv_row(line)
        except (csv.Error, ValueError, SyntaxError, MemoryError, RecursionError):
            file.losses.skip(name, "a line does not hold id, network, number of calls and parameters")
            continue
        calls += row.count
        if calls > MOST_ALL_CALLS and not file.unbounded:
            raise file.refusal(f"it has more than {MOST_ALL_CALLS:,} calls")
        yield row


def _csv_row(line: str) -> TableRow:
    _, network, count, parameters = next(csv.reader([line]))
    table = ast.literal_eval(parameters)
    if not isinstance(table, dict) or len(table) > MOST_COLUMNS or not 0 < int(count) <= MOST_CALLS:
        raise ValueError
    if not all(
        isinstance(column, str) and isinstance(cells, list) and len(cells) == 1 for column, cells in table.items()
    ):
        raise ValueError
    return TableRow({column: cells[0] for column, cells in table.items()}, int(count), network)


@dataclass(frozen=True, slots=True)
class CellTensor:
    """Tensor that a cell describes.

    data : values of the tensor in row-major order, or None if the cell only has the shape
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    data: tuple[float, ...] | None = None

    @property
    def model(self) -> ValueModel | None:
        if self.data is None:
            return None
        return fit_values(torch.tensor(self.data, dtype=self.dtype).reshape(self.shape))

    def spec(self, values: int | None = None) -> TensorSpec:
        """Return the metadata of the tensor as a contiguous tensor on the CPU.

        values : number of its value model, or None
        """
        return TensorSpec(self.shape, contiguous(self.shape), self.dtype, "cpu", values=values)


@dataclass(frozen=True, slots=True)
class Reading:
    """Rules for converting cells to arguments.

    dtype : dtype of tensors whose argument does not imply one
    dtypes : dtypes of tensors by argument, or None
    lists_are_shapes : a list is always a tensor's shape, and never a list of numbers
    empty_is_scalar : `[]` is the shape of a tensor without dimensions, rather than a missing value
    numbers_are_tensors : a number is a tensor without dimensions if the argument cannot be a number
    """

    dtype: torch.dtype = torch.float32
    dtypes: Mapping[str, torch.dtype] | None = None
    lists_are_shapes: bool = False
    empty_is_scalar: bool = False
    numbers_are_tensors: bool = False

    def dtype_of(self, name: str) -> torch.dtype:
        return {**DTYPE_OF_NAME, **(self.dtypes or {})}.get(name, self.dtype)


def single(cell: Any) -> Any:
    """Return the only item of a list of length 1; return any other cell unchanged."""
    return cell[0] if isinstance(cell, list) and len(cell) == 1 else cell


def is_missing(cell: Any, kind: Any = None) -> bool:
    """Return True if a cell represents a missing argument: null, "", "None", [], false, or a list of one of these.

    kind : type of the argument; for a boolean argument, false is a value
    """
    inner = single(cell)
    if inner is None or inner == [] or (isinstance(inner, str) and inner in ("", "None", "null")):
        return True
    return inner is False and kind is not None and innermost(kind).kind() != "BoolType"


def innermost(kind: Any) -> Any:
    return kind.getElementType() if kind.kind() == "OptionalType" else kind


def value_of(cell: Any, parameter: Any, reading: Reading, first: tuple[int, ...] = ()) -> Any:
    """Return the argument in a cell: a plain value, a `CellTensor`, or a list of these.

    parameter : parameter of the schema
    first : shape of the call's first tensor, from which missing sizes in a list of sizes are taken

    Raise `Unfit` if the cell cannot be converted to the parameter's type.
    """
    kind = innermost(parameter.type)
    name = kind.kind()
    if name == "TensorType":
        return _tensor(cell, parameter.name, reading)
    if name == "ListType":
        return _list(cell, kind.getElementType(), parameter, reading, first)
    if reading.lists_are_shapes and isinstance(cell, list):
        raise Unfit(f"the argument {parameter.name} is not a tensor, but its cell is a shape")
    return _scalar(single(cell), name, parameter.name)


def shape_of(cell: Any) -> tuple[int, ...] | None:
    """Return the shape that a cell describes, or None if the cell is not a list of sizes."""
    if not isinstance(cell, list) or len(cell) > MOST_DIMENSIONS:
        return None
    sizes = [_integer(item) for item in cell]
    return tuple(size for size in sizes if size is not None) if all(_is_size(size) for size in sizes) else None


def _is_size(size: int | None) -> bool:
    return size is not None and 0 <= size < LARGEST


def _integer(item: Any) -> int | None:
    """Return the integer that a cell contains, also as text or as a float such as 2.0; None if it has no integer."""
    if isinstance(item, str):
        return int(item) if re.fullmatch(r" ?-?[0-9]{1,18}", item) else None
    if isinstance(item, float) and math.isfinite(item) and item == int(item) and abs(item) < 1 << 53:
        return int(item)
    return item if type(item) is int and abs(item) < LARGEST else None


def _tensor(cell: Any, name: str, reading: Reading) -> CellTensor:
    dtype = reading.dtype_of(name)
    if isinstance(cell, list) and cell and isinstance(cell[0], list):
        cell, *words = cell
        # the source device may follow
        if not all(isinstance(word, str) for word in words):
            raise Unfit(f"the cell of the tensor {name} has several lists")
    if cell == [] and not reading.empty_is_scalar:
        raise Unfit(f"the cell of the tensor {name} is empty")
    if isinstance(cell, list) and any(type(item) is float for item in cell) and all(map(_is_number, cell)):
        # not sizes: the list has the values themselves
        return CellTensor((len(cell),), dtype, tuple(map(float, cell)))
    shape = shape_of(cell)
    if shape is not None:
        return CellTensor(shape, dtype)
    if reading.numbers_are_tensors and _is_number(cell):
        return CellTensor((), dtype, (cell,))
    raise Unfit(f"the cell of the tensor {name} is not a shape: {str(cell)[:40]}")


def _list(cell: Any, element: Any, parameter: Any, reading: Reading, first: tuple[int, ...]) -> list[Any]:
    kind = innermost(element).kind()
    if kind == "TensorType":
        if not isinstance(cell, list) or not all(isinstance(item, list) for item in cell):
            raise Unfit(f"the argument {parameter.name} is not a list of shapes: {str(cell)[:40]}")
        return [_tensor(item, parameter.name, reading) for item in cell]
    if reading.lists_are_shapes and isinstance(cell, list):
        raise Unfit(f"the argument {parameter.name} is not a tensor, but its cell is a shape")
    items = cell if isinstance(cell, list) else [cell]
    if len(items) > MOST_DIMENSIONS:
        raise Unfit(f"the argument {parameter.name} has more than {MOST_DIMENSIONS} numbers")
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
            value = WORDS[name].get(item) if name in WORDS and isinstance(item, str) else _integer(item)
        case "FloatType" | "NumberType":
            value = _number(item)
        case "BoolType":
            value = {"True": True, "False": False}.get(item) if isinstance(item, str) else item
            value = value if type(value) is bool else None
        case "StringType":
            value = item if isinstance(item, str) else None
    if value is None:
        raise Unfit(f"the argument {name} is not of type {kind}: {str(item)[:40]!r}")
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
    """Return the dtype that a cell names in torch's or Python's notation, or None for other cells."""
    return DTYPES.get(SYNONYMS.get(item, item)) if isinstance(item, str) else None


SUFFIX = "_size"  # suffix that the names of columns with shapes may have


@dataclass(frozen=True, slots=True)
class TableFunction:
    """A function of torch that a table of configurations calls.

    name : path of the function, such as `torch.nn.functional.relu`
    tensors : names of tensor arguments, whose cells have shapes
    plain : names of arguments that are numbers or booleans
    """

    name: str
    tensors: tuple[str, ...]
    plain: tuple[str, ...]


# functions by the names of their files
FUNCTIONS = {
    "mhaf": TableFunction(
        "torch.nn.functional.multi_head_attention_forward",
        (
            *("query", "key", "value", "in_proj_weight", "in_proj_bias", "bias_k", "bias_v"),
            *("out_proj_weight", "out_proj_bias", "key_padding_mask", "attn_mask"),
        ),
        ("embed_dim_to_check", "num_heads", "add_zero_attn", "dropout_p", "training", "need_weights"),
    ),
    "normalize": TableFunction("torch.nn.functional.normalize", ("input",), ("p", "dim", "eps")),
}


def calls_of_row(function: TableFunction, row: dict[str, Any], recording: MetaRecording) -> Iterator[Recorded]:
    """Yield the operators that a function runs with the arguments in a row, recorded on meta tensors.

    Raise `Unfit` if a column is not an argument, a cell cannot be converted, or the function rejects its arguments.
    """
    arguments: dict[str, Any] = {}
    for column, cell in row.items():
        name = column if column in (*function.tensors, *function.plain) else column.removesuffix(SUFFIX)
        if name in function.tensors:
            arguments[name] = _table_tensor(cell, name)
        elif name in function.plain:
            if not is_missing(cell):
                arguments[name] = _plain(cell, name)
        elif not is_missing(cell):
            raise Unfit(f"{function.name} has no argument {column[:60]}")
    try:
        yield from recording.function(function.name, Arguments((), arguments))
    except ValueError as error:
        raise Unfit(str(error)[:200]) from error


def _table_tensor(cell: Any, name: str) -> TensorSpec | None:
    if is_missing(cell):
        return None
    shape = shape_of(cell)
    if shape is None:
        raise Unfit(f"the argument {name} is not a shape: {str(cell)[:40]}")
    return TensorSpec(shape, contiguous(shape), torch.float32, "cpu")


def _plain(cell: Any, name: str) -> bool | int | float:
    value = single(cell)
    if not isinstance(value, bool | int | float):
        raise Unfit(f"the argument {name} is not a number: {str(value)[:40]}")
    return value
