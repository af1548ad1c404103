"""What a trace holds of a tensor, and torch's types by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Annotated, TypeAlias

import torch

from opgrip.traces.schema.json_values import AnyValue, Argument, Count, DeviceName, Int64
from opgrip.traces.schema.privacy import NESTED, Public, coarse, hashed, public


def plain_name(value: object) -> str:
    """The name of a dtype, layout or memory format."""
    return str(value).removeprefix("torch.")


LAYOUTS: dict[str, torch.layout] = {
    name: layout for name in dir(torch) if isinstance(layout := getattr(torch, name), torch.layout)
}
MEMORY_FORMATS: dict[str, torch.memory_format] = {
    name: layout for name in dir(torch) if isinstance(layout := getattr(torch, name), torch.memory_format)
}
DTYPES: dict[str, torch.dtype] = {
    plain_name(dtype): dtype for name in dir(torch) if isinstance(dtype := getattr(torch, name), torch.dtype)
}


def tensor_outline(dtype: torch.dtype, shape: Iterable[int]) -> str:
    """A tensor in short: `float32[64,256]`."""
    return f"{plain_name(dtype)}[{','.join(map(str, shape))}]"


COMPRESSED_LAYOUTS = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
"""Sparse layouts that compress the indices of their rows or columns."""
COMPRESSES_ROWS = (torch.sparse_csr, torch.sparse_bsr)
BLOCKED = (torch.sparse_bsr, torch.sparse_bsc)
QUANTIZED: dict[torch.dtype, torch.dtype] = {
    torch.quint8: torch.uint8,
    torch.qint8: torch.int8,
    torch.qint32: torch.int32,
    torch.quint4x2: torch.uint8,
    torch.quint2x4: torch.uint8,
}
"""Quantized dtypes, and that of the whole numbers that stand for the values."""
PACKED = (torch.quint4x2, torch.quint2x4)
"""Quantized dtypes with several elements in a byte."""

_BITS = re.compile(r"torch\.(bits\d.*|u?int[1-7]|float4.*)")


if TYPE_CHECKING:
    AnyMadeOf: TypeAlias = "MadeOf | None"
    AnyPart: TypeAlias = "TensorSpec"
else:

    class AnyMadeOf(metaclass=AnyValue):
        """What a sparse, quantized or nested tensor consists of, by its kind."""

    class AnyPart(metaclass=AnyValue):
        """A tensor that is part of another one."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor argument without its values.

    Attributes
    ----------
    shape, stride : sizes and steps in elements; `stride` is None for layouts that have none, and for nested tensors,
        whose shape is the smallest that holds each of them
    dtype, layout : as torch's
    device : `cpu`, `cuda:0`
    offset : of the first element in its storage, in elements
    requires_grad : as the program had it
    storage : number shared by those arguments of one call that lie in the same memory, None where no other does
    values : number of the value model that draws this tensor's values, as `memory_dtype` reads them; None where none
        was fitted
    conj, neg : torch's lazy conjugation and negation bits
    cls : name of the tensor's class where it is not `torch.Tensor`
    pinned : whether the memory was pinned for an accelerator, at the first call of the signature
    made_of : what a sparse, quantized or nested tensor consists of; None for all others, and where it is not known
    """

    shape: Public[tuple[Count, ...]]
    stride: Public[tuple[Count, ...] | None]
    dtype: Annotated[torch.dtype, public("dtype")]
    device: Annotated[DeviceName, hashed("device")]
    layout: Public[torch.layout] = torch.strided
    offset: Public[Count] = 0
    requires_grad: Public[bool] = False
    storage: Public[Count | None] = None
    values: Public[Count | None] = None
    conj: Public[bool] = False
    neg: Public[bool] = False
    cls: Annotated[str | None, hashed("class")] = None
    pinned: Public[bool] = False
    made_of: Annotated[AnyMadeOf, NESTED] = None

    @property
    def extent(self) -> int:
        """Bytes from the start of the storage to the end of the tensor in it; 0 for a layout without strides."""
        if 0 in self.shape or self.stride is None:
            return 0
        last = self.offset + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return (last + 1) * self.dtype.itemsize

    @property
    def parts(self) -> tuple[TensorSpec, ...]:
        """The tensors that a sparse or nested one is made of."""
        match self.made_of:
            case Coo(indices, _, values):
                return (indices, values)
            case Compressed(compressed, plain, values):
                return (compressed, plain, values)
            case Nested(buffer):
                return (buffer,)
        return ()


@dataclass(frozen=True, slots=True)
class Coo:
    """A sparse tensor's elements and where they stand.

    Attributes
    ----------
    indices : (sparse dimensions, nnz) int64, without a value model
    rows : number of the value model of each row of the indices
    values : (nnz, *dense dimensions)
    coalesced : indices ascend and are distinct, and torch knows
    """

    indices: Annotated[AnyPart, NESTED]
    rows: Public[tuple[Count | None, ...]]
    values: Annotated[AnyPart, NESTED]
    coalesced: Public[bool]


@dataclass(frozen=True, slots=True)
class Compressed:
    """A sparse tensor whose elements, or blocks of them, stand row by row, or column by column.

    Attributes
    ----------
    compressed : (*batch, rows + 1), where each row begins in `plain`; its value model draws how long each row is
    plain : (*batch, nnz), the column of each element
    values : (*batch, nnz, *block, *dense dimensions)
    """

    compressed: Annotated[AnyPart, NESTED]
    plain: Annotated[AnyPart, NESTED]
    values: Annotated[AnyPart, NESTED]


@dataclass(frozen=True, slots=True)
class PerTensor:
    """Quantization of all elements alike: value = (stored - zero_point) * scale."""

    scale: Annotated[Argument, coarse("number")]
    zero_point: Annotated[Int64, coarse("number")]


@dataclass(frozen=True, slots=True)
class PerChannel:
    """Quantization with a scale and a zero point for each index of one dimension.

    Attributes
    ----------
    zero_points : whole numbers, or floats where torch calls the scheme one of float parameters
    """

    scales: Annotated[tuple[Argument, ...], coarse("number")]
    zero_points: Annotated[tuple[Argument, ...], coarse("number")]
    axis: Public[Count]


@dataclass(frozen=True, slots=True)
class Nested:
    """A list of tensors of different sizes in one piece of memory.

    Attributes
    ----------
    buffer : (elements,)
    sizes, strides : of each tensor
    offsets : of each tensor in the buffer
    """

    buffer: Annotated[AnyPart, NESTED]
    sizes: Public[tuple[tuple[Count, ...], ...]]
    strides: Public[tuple[tuple[Count, ...], ...]]
    offsets: Public[tuple[Count, ...]]


MadeOf: TypeAlias = Coo | Compressed | PerTensor | PerChannel | Nested


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a tensor whose elements lie one after the other."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """A tensor's shape; that of a nested one is the smallest that holds each of its tensors."""
    if not tensor.is_nested or tensor.layout is not torch.strided:
        return tuple(map(int, tensor.shape))
    # torch has no table of the sizes of none
    sizes = tensor._nested_tensor_size().tolist() if tensor.size(0) else []
    return bounding_shape(sizes, tensor.dim())


