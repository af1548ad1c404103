"""Arguments of a call: the values that operators take, and their form in a trace's JSON.

Every value survives the round trip exactly: `decode(encode(value))` equals `value`, with the same types. What JSON
has of its own (null, true, integers, finite floats, strings, lists) stands as it is; all else is an object of one key
that names its kind.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import torch

Json: TypeAlias = Any

LAYOUTS: dict[str, torch.layout] = {
    name: layout for name in dir(torch) if isinstance(layout := getattr(torch, name), torch.layout)
}
MEMORY_FORMATS: dict[str, torch.memory_format] = {
    name: layout for name in dir(torch) if isinstance(layout := getattr(torch, name), torch.memory_format)
}
DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for name in dir(torch)
    if isinstance(dtype := getattr(torch, name), torch.dtype)
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor argument without its values.

    Attributes
    ----------
    shape, stride : sizes and steps in elements; `stride` is None for layouts that have none
    dtype, layout : as torch's
    device : `cpu`, `cuda:0`
    offset : of the first element in its storage, in elements
    requires_grad : as the program had it
    storage : number shared by those arguments of one call that lie in the same memory, None where no other does
    values : number of the value model that draws this tensor's values, None where none was fitted
    conj, neg : torch's lazy conjugation and negation bits
    cls : name of the tensor's class where it is not `torch.Tensor`
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    dtype: torch.dtype
    device: str
    layout: torch.layout = torch.strided
    offset: int = 0
    requires_grad: bool = False
    storage: int | None = None
    values: int | None = None
    conj: bool = False
    neg: bool = False
    cls: str | None = None

    @property
    def extent(self) -> int:
        """Bytes from the start of the storage to the end of the tensor in it; 0 for a layout without strides."""
        if 0 in self.shape or self.stride is None:
            return 0
        last = self.offset + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return (last + 1) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class GeneratorSpec:
    """A random number generator argument: its device and the seed that it was started from."""

    device: str
    seed: int


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """A group of processes that a collective runs in.

    Attributes
    ----------
    backend : such as `gloo` or `nccl`
    ranks : of its members in the whole program
    rank : of this process in the group
    """

    name: str
    backend: str
    ranks: tuple[int, ...]
    rank: int


@dataclass(frozen=True, slots=True)
class ReductionSpec:
    """What a collective reduces by: `SUM`, `MAX`, ..."""

    name: str


@dataclass(frozen=True, slots=True)
class Opaque:
    """An argument that a trace cannot hold, by the name of its type."""

    type_name: str


class FormatError(ValueError):
    """A record that does not have the form that the format asks for."""


def encode(value: object) -> Json:
    """The JSON form of an argument.

    Raises
    ------
    TypeError : for a type that is not an argument; wrap such values in `Opaque`
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": str(value)}
    encoder = _ENCODERS.get(type(value))
    if encoder is None:
        raise TypeError(f"{type(value).__name__} is not an argument that a trace can hold")
    return encoder(value)


def decode(form: Json) -> Any:
    """The argument that `encode` gave this form.

    Raises
    ------
    FormatError : for a form that no argument has
    """
    if form is None or isinstance(form, bool | int | float | str):
        return form
    if isinstance(form, list):
        return [decode(item) for item in form]
    if not isinstance(form, dict) or len(form) != 1:
        raise FormatError(f"{str(form)[:60]} is not an argument")
    (kind, body), *_ = form.items()
    decoder = _DECODERS.get(kind)
    if decoder is None:
        raise FormatError(f"an argument of unknown kind {str(kind)[:60]!r}")
    try:
        return decoder(body)
    except FormatError:
        raise
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError, OverflowError) as error:
        raise FormatError(f"a {kind} argument that cannot be read ({error})") from error


