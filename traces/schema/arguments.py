"""Arguments of a call: the values that operators take, and their form in a trace's JSON.

Values that exist in JSON (null, true, integers, finite floats, strings, lists) are written unchanged; any other value
becomes an object with one key, the name of its kind.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import lru_cache
from math import prod
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import torch

from opgrip.errors import FormatError
from opgrip.traces.schema.json_values import (
    AnyValue,
    Argument,
    Count,
    DeviceName,
    Int64,
    Json,
    check_hashes,
    convert,
    key_of,
    readers,
    writers,
)
from opgrip.traces.schema.privacy import Public, hashed, replaced
from opgrip.traces.schema.python_objects import (
    ArraySpec,
    ModuleSpec,
    NamedSpec,
    ObjectSpec,
    SameSpec,
    ScalarSpec,
    SharedSpec,
    children,
    with_children,
)
from opgrip.traces.schema.tensor_specs import (
    BLOCKED,
    COMPRESSED_LAYOUTS,
    DTYPES,
    LAYOUTS,
    MEMORY_FORMATS,
    QUANTIZED,
    AnyMadeOf,
    AnyPart,
    Compressed,
    Coo,
    MadeOf,
    Nested,
    PerChannel,
    PerTensor,
    TensorSpec,
    bounding_shape,
    compressed_grid,
    map_values,
    plain_name,
    value_numbers,
)

__all__ = [
    "DTYPES",
    "LAYOUTS",
    "MEMORY_FORMATS",
    "FormatError",
    "GeneratorSpec",
    "GroupSpec",
    "Json",
    "Opaque",
    "ReductionSpec",
    "TensorSpec",
    "decode",
    "encode",
    "leaves",
    "map_leaves",
    "numbers_of",
    "tensors",
    "with_numbers",
]


@dataclass(frozen=True, slots=True)
class GeneratorSpec:
    """A random number generator as an argument.

    seed : its initial seed
    """

    device: Annotated[DeviceName, hashed("device")]
    seed: Annotated[int, replaced("seed")]


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """The process group of a collective.

    backend : name of the backend, such as `gloo` or `nccl`
    ranks : global ranks of its members
    rank : rank of this process in the group
    """

    name: Annotated[str, hashed("text")]
    backend: Annotated[str, hashed("backend")]
    ranks: Public[tuple[Count, ...]]
    rank: Public[int]


@dataclass(frozen=True, slots=True)
class ReductionSpec:
    """The reduction of a collective, such as `SUM` or `MAX`."""

    name: Annotated[str, hashed("reduction")]


@dataclass(frozen=True, slots=True)
class Opaque:
    """An argument that a trace cannot hold, represented by the name of its type."""

    type_name: Annotated[str, hashed("type")]


def encode(value: object) -> Json:
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if type(value) is list:
        return [encode(item) for item in value]
    kind = _KIND_BY_TYPE.get(type(value))
    if kind is None:
        raise TypeError(f"a trace cannot contain an argument of type {type(value).__name__}")
    return {kind: KINDS[kind].write(value)}


def decode(form: Json) -> Any:
    if form is None or isinstance(form, bool | int | float | str):
        return form
    if isinstance(form, list):
        return [decode(item) for item in form]
    if not isinstance(form, dict) or len(form) != 1:
        raise FormatError(f"expected an argument, got {str(form)[:60]!r}")
    ((name, body),) = form.items()
    kind = KINDS.get(name)
    if kind is None:
        raise FormatError(f"unknown kind of argument: {str(name)[:60]!r}")
    try:
        return kind.read(body if kind.form is None else convert(body, kind.form, name))
    except FormatError:
        raise
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError, OverflowError) as error:
        raise FormatError(f"cannot read an argument of kind {name} ({error})") from error


def fields_form(value: Any) -> dict[str, Json]:
    """Return a dataclass as a JSON object without fields that equal their default, unless they are marked `ALWAYS`."""
    form = {}
    for name, key, default, write in _writers(type(value)):  # type: ignore[arg-type]
        item = getattr(value, name)
        if item is not default and item != default:
            form[key] = item if write is None or item is None else write(item)
    return form


Write = Callable[[Any], Json]


@lru_cache(maxsize=256)
def _writers(kind: type) -> list[tuple[str, str, Any, Write | None]]:
    hints = get_type_hints(kind)
    writers = []
    for field in fields(kind):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        default = MISSING if field.metadata.get("always") else default
        writers.append((field.name, key_of(field), default, _writer(hints[field.name])))
    return writers


def _writer(hint: Any) -> Write | None:
    if hint in (torch.dtype, torch.layout):
        return plain_name
    if is_dataclass(hint):
        return fields_form
    if isinstance(hint, AnyValue):
        return lambda value: writers[hint](value)
    inner = [argument for argument in get_args(hint) if argument not in (type(None), ...)]
    write = _writer(inner[-1]) if inner else None
    origin = get_origin(hint)
    if origin is dict:
        return None if write is None else lambda value: {key: write(item) for key, item in value.items()}
    if origin in (list, tuple):
        return list if write is None else lambda value: [write(item) for item in value]
    # for unions of several types other than None, no writer is necessary
    return write if len(inner) == 1 else None


def _parts_form(value: Any) -> Json:
    name = _NAME_OF_PARTS.get(type(value))
    return fields_form(value) if name is None else {name: fields_form(value)}


def leaves(value: object) -> Iterator[object]:
    """Yield all values in nested lists, tuples, dictionaries and objects, in order, but not these containers."""
    inner = children(value)
    if inner is None:
        yield value
    else:
        for item in inner:
            yield from leaves(item)


def tensors(value: object) -> Iterator[TensorSpec]:
    return (leaf for leaf in leaves(value) if isinstance(leaf, TensorSpec))


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    if type(value) is torch.Size or children(value) is None:
        return function(value)
    return with_children(value, lambda item: map_leaves(function, item))


def numbers_of(tree: Any) -> list[int | None]:
    return [number for spec in tensors(tree) for number in value_numbers(spec)]


def with_numbers(tree: Any, numbers: Iterable[int | None]) -> Any:
    remaining = iter(numbers)

    def numbered(leaf: Any) -> Any:
        return map_values(lambda _: next(remaining), leaf) if isinstance(leaf, TensorSpec) else leaf

    return map_leaves(numbered, tree)


class ArgumentKind(NamedTuple):
    type: type
    form: Any
    read: Callable[[Any], Any]
    write: Callable[[Any], Json]


def _fields_of(kind: type) -> ArgumentKind:
    return ArgumentKind(kind, kind, lambda value: value, fields_form)


def _only_field_of(kind: type) -> ArgumentKind:
    ((name, hint),) = get_type_hints(kind, include_extras=True).items()
    write = _writer(get_type_hints(kind)[name])
    return ArgumentKind(kind, hint, kind, lambda value: write(getattr(value, name)) if write else getattr(value, name))


def _read_tensor(body: Json) -> TensorSpec | Opaque:
    if isinstance(body, dict) and isinstance(body.get("dtype"), str) and body["dtype"] not in DTYPES:
        return Opaque(f"{body['dtype']} tensor")
    return read_tensor(body)


def _read_device(name: str) -> torch.device | Opaque:
    try:
        return torch.device(name)
    except RuntimeError:
        return Opaque(f"{name} device")


def _read_dict(entries: list[tuple[Any, Any]]) -> dict[Any, Any]:
    check_hashes([key for key, _ in entries])
    return dict(entries)


def _read_members(members: list[Any]) -> list[Any]:
    check_hashes(members)
    return members


def _read_array(spec: ArraySpec) -> ArraySpec:
    if not isinstance(spec.tensor, TensorSpec):
        raise FormatError(f"the data of an array are not a tensor but {str(spec.tensor)[:60]!r}")
    return spec


def _read_scalar(spec: ScalarSpec) -> ScalarSpec:
    if type(spec.value) not in (bool, int, float, complex):
        raise FormatError(f"expected a number, got {str(spec.value)[:60]!r}")
    return spec


def _encode_all(values: Iterable[Any]) -> list[Json]:
    return [encode(value) for value in values]


_ARRAY = _only_field_of(ArraySpec)
# kinds of arguments that JSON cannot hold unchanged, by name
KINDS: dict[str, ArgumentKind] = {
    "float": ArgumentKind(float, Literal["nan", "inf", "-inf"], float, str),
    "complex": ArgumentKind(
        complex,
        tuple[Argument, Argument],
        lambda body: complex(*body),
        lambda value: _encode_all((value.real, value.imag)),
    ),
    "tuple": ArgumentKind(tuple, tuple[Argument, ...], tuple, _encode_all),
    "dict": ArgumentKind(
        dict, list[tuple[Argument, Argument]], _read_dict, lambda value: [_encode_all(item) for item in value.items()]
    ),
    "size": ArgumentKind(torch.Size, tuple[Count, ...], torch.Size, list),
    "dtype": ArgumentKind(torch.dtype, str, lambda name: DTYPES.get(name) or Opaque(f"{name} dtype"), plain_name),
    "device": ArgumentKind(torch.device, DeviceName, _read_device, str),
    "layout": ArgumentKind(torch.layout, str, lambda name: LAYOUTS[name], plain_name),
    "memory_format": ArgumentKind(torch.memory_format, str, lambda name: MEMORY_FORMATS[name], plain_name),
    "tensor": ArgumentKind(TensorSpec, None, _read_tensor, fields_form),
    "generator": _fields_of(GeneratorSpec),
    "group": _fields_of(GroupSpec),
    "reduction": _only_field_of(ReductionSpec),
    "opaque": _only_field_of(Opaque),
    "object": _fields_of(ObjectSpec),
    "module": _fields_of(ModuleSpec),
    "numpy": _ARRAY._replace(read=lambda body: _read_array(ArraySpec(body))),
    "numpy_scalar": _fields_of(ScalarSpec)._replace(read=_read_scalar),
    "named": _only_field_of(NamedSpec),
    "shared": _fields_of(SharedSpec),
    "same": _only_field_of(SameSpec),
    "set": ArgumentKind(set, list[Argument], lambda body: set(_read_members(body)), _encode_all),
    "frozenset": ArgumentKind(frozenset, list[Argument], lambda body: frozenset(_read_members(body)), _encode_all),
    "slice": ArgumentKind(
        slice,
        tuple[int | None, int | None, int | None],
        lambda body: slice(*body),
        lambda value: _encode_all((value.start, value.stop, value.step)),
    ),
    "range": ArgumentKind(
        range,
        tuple[Int64, Int64, Int64],
        lambda body: range(*body),
        lambda value: [value.start, value.stop, value.step],
    ),
    "bytes": ArgumentKind(bytes, bytes, bytes, lambda value: base64.b64encode(value).decode("ascii")),
    "ellipsis": ArgumentKind(type(...), bool, lambda body: ..., lambda value: True),
}
_KIND_BY_TYPE = {kind.type: name for name, kind in KINDS.items()}
readers[Argument] = decode


def check_made_of(spec: TensorSpec) -> None:
    for part in spec.parts:
        _ask(
            part.layout is torch.strided and part.stride is not None,
            "a part of a sparse or nested tensor has no strides",
        )
        _ask(part.cls is None, f"a part of a sparse or nested tensor is a {part.cls}, not a plain tensor")
        _ask(
            part.device == spec.device,
            f"a sparse or nested tensor is on {spec.device}, but a part of it is on {part.device}",
        )
    match spec.made_of:
        case Coo() as coo:
            _check_coo(spec, coo)
        case Compressed() as compressed:
            _check_compressed(spec, compressed)
        case PerTensor() | PerChannel() as quantizer:
            _check_quantizer(spec, quantizer)
        case Nested() as nested:
            _check_nested(spec, nested)


def _check_coo(spec: TensorSpec, coo: Coo) -> None:
    _ask(spec.layout is torch.sparse_coo, f"a tensor of layout {spec.layout} has the indices of a sparse_coo tensor")
    _ask(
        len(coo.indices.shape) == 2 and coo.indices.dtype == torch.int64,
        "the indices of a sparse_coo tensor are not of shape (dimensions, elements) and dtype int64",
    )
    sparse, nnz = coo.indices.shape
    _ask(sparse <= len(spec.shape), f"a sparse_coo tensor has {len(spec.shape)} dimensions, but indices for {sparse}")
    _ask(len(coo.rows) == sparse, f"indices of {sparse} rows have value models for {len(coo.rows)} rows")
    _check_values(spec, coo.values, (nnz, *spec.shape[sparse:]))
    places = prod(spec.shape[:sparse])
    _ask(
        nnz <= places or (places > 0 and not coo.coalesced),
        f"a sparse_coo tensor stores {nnz} elements, but has {places} positions",
    )


def _check_compressed(spec: TensorSpec, made_of: Compressed) -> None:
    _ask(spec.layout in COMPRESSED_LAYOUTS, f"a tensor of layout {spec.layout} has compressed indices")
    compressed, plain, values = made_of.compressed, made_of.plain, made_of.values
    _ask(
        compressed.dtype == plain.dtype and plain.dtype in (torch.int32, torch.int64),
        f"compressed indices have the dtypes {compressed.dtype} and {plain.dtype}, not int32 or int64",
    )
    _ask(
        len(compressed.shape) == len(plain.shape) > 0,
        f"compressed indices have {len(compressed.shape)} and {len(plain.shape)} dimensions",
    )
    batch, nnz = plain.shape[:-1], plain.shape[-1]
    first = len(batch)
    _ask(
        spec.shape[:first] == batch == compressed.shape[:-1],
        f"a tensor of shape {spec.shape} has indices of batch {batch}",
    )
    _ask(len(spec.shape) >= first + 2, f"a tensor with compressed indices has fewer than two dimensions: {spec.shape}")
    block = values.shape[first + 1 : first + 3] if spec.layout in BLOCKED else (1, 1)
    _ask(len(block) == 2 and 0 not in block, f"a sparse tensor has blocks of the invalid size {block}")
    height, width = spec.shape[first : first + 2]
    _ask(
        height % block[0] == width % block[1] == 0, f"blocks of size {block} do not divide a matrix of {height}x{width}"
    )
    rows, columns = compressed_grid(spec)
    _ask(
        compressed.shape[-1] == rows + 1,
        f"{rows} rows or columns need {rows + 1} compressed indices, got {compressed.shape[-1]}",
    )
    _ask(nnz <= rows * columns, f"a sparse tensor stores {nnz} elements, but has {rows * columns} positions")
    dense = spec.shape[first + 2 :]
    _check_values(spec, values, (*batch, nnz, *(block if spec.layout in BLOCKED else ()), *dense))


def _check_values(spec: TensorSpec, values: TensorSpec, shape: tuple[int, ...]) -> None:
    _ask(values.shape == shape, f"expected stored values of shape {shape}, got {values.shape}")
    _ask(values.dtype == spec.dtype, f"a sparse tensor of {spec.dtype} stores values of {values.dtype}")


def _check_quantizer(spec: TensorSpec, quantizer: PerTensor | PerChannel) -> None:
    _ask(
        spec.dtype in QUANTIZED and spec.stride is not None,
        f"a tensor of dtype {spec.dtype} has a quantizer, but is not quantized",
    )
    scales = (quantizer.scale,) if isinstance(quantizer, PerTensor) else quantizer.scales
    zero_points = (quantizer.zero_point,) if isinstance(quantizer, PerTensor) else quantizer.zero_points
    _ask(all(type(scale) is float for scale in scales), "a scale of a quantized tensor is not a float")
    _ask(
        {type(zero) for zero in zero_points} in (set(), {int}, {float}),
        "zero points of a quantized tensor are neither all integers nor all floats",
    )
    bounds = torch.iinfo(QUANTIZED[spec.dtype])
    held = (isinstance(zero, float) or bounds.min <= zero <= bounds.max for zero in zero_points)
    _ask(all(held), f"a zero point of a tensor of {spec.dtype} is out of range")
    if isinstance(quantizer, PerTensor):
        return
    _ask(
        quantizer.axis < len(spec.shape),
        f"a tensor of {len(spec.shape)} dimensions is quantized along dimension {quantizer.axis}",
    )
    channels = spec.shape[quantizer.axis]
    _ask(
        len(quantizer.scales) == len(quantizer.zero_points) == channels,
        f"{channels} channels have {len(quantizer.scales)} scales and {len(quantizer.zero_points)} zero points",
    )


def _check_nested(spec: TensorSpec, nested: Nested) -> None:
    _ask(
        spec.layout is torch.strided and spec.stride is None,
        f"a tensor of layout {spec.layout} with strides is described as nested",
    )
    _ask(
        len(nested.buffer.shape) == 1 and nested.buffer.dtype == spec.dtype,
        "the buffer of a nested tensor has another dtype, or more than one dimension",
    )
    count = len(nested.sizes)
    _ask(
        len(nested.strides) == len(nested.offsets) == count,
        f"a nested tensor has {count} sizes, {len(nested.strides)} strides and {len(nested.offsets)} offsets",
    )
    dimensions = len(spec.shape) - 1
    items = zip(nested.sizes, nested.strides, nested.offsets, strict=True)
    for size, stride, offset in items:
        _ask(
            len(size) == len(stride) == dimensions,
            f"a nested tensor of {dimensions + 1} dimensions has a part of {len(size)}",
        )
        end = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True)) + 1
        _ask(0 in size or end <= nested.buffer.shape[0], "a part of a nested tensor exceeds its buffer")
    _ask(
        spec.shape == bounding_shape(nested.sizes, dimensions + 1),
        f"a nested tensor of shape {spec.shape} has parts of another total shape",
    )


def _ask(holds: bool, problem: str) -> None:
    if not holds:
        raise FormatError(problem)


def read_tensor(body: Json) -> TensorSpec:
    spec: TensorSpec = convert(body, TensorSpec)
    if spec.stride is not None and len(spec.stride) != len(spec.shape):
        raise FormatError(f"a tensor has {len(spec.shape)} dimensions and {len(spec.stride)} strides")
    check_made_of(spec)
    return spec


def _named(kind: str, values: Mapping[str, Any]) -> Callable[[Json], Any]:
    def read(name: Json) -> Any:
        if not isinstance(name, str) or name not in values:
            raise FormatError(f"unknown {kind}: {str(name)[:60]!r}")
        return values[name]

    return read


def _read_part(body: Json) -> TensorSpec:
    if isinstance(body, dict) and "made_of" in body:
        raise FormatError("a part of a sparse or nested tensor, such as its values, is itself sparse or nested")
    return read_tensor(body)


def _read_made_of(form: Json) -> MadeOf | None:
    if not isinstance(form, dict) or len(form) != 1:
        raise FormatError(f"expected a JSON object of one member, got {str(form)[:60]!r}")
    ((name, body),) = form.items()
    # a kind from a later version: the tensor cannot be created, but the rest of the trace can be read
    return convert(body, MADE_OF[name], name) if name in MADE_OF else None


MADE_OF: dict[str, type] = {
    "coo": Coo,
    "compressed": Compressed,
    "per_tensor": PerTensor,
    "per_channel": PerChannel,
    "nested": Nested,
}
readers[torch.dtype] = _named("dtype", DTYPES)
readers[torch.layout] = _named("layout", LAYOUTS)
readers[AnyMadeOf] = _read_made_of
readers[AnyPart] = _read_part
_NAME_OF_PARTS = {kind: name for name, kind in MADE_OF.items()}
writers |= {Argument: encode, AnyMadeOf: _parts_form, AnyPart: _parts_form}