def bounding_shape(sizes: list[list[int]] | tuple[tuple[int, ...], ...], dimensions: int) -> tuple[int, ...]:
    """The number of tensors and the largest of their sizes in each dimension."""
    return (len(sizes), *(max((item[place] for item in sizes), default=0) for place in range(dimensions - 1)))


def memory_dtype(dtype: torch.dtype) -> torch.dtype:
    """What memory of a dtype is read and written as: torch has no values of quantized dtypes and of those of bits."""
    if _BITS.fullmatch(str(dtype)):
        return torch.uint8 if dtype.itemsize == 1 else torch.int16
    return QUANTIZED.get(dtype, dtype)


def stored_elements(spec: TensorSpec) -> int:
    """Elements that a tensor holds: of an expanded one those that differ, of a sparse or nested one its values."""
    if spec.parts:
        return prod(spec.parts[-1].shape)
    steps = spec.stride or (1,) * len(spec.shape)
    return prod(size for size, step in zip(spec.shape, steps, strict=True) if step or not size)


def value_numbers(spec: TensorSpec) -> Iterator[int | None]:
    """The numbers of all value models that a tensor refers to, its parts' included."""
    match spec.made_of:
        case Coo(_, rows, values):
            yield from (*rows, values.values)
        case Compressed() | Nested():
            yield from (part.values for part in spec.parts)
        case _:
            yield spec.values


def map_values(function: Callable[[int | None], int | None], spec: TensorSpec) -> TensorSpec:
    """The same tensor with other numbers of value models, asked for in the order of `value_numbers`."""

    def moved(part: TensorSpec) -> TensorSpec:
        return replace(part, values=function(part.values))

    match spec.made_of:
        case Coo(indices, rows, values, coalesced):
            made_of: MadeOf = Coo(indices, tuple(map(function, rows)), moved(values), coalesced)
        case Compressed(compressed, plain, values):
            made_of = Compressed(moved(compressed), moved(plain), moved(values))
        case Nested(buffer, sizes, strides, offsets):
            made_of = Nested(moved(buffer), sizes, strides, offsets)
        case _:
            return moved(spec)
    return replace(spec, made_of=made_of)


def compressed_grid(spec: TensorSpec) -> tuple[int, int]:
    """How many rows a compressed sparse tensor has, of how many blocks; columns of rows where it is by column.

    A block is one element in the layouts that have none.
    """
    assert isinstance(spec.made_of, Compressed), "the caller's business"
    plain, values = spec.made_of.plain, spec.made_of.values
    first = len(plain.shape) - 1
    height, width = spec.shape[first : first + 2]
    if spec.layout in BLOCKED:
        height, width = height // values.shape[first + 1], width // values.shape[first + 2]
    return (height, width) if spec.layout in COMPRESSES_ROWS else (width, height)
