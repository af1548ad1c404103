"""Reader of DLOP-Bench's operator configurations: JSON with a list of values per argument, or CSV with one
configuration per line.

    adaptive_avg_pool2d.json: {"input": [[4, 96, 56, 56], [2, 64, 128, 128]], "output_size": [[1], [6]]}
    where.csv: #0,yolact_r50_8x8_coco,12,"{'condition': [[19248]], 'x': [[19248]], 'y': [[]]}"

The file is named after the operator. A list belongs to the argument with its name, else to the argument at its
position. torch's schema of the operator decides whether a list is a shape, a list of numbers or a number.
"""

from __future__ import annotations

import ast
import csv
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from opgrip.traces.formats.building import NO_DEVICE, NO_GRADIENTS, NO_TIMES, NO_VALUES, RecordBuilder, fit_values
from opgrip.traces.formats.configurations.generators import Arguments
from opgrip.traces.formats.configurations.modules import MetaRecording, Recorded
from opgrip.traces.formats.operator_schemas import NotConverted, op_of, schemas_of
from opgrip.traces.io.foreign_files import PACKED, ForeignFile, Format, Head, formats
from opgrip.traces.schema.arguments import TensorSpec
from opgrip.traces.schema.records import Record, Scope
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


@dataclass(frozen=True, slots=True)
class TableRow:
    cells: dict[str, Any]
    count: int = 1
    network: str = ""


def rows_of_json(file: ForeignFile) -> Iterator[TableRow]:
    form = file.parse(file.content(MOST_BYTES))
    if not isinstance(form, dict) or not all(isinstance(cells, list) for cells in form.values()):
        raise file.damage("it is not a JSON object of lists")
    if len(form) > MOST_COLUMNS:
        raise file.refusal(f"it has more than {MOST_COLUMNS} columns")
    for index in range(max(map(len, form.values()), default=0)):
        yield TableRow({column: cells[index] if index < len(cells) else None for column, cells in form.items()})


def rows_of_csv(file: ForeignFile, name: str) -> Iterator[TableRow]:
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
        file.check(calls, MOST_ALL_CALLS, "it has more than {:,} calls")
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
    shape: tuple[int, ...]
    dtype: torch.dtype
    data: tuple[float, ...] | None = None

    def spec(self, add_values: Callable[[ValueModel], int]) -> TensorSpec:
        data = None if self.data is None else torch.tensor(self.data, dtype=self.dtype).reshape(self.shape)
        model = None if data is None else fit_values(data)
        values = None if model is None else add_values(model)
        return TensorSpec(self.shape, contiguous(self.shape), self.dtype, "cpu", values=values)


@dataclass(frozen=True, slots=True)
class Reading:
    """Rules for converting the cells of a table to arguments of an operator.

    dtype : dtype of tensors whose argument does not imply one
    lists_are_shapes : True if a list is always a tensor's shape, and never a list of numbers
    empty_is_scalar : True if `[]` is the shape of a tensor without dimensions, rather than a missing value
    numbers_are_tensors : True if a number is a tensor without dimensions where the operator takes only a tensor
    """

    dtype: torch.dtype = torch.float32
    dtypes: Mapping[str, torch.dtype] | None = None
    lists_are_shapes: bool = False
    empty_is_scalar: bool = False
    numbers_are_tensors: bool = False

    def dtype_of(self, name: str) -> torch.dtype:
        return {**DTYPE_OF_NAME, **(self.dtypes or {})}.get(name, self.dtype)


def single(cell: Any) -> Any:
    return cell[0] if isinstance(cell, list) and len(cell) == 1 else cell


def is_missing(cell: Any, kind: Any = None) -> bool:
    inner = single(cell)
    if inner is None or inner == [] or (isinstance(inner, str) and inner in ("", "None", "null")):
        return True
    return inner is False and kind is not None and innermost(kind).kind() != "BoolType"


def innermost(kind: Any) -> Any:
    return kind.getElementType() if kind.kind() == "OptionalType" else kind


