"""Tables of DLOP-Bench that are of a Python function of torch's: the operators that a row's call runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from opgrip.traces.formats.cells import Unfit, is_missing, shape_of
from opgrip.traces.formats.configurations.generators import Arguments
from opgrip.traces.formats.configurations.modules import Recorded, Recording
from opgrip.traces.schema.arguments import TensorSpec
from opgrip.traces.schema.tensor_specs import contiguous

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