def leaves(value: object) -> Iterator[object]:
    """All values in a tree of lists, tuples and dictionaries, in order."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from leaves(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from leaves(item)
    else:
        yield value


def tensors(value: object) -> Iterator[TensorSpec]:
    """The tensor arguments in a tree of arguments, in order."""
    return (leaf for leaf in leaves(value) if isinstance(leaf, TensorSpec))


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """The same tree with `function` applied to every leaf."""
    if isinstance(value, list):
        return [map_leaves(function, item) for item in value]
    if isinstance(value, tuple) and type(value) is not torch.Size:
        return tuple(map_leaves(function, item) for item in value)
    if isinstance(value, dict):
        return {key: map_leaves(function, item) for key, item in value.items()}
    return function(value)


def _encode_tensor(spec: TensorSpec) -> Json:
    form: dict[str, Json] = {
        "shape": list(spec.shape),
        "stride": None if spec.stride is None else list(spec.stride),
        "dtype": _plain_name(spec.dtype),
        "device": spec.device,
    }
    for field in _OPTIONAL:
        value = getattr(spec, field.name)
        if value != field.default:
            form[field.name] = _plain_name(value) if field.name == "layout" else value
    return {"tensor": form}


def _decode_tensor(body: Mapping[str, Json]) -> TensorSpec | Opaque:
    if body["dtype"] not in DTYPES:
        return Opaque(f"{body['dtype']} tensor")
    optional = {field.name: body[field.name] for field in _OPTIONAL if field.name in body}
    if "layout" in optional:
        optional["layout"] = LAYOUTS[optional["layout"]]
    shape = _sizes(body["shape"])
    stride = None if body["stride"] is None else _sizes(body["stride"])
    if stride is not None and len(stride) != len(shape):
        raise FormatError(f"a tensor of {len(shape)} dimensions and {len(stride)} strides")
    return TensorSpec(
        shape=shape,
        stride=stride,
        dtype=DTYPES[body["dtype"]],
        device=_device_name(body["device"]),
        **optional,
    )


def _sizes(body: Json) -> tuple[int, ...]:
    if not isinstance(body, list) or any(type(size) is not int or size < 0 for size in body):
        raise FormatError(f"{str(body)[:60]} is not a list of sizes")
    return tuple(body)


def _device_name(body: Json) -> str:
    # not checked against this torch: a trace of a device that this machine lacks still loads
    if not isinstance(body, str) or not re.fullmatch(r"[a-z_]+[0-9]*(:[0-9]+)?", body):
        raise FormatError(f"{str(body)[:60]!r} is not a device")
    return body


def _decode_device(body: Json) -> torch.device | Opaque:
    try:
        return torch.device(_device_name(body))
    except RuntimeError:
        return Opaque(f"{body} device")


def _decode_float(body: str) -> float:
    if body not in ("nan", "inf", "-inf"):
        raise FormatError(f"{body!r} is not one of nan, inf, -inf")
    return float(body)


def _decode_complex(body: list[Json]) -> complex:
    real, imaginary = body
    return complex(decode(real), decode(imaginary))


def _decode_generator(body: Mapping[str, Json]) -> GeneratorSpec:
    return GeneratorSpec(_device_name(body["device"]), int(body["seed"]))


def _encode_group(group: GroupSpec) -> Json:
    form = {"name": group.name, "backend": group.backend, "ranks": list(group.ranks), "rank": group.rank}
    return {"group": form}


def _decode_group(body: Mapping[str, Json]) -> GroupSpec:
    return GroupSpec(str(body["name"]), str(body["backend"]), _sizes(body["ranks"]), int(body["rank"]))


def _plain_name(value: object) -> str:
    return str(value).removeprefix("torch.")


_OPTIONAL = [field for field in fields(TensorSpec) if field.name not in ("shape", "stride", "dtype", "device")]

_ENCODERS: dict[type, Callable[[Any], Json]] = {
    complex: lambda value: {"complex": [encode(value.real), encode(value.imag)]},
    list: lambda value: [encode(item) for item in value],
    tuple: lambda value: {"tuple": [encode(item) for item in value]},
    dict: lambda value: {"dict": [[encode(key), encode(item)] for key, item in value.items()]},
    torch.Size: lambda value: {"size": list(value)},
    torch.dtype: lambda value: {"dtype": _plain_name(value)},
    torch.device: lambda value: {"device": str(value)},
    torch.layout: lambda value: {"layout": _plain_name(value)},
    torch.memory_format: lambda value: {"memory_format": _plain_name(value)},
    TensorSpec: _encode_tensor,
    GeneratorSpec: lambda value: {"generator": {"device": value.device, "seed": value.seed}},
    GroupSpec: _encode_group,
    ReductionSpec: lambda value: {"reduction": value.name},
    Opaque: lambda value: {"opaque": value.type_name},
}

_DECODERS: dict[str, Callable[[Any], Any]] = {
    "float": _decode_float,
    "complex": _decode_complex,
    "tuple": lambda body: tuple(decode(item) for item in body),
    "dict": lambda body: {decode(key): decode(item) for key, item in body},
    "size": lambda body: torch.Size(_sizes(body)),
    "dtype": lambda body: DTYPES.get(body) or Opaque(f"{body} dtype"),
    "device": _decode_device,
    "layout": lambda body: LAYOUTS[body],
    "memory_format": lambda body: MEMORY_FORMATS[body],
    "tensor": _decode_tensor,
    "generator": _decode_generator,
    "group": _decode_group,
    "reduction": lambda body: ReductionSpec(str(body)),
    "opaque": lambda body: Opaque(str(body)),
}