def value_of(cell: Any, parameter: Any, reading: Reading, first: tuple[int, ...] = ()) -> Any:
    kind = innermost(parameter.type)
    name = kind.kind()
    if name == "TensorType":
        return _tensor(cell, parameter.name, reading)
    if name == "ListType":
        return _list(cell, kind.getElementType(), parameter, reading, first)
    if reading.lists_are_shapes and isinstance(cell, list):
        raise NotConverted(f"the argument {parameter.name} is not a tensor, but its cell is a shape")
    return _scalar(single(cell), name, parameter.name)


def shape_of(cell: Any) -> tuple[int, ...] | None:
    if not isinstance(cell, list) or len(cell) > MOST_DIMENSIONS:
        return None
    sizes = [_integer(item) for item in cell]
    whole = tuple(size for size in sizes if size is not None and 0 <= size < LARGEST)
    return whole if len(whole) == len(sizes) else None


def _integer(item: Any) -> int | None:
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
            raise NotConverted(f"the cell of the tensor {name} has numbers or lists after its first list")
    if cell == [] and not reading.empty_is_scalar:
        raise NotConverted(f"the cell of the tensor {name} is empty")
    if isinstance(cell, list) and any(type(item) is float for item in cell) and all(map(_is_number, cell)):
        # not sizes: the list has the values themselves
        return CellTensor((len(cell),), dtype, tuple(map(float, cell)))
    shape = shape_of(cell)
    if shape is not None:
        return CellTensor(shape, dtype)
    if reading.numbers_are_tensors and _is_number(cell):
        return CellTensor((), dtype, (cell,))
    raise NotConverted(f"the cell of the tensor {name} is not a shape: {str(cell)[:40]}")


def _list(cell: Any, element: Any, parameter: Any, reading: Reading, first: tuple[int, ...]) -> list[Any]:
    kind = innermost(element).kind()
    if kind == "TensorType":
        if not isinstance(cell, list) or not all(isinstance(item, list) for item in cell):
            raise NotConverted(f"the argument {parameter.name} is not a list of shapes: {str(cell)[:40]}")
        return [_tensor(item, parameter.name, reading) for item in cell]
    if reading.lists_are_shapes and isinstance(cell, list):
        raise NotConverted(f"the argument {parameter.name} is not a tensor, but its cell is a shape")
    items = cell if isinstance(cell, list) else [cell]
    if len(items) > MOST_DIMENSIONS:
        raise NotConverted(f"the argument {parameter.name} has more than {MOST_DIMENSIONS} numbers")
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
        raise NotConverted(f"the argument {name} is not of type {kind}: {str(item)[:40]!r}")
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
    return DTYPES.get(SYNONYMS.get(item, item)) if isinstance(item, str) else None


# functions that are not operators, and their arguments that are tensors, by the names of their files
FUNCTIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "mhaf": (
        "torch.nn.functional.multi_head_attention_forward",
        (
            *("query", "key", "value", "in_proj_weight", "in_proj_bias", "bias_k", "bias_v"),
            *("out_proj_weight", "out_proj_bias", "key_padding_mask", "attn_mask"),
        ),
    ),
    "normalize": ("torch.nn.functional.normalize", ("input",)),
}


def calls_of_row(
    name: str, row: dict[str, Any], recording: MetaRecording, add_values: Callable[[ValueModel], int]
) -> list[Recorded]:
    function, tensors = FUNCTIONS[name]
    arguments: dict[str, Any] = {}
    for column, cell in row.items():
        argument = column.removesuffix("_size")
        if argument in tensors:
            arguments[argument] = None if is_missing(cell) else _tensor(cell, argument, Reading()).spec(add_values)
        elif not is_missing(cell):
            value = single(cell)
            if not isinstance(value, bool | int | float):
                raise NotConverted(f"the argument {column[:60]} is not a number: {str(value)[:40]}")
            arguments[column] = value
    try:
        return list(recording.function(function, Arguments((), arguments)))
    except ValueError as error:
        raise NotConverted(str(error)[:200]) from error


