"""Configurations of operators as DLOP-Bench keeps them: JSON, one file an operator, parallel lists by argument.

    adaptive_avg_pool2d.json: {"input": [[4, 96, 56, 56], [2, 64, 128, 128]], "output_size": [[1], [6]]}

Which operator a file is of, its name says. Which argument a column is, and whether a list in it is a shape, a list of
numbers or a number, torch's schema of the operator says: by the column's name, else by its place.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from opgrip.traces.formats.building import NO_GRADIENTS, NO_TIMES, NO_VALUES, RecordBuilder
from opgrip.traces.formats.cells import CellTensor, Reading, Unfit, dtype_named, is_missing, value_of
from opgrip.traces.formats.configurations.modules import Recording
from opgrip.traces.formats.dlop_functions import (
    CONSTANTS,
    DTYPES_OF,
    FUNCTIONS,
    IGNORED,
    NAMES,
    REWRITES,
    UNMAPPED,
    Row,
    calls_of_row,
)
from opgrip.traces.formats.overloads import op_of, schemas_of
from opgrip.traces.formats.tritonbench import NO_DEVICE
from opgrip.traces.io.foreign_files import PACKED, ForeignFile, Format, Head, formats
from opgrip.traces.schema.records import Record

MOST_BYTES = 4 << 20
"""Of a file: the largest that are known have 0.7 MB."""
MOST_COLUMNS = 256
START = re.compile(rb'\s*\{\s*"[A-Za-z_][A-Za-z_0-9]*"\s*:\s*\[\s*(?![\s{\]])')
SIDES = re.compile(r"_(size|shape|tensor)$")
NO_DTYPES = "dtypes of tensors: the file has few, so they are float32 where the operator takes these"
FORWARD = "backward passes: the file does not tell which of its operators had one"

Call = tuple[str, list[Any], dict[str, Any]]


def recognizes(head: Head) -> bool:
    """Whether it begins as a JSON object whose first value is a list, and of which no object is a part."""
    return START.match(head.start) is not None and head.start.count(b"{") == 1


def read(file: ForeignFile) -> Iterator[Record]:
    """A call for each configuration."""
    columns = _columns(file)
    name = operator_name(file.path)
    builder = RecordBuilder("dlop", file.losses)
    function = FUNCTIONS.get(name)
    recording = Recording("cpu", file.unbounded)

    def argument(value: Any) -> Any:
        match value:
            case list():
                return [argument(item) for item in value]
            case CellTensor():
                model = value.model
                return value.spec(None if model is None else builder.add_values(model))
        return value

    for place in range(max(map(len, columns.values()), default=0)):
        row = {column: cells[place] if place < len(cells) else None for column, cells in columns.items()}
        try:
            if function is not None:
                for call in list(calls_of_row(function, row, recording)):
                    builder.add_call(call.op, call.args, call.kwargs)
                yield from builder.ready()
                continue
            op, args, kwargs = call_of(name, row)
        except Unfit as error:
            file.losses.skip(name, str(error))
            continue
        builder.add_call(op, map(argument, args), {key: argument(value) for key, value in kwargs.items()})
        yield from builder.ready()
    yield from builder.end()


def _columns(file: ForeignFile) -> dict[str, list[Any]]:
    content = b""
    for chunk in file.chunks():
        content += chunk
        if len(content) > MOST_BYTES and not file.unbounded:
            raise file.refusal(f"it holds more than {MOST_BYTES >> 20} MB")
    form = file.parse(content)
    if not isinstance(form, dict) or not all(isinstance(cells, list) for cells in form.values()):
        raise file.damage("it is no object of lists")
    if len(form) > MOST_COLUMNS:
        raise file.refusal(f"it has more than {MOST_COLUMNS} columns")
    return form


def operator_name(path: Path) -> str:
    """The operator that a file is of: `conv2d` of `conv2d.json.gz`."""
    stem = path.stem if path.suffix in PACKED else path.name
    return stem.removesuffix(".json")


def call_of(name: str, row: Row) -> Call:
    """The call of a configuration: the overload, positional arguments, and those that are given by name alone.

    Raises
    ------
    Unfit : where there is none, by the reason
    """
    if name in UNMAPPED:
        raise Unfit(UNMAPPED[name])
    if name in REWRITES:
        try:
            name, row = REWRITES[name](row)
        except (KeyError, ValueError) as error:
            raise error if isinstance(error, Unfit) else Unfit("columns that are not this operator's") from error
    name = NAMES.get(name, name)
    if _is_in_place(row) and schemas_of(f"aten.{name}_"):
        name += "_"
    schemas = [schema for schema in schemas_of(f"aten.{name}") if not any(item.is_out for item in schema.arguments)]
    if not schemas:
        raise Unfit(f"not registered in torch {torch.__version__.partition('+')[0]}")
    row = {column: cell for column, cell in row.items() if column not in IGNORED}
    for reading in _readings(name, row):
        for schema in schemas:
            call = _fill(schema, row, reading)
            if call is not None:
                return call
    raise Unfit("no overload takes these arguments")


def _is_in_place(row: Row) -> bool:
    return row.get("inplace") in (True, [True], "True", ["True"])


def _readings(name: str, row: Row) -> Iterator[Reading]:
    """How cells may be read: as is most likely first."""
    plain = Reading(
        dtype=dtype_named(_single(row.get("dtype"))) or torch.float32,
        dtypes=DTYPES_OF.get(name, {}),
        # of tables that name their columns by the operator, lists are shapes alone
        lists_are_shapes=all(re.fullmatch(rf"{re.escape(name)}_?\d", column) for column in row) and len(row) > 1,
    )
    yield plain
    yield replace(plain, empty_is_scalar=True)
    yield replace(plain, empty_is_scalar=True, numbers_are_tensors=True)


def _single(cell: Any) -> Any:
    return cell[0] if isinstance(cell, list) and len(cell) == 1 else cell


def _fill(schema: Any, row: Row, reading: Reading) -> Call | None:
    """A call of an overload; None where a column or a parameter remains, or a cell is no value of its type."""
    try:
        return _call(schema, row, reading)
    except Unfit:
        return None


def _call(schema: Any, row: Row, reading: Reading) -> Call:
    columns = _assign(schema, row, reading)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    first: tuple[int, ...] = ()
    for place, parameter in enumerate(schema.arguments):
        cell = columns.get(parameter.name, CONSTANTS.get(parameter.name))
        if isinstance(cell, _Cells):
            value: Any = value_of([each for each in cell if not is_missing(each)], parameter, reading, first)
        elif not _is_missing(cell, parameter, reading):
            value = value_of(cell, parameter, reading, first)
        elif parameter.has_default_value():
            continue
        elif parameter.type.kind() == "OptionalType" and not parameter.kwarg_only:
            value = None
        else:
            raise Unfit(f"{op_of(schema)} lacks its argument {parameter.name}")
        if isinstance(value, CellTensor) and not args:
            first = value.shape
        if parameter.kwarg_only or len(args) < place:
            kwargs[parameter.name] = value
        else:
            args.append(value)
    return op_of(schema), args, kwargs


class _Cells(list[Any]):
    """Cells of several columns that are one argument."""


def _is_missing(cell: Any, parameter: Any, reading: Reading) -> bool:
    """Whether a cell gives no value: of an optional tensor, `[0]` gives none either, as no program makes such a one."""
    if reading.empty_is_scalar and cell == [] and parameter.type.kind() == "TensorType":
        return False
    is_none = cell == [0] and parameter.type.kind() == "OptionalType" and _is_tensor(parameter)
    return is_missing(cell, parameter.type) or is_none


def _is_tensor(parameter: Any) -> bool:
    return bool(parameter.type.getElementType().kind() == "TensorType")


def _assign(schema: Any, row: Row, reading: Reading) -> dict[str, Any]:
    """The cell of each parameter, by the columns' names, and of the others by their place.

    Raises
    ------
    Unfit : where a column with a value is none's
    """
    parameters = {item.name: item for item in schema.arguments}
    names = {column: SIDES.sub("", column) for column in row}
    by_name = {column: name if name in parameters else column for column, name in names.items()}
    cells = {name: row[column] for column, name in by_name.items() if name in parameters}
    rest = [column for column, name in by_name.items() if name not in parameters]
    free = [item for item in schema.arguments if item.name not in cells and not item.kwarg_only]
    if len(rest) > 1 and free and free[0].type.isSubtypeOf(torch._C.ListType.ofTensors()):
        return {**cells, free[0].name: _Cells(row[column] for column in rest)}
    for column, parameter in zip(rest, free, strict=False):
        cells[parameter.name] = row[column]
    for column in rest[len(free) :]:
        is_of_tensors = column == "dtype" and dtype_named(_single(row[column])) is reading.dtype
        if not is_missing(row[column]) and _single(row[column]) is not False and not is_of_tensors:
            raise Unfit(f"{op_of(schema)} has no argument {column}")
    return cells


formats.register("dlop")(
    Format(
        "DLOP-Bench's tables of operators: JSON, lists by argument",
        recognizes,
        read,
        defaults=(NO_TIMES, NO_VALUES, NO_GRADIENTS, NO_DTYPES, NO_DEVICE, FORWARD),
        is_collection=True,
    )
)
