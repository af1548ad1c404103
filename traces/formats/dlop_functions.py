"""Tables of DLOP-Bench that are of a Python function, and what its files say of operators beyond schemas."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from opgrip.traces.formats.cells import Unfit, is_missing, shape_of
from opgrip.traces.formats.configurations.generators import Arguments
from opgrip.traces.formats.configurations.modules import Recorded, Recording
from opgrip.traces.schema.arguments import TensorSpec
from opgrip.traces.schema.tensor_specs import contiguous

Row = dict[str, Any]

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
"""Operators that torch registers under another name than its Python function has."""

UNMAPPED = {
    "multivariate_normal": "MultivariateNormal is a Python class, whose sampling is several operators",
}
"""Files that are of no operator."""

IGNORED = frozenset({"_stacklevel", "inplace", "return_indices", "norm_type", "size_average", "reduce", "antialias"})
"""Columns that Python functions take and their operators do not, or that say which operator it is."""

CONSTANTS: dict[str, Any] = {"cudnn_enabled": True}
"""What Python functions give operators by themselves."""

DTYPES_OF: dict[str, dict[str, torch.dtype]] = {
    "bincount": {"self": torch.int64},
    "cross_entropy_loss": {"target": torch.int64},
    "ctc_loss": {"targets": torch.int64},
    "one_hot": {"self": torch.int64},
}
"""Dtypes of arguments whose names do not tell them."""

UPSAMPLE = {
    "nearest": "upsample_nearest{}d",
    "nearest-exact": "_upsample_nearest_exact{}d",
    "linear": "upsample_linear1d",
    "bilinear": "upsample_bilinear2d",
    "bicubic": "upsample_bicubic2d",
    "trilinear": "upsample_trilinear3d",
}
"""Operators of `interpolate` by its mode."""


def _cat(row: Row) -> tuple[str, Row]:
    """Along the first dimension in which the tensors differ, where the file does not say which."""
    if not is_missing(row.get("dim")) and row["dim"] not in ([False], False):
        return "cat", row
    shapes = [shape_of(cell) for column, cell in row.items() if column != "dim" and not is_missing(cell)]
    sizes = [shape for shape in shapes if shape]
    differing = (place for place, each in enumerate(zip(*sizes, strict=False)) if len(set(each)) > 1)
    return "cat", {**row, "dim": next(differing, 0)}


def _einsum(row: Row) -> tuple[str, Row]:
    """The operands are one argument, and the equation has slashes for commas."""
    equation, *operands = (cell for cell in row.values() if not is_missing(cell))
    if not isinstance(equation, str):
        raise Unfit("an equation that is no text")
    return "einsum", {"equation": equation.replace("/", ","), "tensors": operands}


def _ctc_loss(row: Row) -> tuple[str, Row]:
    """Each sequence as long as the input, the targets shared out evenly."""
    probabilities, targets, inputs, lengths, *rest = row.values()
    long, labels, batch = shape_of(probabilities), shape_of(targets), shape_of(lengths)
    if not long or not labels or not batch or len(batch) != 1 or inputs != lengths or not 0 < batch[0] <= 1 << 16:
        raise Unfit("lengths that do not go together")
    share, remainder = divmod(labels[0], batch[0])
    if len(labels) != 1 or share + bool(remainder) > long[0]:
        raise Unfit("targets that are longer than the input")
    input_lengths = [long[0]] * batch[0]
    target_lengths = [share + (place < remainder) for place in range(batch[0])]
    names = ("blank", "reduction", "zero_infinity")
    plain = dict(zip(names, rest, strict=False))
    lists = {"input_lengths": input_lengths, "target_lengths": target_lengths}
    return "ctc_loss", {"log_probs": probabilities, "targets": targets, **lists, **plain}


def _instance_norm(row: Row) -> tuple[str, Row]:
    names = ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps")
    return "instance_norm", dict(zip(names, row.values(), strict=False))


def _max(name: str) -> Callable[[Row], tuple[str, Row]]:
    """Of two tensors, or of one: a second column is no dimension."""

    def rewrite(row: Row) -> tuple[str, Row]:
        first, *others = row.values()
        second = next((cell for cell in others if not is_missing(cell)), None)
        return name, {f"{name}_0": first, f"{name}_1": second}

    return rewrite


def _max_unpool2d(row: Row) -> tuple[str, Row]:
    """The output is as large as what was pooled."""
    lists = {name: shape_of(row.get(name)) for name in ("input", "kernel_size", "stride", "padding")}
    sizes = {name: shape for name, shape in lists.items() if shape}
    if len(sizes) < len(lists) or not is_missing(row.get("output_size")):
        raise Unfit("sizes that do not go together")
    pairs = [sizes[name] * 2 if len(sizes[name]) == 1 else sizes[name] for name in ("kernel_size", "stride", "padding")]
    output = [
        (size - 1) * stride + kernel - 2 * padding
        for size, kernel, stride, padding in zip(sizes["input"][-2:], *pairs, strict=True)
    ]
    return "max_unpool2d", {"self": row["input"], "indices": row.get("indices"), "output_size": output}


def _interpolate(row: Row) -> tuple[str, Row]:
    """The operator of the mode and of the number of dimensions."""
    shape = shape_of(row.get("input_size"))
    mode = _text(row.get("mode")) or "nearest"
    dimensions = len(shape or ()) - 2
    if shape is None or dimensions not in (1, 2, 3) or mode not in UPSAMPLE:
        raise Unfit("a mode that torch has no operator for")
    call: Row = {"input": list(shape)}
    for name, argument in (("output_size", "output_size"), ("scale_factor", "scale_factors")):
        cell = row.get(name)
        items = cell if isinstance(cell, list) and not is_missing(cell) and cell != [False] else []
        call[argument] = (items * dimensions if len(items) == 1 else items) or None
    if "nearest" not in mode:
        call["align_corners"] = _text(row.get("align_corners")) == "True"
    return UPSAMPLE[mode].format(dimensions), call


def _text(cell: Any) -> str | None:
    inner = cell[0] if isinstance(cell, list) and len(cell) == 1 else cell
    return None if is_missing(inner) or inner is False else str(inner)


def _triu(row: Row) -> tuple[str, Row]:
    first, *rest = row.values()
    return "triu", {"self": first, "diagonal": rest[0] if rest else None}


REWRITES: dict[str, Callable[[Row], tuple[str, Row]]] = {
    "cat": _cat,
    "einsum": _einsum,
    "ctc_loss": _ctc_loss,
    "instance_norm": _instance_norm,
    "interpolate": _interpolate,
    "max": _max("max"),
    "min": _max("min"),
    "max_unpool2d": _max_unpool2d,
    "triu": _triu,
}
"""Files whose columns are not the operator's arguments: the operator and its arguments of a row."""