START = re.compile(rb'\s*\{\s*"[A-Za-z_][A-Za-z_0-9]*"\s*:\s*\[\s*(?![\s{\]])')
SIDES = re.compile(r"_(size|shape|tensor)$")
NO_DTYPES = "dtypes of tensors: the file has few, so they are float32 where the operator takes these"
FORWARD = "backward passes: the file does not say which of its operators had one"

Row = dict[str, Any]

# names of operators in torch, by the names of Python functions that differ from them
NAMES = {
    "adaptive_max_pool3d_with_indices": "adaptive_max_pool3d",
    "affine_grid": "affine_grid_generator",
    "batchnorm": "batch_norm",
    "conv2d_top3": "conv2d",
    "conv2dt": "conv_transpose2d",
    "cross_entropy": "cross_entropy_loss",
    "dropout2d": "feature_dropout",
    "grid_sample": "grid_sampler",
    "lstsq": "linalg_lstsq",
    "ndimension": "dim",
    "to": "_to_copy",
    "unfold": "im2col",
    "unique": "_unique2",
}

# reasons why some files do not describe an operator, by file name
UNMAPPED = {"multivariate_normal": "MultivariateNormal is a Python class, whose sampling is several operators"}

# columns that the Python function accepts but its operator does not, or that select the operator
IGNORED = frozenset({"_stacklevel", "inplace", "return_indices", "norm_type", "size_average", "reduce", "antialias"})

# arguments that Python functions add to the calls of their operators
CONSTANTS: dict[str, Any] = {"cudnn_enabled": True}

# dtypes of arguments whose names do not imply a dtype
DTYPES_OF: dict[str, dict[str, torch.dtype]] = {
    "bincount": {"self": torch.int64},
    "cross_entropy_loss": {"target": torch.int64},
    "ctc_loss": {"targets": torch.int64},
    "one_hot": {"self": torch.int64},
}

# operators of `interpolate`, by mode
UPSAMPLE = {
    "nearest": "upsample_nearest{}d",
    "nearest-exact": "_upsample_nearest_exact{}d",
    "linear": "upsample_linear1d",
    "bilinear": "upsample_bilinear2d",
    "bicubic": "upsample_bicubic2d",
    "trilinear": "upsample_trilinear3d",
}


def _cat(row: Row) -> tuple[str, Row]:
    if not is_missing(row.get("dim")) and row["dim"] not in ([False], False):
        return "cat", row
    shapes = [shape_of(cell) for column, cell in row.items() if column != "dim" and not is_missing(cell)]
    sizes = [shape for shape in shapes if shape]
    # along the first dimension in which the tensors differ
    differing = (index for index, each in enumerate(zip(*sizes, strict=False)) if len(set(each)) > 1)
    return "cat", {**row, "dim": next(differing, 0)}


def _einsum(row: Row) -> tuple[str, Row]:
    equation, *operands = (cell for cell in row.values() if not is_missing(cell))
    if not isinstance(equation, str):
        raise NotConverted(f"the equation of einsum is not a string: {str(equation)[:40]}")
    # the file has slashes in place of commas
    return "einsum", {"equation": equation.replace("/", ","), "tensors": operands}


def _ctc_loss(row: Row) -> tuple[str, Row]:
    probabilities, targets, inputs, lengths, *rest = row.values()
    long, labels, batch = shape_of(probabilities), shape_of(targets), shape_of(lengths)
    if not long or not labels or not batch or len(batch) != 1 or inputs != lengths or not 0 < batch[0] <= 1 << 16:
        raise NotConverted("the lengths of the inputs and targets of ctc_loss do not match its tensors")
    share, remainder = divmod(labels[0], batch[0])
    if len(labels) != 1 or share + bool(remainder) > long[0]:
        raise NotConverted("the targets of ctc_loss are longer than its inputs")
    input_lengths = [long[0]] * batch[0]
    target_lengths = [share + (index < remainder) for index in range(batch[0])]
    names = ("blank", "reduction", "zero_infinity")
    plain = dict(zip(names, rest, strict=False))
    lists = {"input_lengths": input_lengths, "target_lengths": target_lengths}
    return "ctc_loss", {"log_probs": probabilities, "targets": targets, **lists, **plain}


