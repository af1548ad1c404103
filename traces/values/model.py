"""Choice of the value model of a tensor, and selection of the pieces of a large tensor to which models are fitted."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from opgrip.cli.plugins import Registry
from opgrip.traces.schema.arguments import FormatError, Json, decode, encode
from opgrip.traces.schema.records import ValueModel

# numpy's names of the dtypes that numpy and torch share
_FORMS = {
    dtype: np.dtype(form).str
    for dtype, form in {
        torch.bool: "?",
        torch.uint8: "u1",
        torch.uint16: "u2",
        torch.uint32: "u4",
        torch.uint64: "u8",
        torch.int8: "i1",
        torch.int16: "i2",
        torch.int32: "i4",
        torch.int64: "i8",
        torch.float16: "f2",
        torch.float32: "f4",
        torch.float64: "f8",
        torch.complex64: "c8",
        torch.complex128: "c16",
    }.items()
}


class _Memory:
    __slots__ = ("__array_interface__", "tensor")

    def __init__(self, tensor: torch.Tensor, form: dict[str, Any]) -> None:
        self.tensor = tensor
        self.__array_interface__ = form


def array_of(tensor: torch.Tensor) -> NDArray[Any]:
    """Return a tensor's elements as a read-only array over the same memory, which the array keeps alive.

    `Tensor.numpy` would make the memory non-resizable, so that the program could neither free a parameter's memory nor
    let an output grow.
    """
    form = _FORMS.get(tensor.dtype)
    if form is None or not tensor.is_cpu or tensor.is_conj() or tensor.is_neg():
        return tensor.numpy()
    shape = tuple(tensor.shape)
    if not tensor.numel():
        return np.empty(shape, form)
    address = tensor.data_ptr()
    if not address:
        raise ValueError(f"the program has freed the memory of a tensor of shape {shape}")
    size = tensor.itemsize
    strides = None if tensor.is_contiguous() else tuple(step * size for step in tensor.stride())
    interface = {"shape": shape, "typestr": form, "data": (address, True), "strides": strides, "version": 3}
    return np.asarray(_Memory(tensor, interface))


Number = TypeVar("Number", bound=np.generic)

MOST = 4096  # number of elements in all pieces; a tensor of at most this size is used whole
LENGTH = 256  # number of elements in a piece
# lengths of shorter pieces that are tried if pieces are constant, and the total number of elements in them
SHORT, MORE = (16, 1), 1 << 14
FEWEST_ROWS = 4  # minimum number of rows, even if one row has enough elements
GOLDEN = (5**0.5 - 1) / 2  # its multiples are spread evenly and coincide with no period

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def pieces(tensor: torch.Tensor) -> torch.Tensor:
    part = _pieces(tensor, LENGTH, MOST)
    if not _holds_constants(part):
        return part
    for length in SHORT:
        part = tensor if tensor.numel() <= MORE else _pieces(tensor, length, MORE)
        if bool((part != part[(0,) * part.dim()]).any()):
            break
    return part


def rows_of(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.numel() <= FEWEST_ROWS * tensor.shape[-1]:
        return tensor
    return _pieces(tensor, LENGTH, MOST, whole_rows=True)


def _pieces(tensor: torch.Tensor, length: int, most: int, whole_rows: bool = False) -> torch.Tensor:
    offsets, extent = _offsets(tuple(tensor.shape), tensor.stride(), length, most, whole_rows)
    return taken(tensor, offsets, extent)


def _holds_constants(part: torch.Tensor) -> bool:
    flat = part.reshape(-1)
    whole = flat[: len(flat) // LENGTH * LENGTH].view(-1, LENGTH)
    return bool((whole == whole[:, :1]).all(dim=1).any())


def taken(tensor: torch.Tensor, offsets: NDArray[np.int64], extent: int) -> torch.Tensor:
    memory = tensor.as_strided((extent,), (1,))
    if tensor.itemsize not in _BITS:
        return torch.from_numpy(np.take(array_of(memory), offsets))
    # by numpy: torch distributes even the smallest work to threads, which may have to wait for busy processors; numpy
    # lacks bfloat16
    return torch.from_numpy(np.take(array_of(memory.view(_BITS[tensor.itemsize])), offsets)).view(tensor.dtype)


def every_so_many(values: NDArray[Number], most: int) -> NDArray[Number]:
    """Return a view of at most `most` evenly spaced elements of an array, (N,)."""
    # an odd distance: an even one would take only one element of each interleaved pair
    return values if len(values) <= most else values[:: -(-len(values) // most) | 1]


@lru_cache(maxsize=128)
def _offsets(
    shape: tuple[int, ...], stride: tuple[int, ...], length: int, most: int, whole_rows: bool
) -> tuple[NDArray[np.int64], int]:
    columns, rows = shape[-1], int(np.prod(shape[:-1], dtype=np.int64))
    height, width = max(1, length // columns), columns if whole_rows else min(columns, length)
    count = max(min(rows, FEWEST_ROWS), most // (height * width))
    if width == columns:
        row = (_starts(count, rows, height)[:, None] + np.arange(height)).reshape(-1)
        column = np.zeros_like(row)
    else:
        row, column = np.divmod(_starts(count, rows * columns, width), columns)
        column = np.minimum(column, columns - length)
    row_offsets = column * stride[-1]
    for place, step in zip(np.unravel_index(row, shape[:-1]) if len(shape) > 1 else (), stride[:-1], strict=True):
        row_offsets = row_offsets + place * step
    offsets = row_offsets[:, None] + np.arange(width) * stride[-1]
    return offsets, int(offsets.max()) + 1


def _starts(count: int, total: int, length: int) -> NDArray[np.int64]:
    parts, size = np.arange(count), total / count
    return np.floor(parts * size + parts * GOLDEN % 1 * max(0.0, size - length)).astype(np.int64)


# parts of a large tensor that a kind of model examines if it need not see every element
ALL, PIECES, ROWS = "all", "pieces", "rows"


# kinds of value models, by their names in traces
value_models: Registry[type[ValueModel]] = Registry("opgrip.traces.values", "opgrip.value_models")


def fit(tensor: torch.Tensor, requested_kinds: Collection[str] = (), exact: bool = True) -> ValueModel | None:
    """Return the first value model that fits a tensor, or None if none does.

    requested_kinds : names of kinds of value models to try although they have `on_request = True`
    """
    if tensor.numel() == 0:
        return None
    # numpy's error settings are the program's, and should only react to the program's numbers
    with torch.no_grad(), np.errstate(all="ignore"):
        plain = tensor.detach().resolve_conj().resolve_neg()
        parts = {ALL: plain}
        for kind in _kinds(frozenset(requested_kinds), len(value_models.names())):
            part = ALL if exact or plain.numel() <= MOST else getattr(kind, "examined_part", ALL)
            if part not in parts:
                parts[part] = rows_of(plain) if part == ROWS and plain.dim() > 1 else pieces(plain)
            model = kind.fit(parts[part])
            if model is not None:
                return model
    return None


@lru_cache
def _kinds(requested: frozenset[str], registered_count: int) -> tuple[type[ValueModel], ...]:
    kinds = [kind for name, kind in value_models.items() if name in requested or not getattr(kind, "on_request", False)]
    return tuple(sorted(kinds, key=lambda kind: kind.priority))


def sample(tensor: torch.Tensor, most: int) -> torch.Tensor:
    while tensor.numel() > most:
        longest = max(range(tensor.dim()), key=lambda dimension: tensor.shape[dimension])
        if tensor.shape[longest] == 1:
            break
        # a step of three: a step of two would take only one element of each interleaved pair
        steps = [slice(None)] * tensor.dim()
        steps[longest] = slice(None, None, 3)
        tensor = tensor[tuple(steps)]
    return tensor


def leading(tensor: torch.Tensor, most: int) -> torch.Tensor:
    for dimension in range(tensor.dim()):
        if tensor.numel() <= most:
            break
        row = tensor.numel() // tensor.shape[dimension]
        tensor = tensor.narrow(dimension, 0, max(1, most // row))
    return tensor


def value_model_to_json(model: ValueModel) -> dict[str, Json]:
    name = next(name for name, kind in value_models.items() if kind is type(model))
    values = {field.name: getattr(model, field.name) for field in fields(model)}
    defaults = {field.name: field.default for field in fields(model)}
    return {"model": name} | {
        key: encode(value) for key, value in values.items() if defaults[key] is MISSING or value != defaults[key]
    }


def value_model_from_json(form: Mapping[str, Json]) -> ValueModel:
    name = str(form.get("model"))[:60]
    kind = value_models.get(name)
    if kind is None:
        raise FormatError(f"unknown kind of value model: {name!r}")
    form_fields = [field for field in fields(kind) if field.name in form or field.default is MISSING]
    missing = [field.name for field in form_fields if field.name not in form]
    if missing:
        raise FormatError(f"a value model of kind {name} lacks {', '.join(missing)}")
    model = kind(**{field.name: decode(form[field.name]) for field in form_fields})
    try:
        model.check()
    except FormatError:
        raise
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        raise FormatError(f"values cannot be drawn from a value model of kind {name} ({error})") from error
    return model