SUFFIX = "_size"
"""That names of columns of shapes may have."""


@dataclass(frozen=True, slots=True)
class TableFunction:
    """A function that a file is of.

    Attributes
    ----------
    name : of torch's
    tensors : its arguments that are tensors, of which cells have the shapes
    plain : its arguments that are numbers, or true or false
    """

    name: str
    tensors: tuple[str, ...]
    plain: tuple[str, ...]


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
"""By the files' names."""


def calls_of_row(function: TableFunction, row: dict[str, Any], recording: Recording) -> Iterator[Recorded]:
    """The operators that a row's call runs, seen on tensors without memory.

    Raises
    ------
    Unfit : where a column is no argument, a cell no value of one, or the function does not take them
    """
    arguments: dict[str, Any] = {}
    for column, cell in row.items():
        name = column if column in (*function.tensors, *function.plain) else column.removesuffix(SUFFIX)
        if name in function.tensors:
            arguments[name] = _tensor(cell, name)
        elif name in function.plain:
            if not is_missing(cell):
                arguments[name] = _plain(cell, name)
        elif not is_missing(cell):
            raise Unfit(f"{function.name} has no argument {column[:60]}")
    try:
        yield from recording.function(function.name, Arguments((), arguments))
    except ValueError as error:
        raise Unfit(str(error)[:200]) from error


def _tensor(cell: Any, name: str) -> TensorSpec | None:
    if is_missing(cell):
        return None
    shape = shape_of(cell)
    if shape is None:
        raise Unfit(f"{name} is no shape")
    return TensorSpec(shape, contiguous(shape), torch.float32, "cpu")


def _plain(cell: Any, name: str) -> bool | int | float:
    value = cell[0] if isinstance(cell, list) and len(cell) == 1 else cell
    if not isinstance(value, bool | int | float):
        raise Unfit(f"{name} is no number")
    return value