NORM_COLUMNS = ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps")


def _max(name: str) -> Callable[[Row], tuple[str, Row]]:
    def rewrite(row: Row) -> tuple[str, Row]:
        first, *others = row.values()
        second = next((cell for cell in others if not is_missing(cell)), None)
        # the second column is a tensor, not a dimension
        return name, {f"{name}_0": first, f"{name}_1": second}

    return rewrite


def _max_unpool2d(row: Row) -> tuple[str, Row]:
    lists = {name: shape_of(row.get(name)) for name in ("input", "kernel_size", "stride", "padding")}
    sizes = {name: shape for name, shape in lists.items() if shape}
    if len(sizes) < len(lists) or not is_missing(row.get("output_size")):
        raise NotConverted("max_unpool2d needs input, kernel_size, stride and padding, and must not have output_size")
    pairs = [sizes[name] * 2 if len(sizes[name]) == 1 else sizes[name] for name in ("kernel_size", "stride", "padding")]
    # the size that the input of the pooling had
    output = [
        (size - 1) * stride + kernel - 2 * padding
        for size, kernel, stride, padding in zip(sizes["input"][-2:], *pairs, strict=True)
    ]
    return "max_unpool2d", {"self": row["input"], "indices": row.get("indices"), "output_size": output}


def _interpolate(row: Row) -> tuple[str, Row]:
    shape = shape_of(row.get("input_size"))
    mode = _text(row.get("mode")) or "nearest"
    dimensions = len(shape or ()) - 2
    if shape is None or dimensions not in (1, 2, 3) or mode not in UPSAMPLE:
        raise NotConverted(f"torch has no interpolation of mode {str(mode)[:40]} for input_size {str(shape)[:40]}")
    call: Row = {"input": list(shape)}
    for name, argument in (("output_size", "output_size"), ("scale_factor", "scale_factors")):
        cell = row.get(name)
        items = cell if isinstance(cell, list) and not is_missing(cell) and cell != [False] else []
        call[argument] = (items * dimensions if len(items) == 1 else items) or None
    if "nearest" not in mode:
        call["align_corners"] = _text(row.get("align_corners")) == "True"
    return UPSAMPLE[mode].format(dimensions), call


def _text(cell: Any) -> str | None:
    inner = single(cell)
    return None if is_missing(inner) or inner is False else str(inner)


# functions that convert a row to an operator and its arguments, for files whose columns differ from the arguments
REWRITES: dict[str, Callable[[Row], tuple[str, Row]]] = {
    "cat": _cat,
    "einsum": _einsum,
    "ctc_loss": _ctc_loss,
    "instance_norm": lambda row: ("instance_norm", dict(zip(NORM_COLUMNS, row.values(), strict=False))),
    "interpolate": _interpolate,
    "max": _max("max"),
    "min": _max("min"),
    "max_unpool2d": _max_unpool2d,
    "triu": lambda row: ("triu", dict(zip(("self", "diagonal"), row.values(), strict=False))),
}

Call = tuple[str, list[Any], dict[str, Any]]


def recognizes(head: Head) -> bool:
    return is_csv(head) or (START.match(head.start) is not None and head.start.count(b"{") == 1)


def is_csv(head: Head) -> bool:
    first_line = head.start.partition(b"\n")[0].decode(errors="replace").removeprefix("\ufeff")
    return tuple(first_line.strip().split(",")) == CSV_COLUMNS


