"""Metadata of tensors in a trace, and the names by which a trace refers to torch's dtypes and layouts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Annotated, TypeAlias

import torch

from opgrip.traces.schema.json_values import AnyValue, Argument, Count, DeviceName, Int64
from opgrip.traces.schema.privacy import NESTED, Public, hashed, public, replaced


def plain_name(value: object) -> str:
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
    return f"{plain_name(dtype)}[{','.join(map(str, shape))}]"


# sparse layouts that compress the indices of their rows or columns
COMPRESSED_LAYOUTS = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
COMPRESSES_ROWS = (torch.sparse_csr, torch.sparse_bsr)
BLOCKED = (torch.sparse_bsr, torch.sparse_bsc)
# integer dtype of the stored values, by quantized dtype
QUANTIZED: dict[torch.dtype, torch.dtype] = {
    torch.quint8: torch.uint8,
    torch.qint8: torch.int8,
    torch.qint32: torch.int32,
    torch.quint4x2: torch.uint8,
    torch.quint2x4: torch.uint8,
}
PACKED = (torch.quint4x2, torch.quint2x4)  # quantized dtypes with several elements per byte

# class name of a `TensorSpec` for a storage, which is described as the tensor (N,) uint8 over all of it
STORAGE = "torch.UntypedStorage"

_BITS = re.compile(r"torch\.(bits\d.*|u?int[1-7]|float4.*)")


if TYPE_CHECKING:
    AnyMadeOf: TypeAlias = "MadeOf | None"
    AnyPart: TypeAlias = "TensorSpec"
else:

    class AnyMadeOf(metaclass=AnyValue):
        pass

    class AnyPart(metaclass=AnyValue):
        pass


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor argument without its values.

    shape, stride : sizes, and strides in elements; `stride` is None for layouts without strides and for nested tensors,
        whose shape is the smallest one that contains each of their tensors
    device : name of the device, such as `cpu` or `cuda:0`
    offset : offset of the first element in the storage, in elements
    requires_grad : True if the program required its gradient
    storage : number that is equal for arguments of a call that share memory; None if the memory is not shared
    values : number of the value model from which values are drawn
    conj, neg : torch's lazy conjugation and negation bits
    cls : class name of the tensor if the class has a `__torch_dispatch__`; `torch.UntypedStorage` for a storage
    pinned : True if the memory was pinned for an accelerator at the first call of the signature
    made_of : parts of a sparse, quantized or nested tensor
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
        """Number of bytes from the storage's start to the end of the tensor's last element in memory."""
        if 0 in self.shape or self.stride is None:
            return 0
        last = self.offset + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return (last + 1) * self.dtype.itemsize

    @property
    def parts(self) -> tuple[TensorSpec, ...]:
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
    """The parts of a sparse tensor in coordinate format (COO): its elements and their positions.

    indices : (sparse dimensions, nnz) int64, without a value model
    rows : number of the value model of each row of the indices
    values : (nnz, *dense dimensions), the elements
    coalesced : True if torch has marked the tensor as coalesced, with ascending and distinct indices
    """

    indices: Annotated[AnyPart, NESTED]
    rows: Public[tuple[Count | None, ...]]
    values: Annotated[AnyPart, NESTED]
    coalesced: Public[bool]


@dataclass(frozen=True, slots=True)
class Compressed:
    """The parts of a sparse tensor in a compressed format such as CSR, which stores its elements or blocks row by row.

    In layouts that are compressed by column, columns take the place of rows.

    compressed : (*batch, rows + 1), start of each row in `plain`
    plain : (*batch, nnz), column of each element
    values : (*batch, nnz, *block, *dense dimensions), the elements
    """

    compressed: Annotated[AnyPart, NESTED]
    plain: Annotated[AnyPart, NESTED]
    values: Annotated[AnyPart, NESTED]


@dataclass(frozen=True, slots=True)
class PerTensor:
    """A tensor's quantization with the same parameters for all elements: value = (stored - zero_point) * scale."""

    scale: Annotated[Argument, replaced("number")]
    zero_point: Annotated[Int64, replaced("number")]


@dataclass(frozen=True, slots=True)
class PerChannel:
    """A tensor's quantization with a scale and a zero point for each index of dimension `axis`.

    zero_points : integers, or floats for torch's scheme `per_channel_affine_float_qparams`
    """

    scales: Annotated[tuple[Argument, ...], replaced("number")]
    zero_points: Annotated[tuple[Argument, ...], replaced("number")]
    axis: Public[Count]


@dataclass(frozen=True, slots=True)
class Nested:
    """The parts of a nested tensor: a list of tensors of different sizes in one buffer.

    buffer : (elements,)
    sizes, strides : sizes and strides of each tensor in the list
    offsets : offset of each tensor in the buffer
    """

    buffer: Annotated[AnyPart, NESTED]
    sizes: Public[tuple[tuple[Count, ...], ...]]
    strides: Public[tuple[tuple[Count, ...], ...]]
    offsets: Public[tuple[Count, ...]]


MadeOf: TypeAlias = Coo | Compressed | PerTensor | PerChannel | Nested


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    if not tensor.is_nested or tensor.layout is not torch.strided:
        return tuple(map(int, tensor.shape))
    # torch has no table of sizes for an empty nested tensor
    sizes = tensor._nested_tensor_size().tolist() if tensor.size(0) else []
    return bounding_shape(sizes, tensor.dim())


def bounding_shape(sizes: list[list[int]] | tuple[tuple[int, ...], ...], dimensions: int) -> tuple[int, ...]:
    """Return the shape of a nested tensor: the number of its tensors, and their largest size in each dimension."""
    return (len(sizes), *(max((item[place] for item in sizes), default=0) for place in range(dimensions - 1)))


def memory_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return a dtype with which a tensor's memory can be accessed, such as an integer dtype for a quantized one."""
    if _BITS.fullmatch(str(dtype)):
        return torch.uint8 if dtype.itemsize == 1 else torch.int16
    return QUANTIZED.get(dtype, dtype)


def stored_elements(spec: TensorSpec) -> int:
    """Return the number of a tensor's elements in memory; an expanded dimension counts once."""
    if spec.parts:
        return prod(spec.parts[-1].shape)
    steps = spec.stride or (1,) * len(spec.shape)
    return prod(size for size, step in zip(spec.shape, steps, strict=True) if step or not size)


def value_numbers(spec: TensorSpec) -> Iterator[int | None]:
    match spec.made_of:
        case Coo(_, rows, values):
            yield from (*rows, values.values)
        case Compressed() | Nested():
            yield from (part.values for part in spec.parts)
        case _:
            yield spec.values


def map_values(function: Callable[[int | None], int | None], spec: TensorSpec) -> TensorSpec:
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
    """Return the number of compressed rows (or columns) of a sparse tensor, and the number of blocks in each."""
    assert isinstance(spec.made_of, Compressed), "the tensor has a compressed layout"
    plain, values = spec.made_of.plain, spec.made_of.values
    first = len(plain.shape) - 1
    height, width = spec.shape[first : first + 2]
    if spec.layout in BLOCKED:
        height, width = height // values.shape[first + 1], width // values.shape[first + 2]
    return (height, width) if spec.layout in COMPRESSES_ROWS else (width, height)