def read(file: ForeignFile) -> Iterator[Record]:
    stem = file.path.stem if file.path.suffix in PACKED else file.path.name
    name = stem.removesuffix(".json").removesuffix(".csv")
    rows = (
        rows_of_csv(file, name) if is_csv(Head(file.path, "", next(file.lines(), "").encode())) else rows_of_json(file)
    )
    builder = RecordBuilder("dlop", file.losses)
    recording = MetaRecording("cpu", file.unbounded)

    def argument(value: Any) -> Any:
        match value:
            case list():
                return [argument(item) for item in value]
            case CellTensor():
                return value.spec(builder.add_values)
        return value

    for row in rows:
        scope = Scope(0, row.network, "", "forward")
        with builder.skipping(name, row.count):
            if name in FUNCTIONS:
                calls = calls_of_row(name, row.cells, recording, builder.add_values)
            else:
                op, args, kwargs = call_of(name, row.cells)
                calls = [Recorded(op, tuple(map(argument, args)), {key: argument(kwargs[key]) for key in kwargs})]
            for call in calls:
                builder.add_call(call.op, call.args, call.kwargs, count=row.count, scope=scope)
        yield from builder.ready()
    yield from builder.end()


def call_of(name: str, row: Row) -> Call:
    if name in UNMAPPED:
        raise NotConverted(UNMAPPED[name])
    if name in REWRITES:
        try:
            name, row = REWRITES[name](row)
        except NotConverted:
            raise
        except (KeyError, ValueError) as error:
            raise NotConverted(f"{name} lacks a column, or a cell has an invalid value") from error
    name = NAMES.get(name, name)
    if row.get("inplace") in (True, [True], "True", ["True"]) and schemas_of(f"aten.{name}_"):
        name += "_"
    schemas = [schema for schema in schemas_of(f"aten.{name}") if not any(item.is_out for item in schema.arguments)]
    if not schemas:
        raise NotConverted(f"not registered in torch {torch.__version__.partition('+')[0]}")
    row = {column: cell for column, cell in row.items() if column not in IGNORED}
    for reading in _readings(name, row):
        for schema in schemas:
            # a column or parameter may remain, or a cell may not fit its type
            with suppress(NotConverted):
                return _call(schema, row, reading)
    raise NotConverted(f"no overload of aten.{name} takes these arguments")


def _readings(name: str, row: Row) -> Iterator[Reading]:
    plain = Reading(
        dtype=dtype_named(single(row.get("dtype"))) or torch.float32,
        dtypes=DTYPES_OF.get(name, {}),
        # in tables that name their columns by the operator, lists are always shapes
        lists_are_shapes=all(re.fullmatch(rf"{re.escape(name)}_?\d", column) for column in row) and len(row) > 1,
    )
    yield plain
    yield replace(plain, empty_is_scalar=True)
    yield replace(plain, empty_is_scalar=True, numbers_are_tensors=True)


def _call(schema: Any, row: Row, reading: Reading) -> Call:
    columns = _assign(schema, row, reading)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    first: tuple[int, ...] = ()
    for index, parameter in enumerate(schema.arguments):
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
            raise NotConverted(f"{op_of(schema)} lacks its argument {parameter.name}")
        if isinstance(value, CellTensor) and not args:
            first = value.shape
        if parameter.kwarg_only or len(args) < index:
            kwargs[parameter.name] = value
        else:
            args.append(value)
    return op_of(schema), args, kwargs


class _Cells(list[Any]):
    pass


def _is_missing(cell: Any, parameter: Any, reading: Reading) -> bool:
    if reading.empty_is_scalar and cell == [] and parameter.type.kind() == "TensorType":
        return False
    # no program passes an empty tensor for an optional one
    is_optional = parameter.type.kind() == "OptionalType"
    is_none = cell == [0] and is_optional and parameter.type.getElementType().kind() == "TensorType"
    return is_missing(cell, parameter.type) or is_none


def _assign(schema: Any, row: Row, reading: Reading) -> dict[str, Any]:
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
        is_of_tensors = column == "dtype" and dtype_named(single(row[column])) is reading.dtype
        if not is_missing(row[column]) and single(row[column]) is not False and not is_of_tensors:
            raise NotConverted(f"{op_of(schema)} has no argument {column}")
    return cells


formats.register("dlop")(
    Format(
        "DLOP-Bench's tables of operators: JSON, lists by argument, or CSV, a configuration per line",
        recognizes,
        read,
        defaults=(NO_TIMES, NO_VALUES, NO_GRADIENTS, NO_DTYPES, NO_DEVICE, FORWARD),
        is_collection=True,
    )
)
