"""Arguments of a call: the values that operators take, and their form in a trace's JSON.

Every value survives the round trip exactly: `decode(encode(value))` equals `value`, with the same types. What JSON
has of its own (null, true, integers, finite floats, strings, lists) stands as it is; all else is an object of one key
that names its kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch

from opgrip.errors import FormatError
from opgrip.traces.schema.limits import check_hashes
from opgrip.traces.schema.privacy import Public, coarse, hashed
from opgrip.traces.schema.python_objects import children, object_decoders, object_encoders, with_children
from opgrip.traces.schema.tensor_forms import tensor_form, tensor_of
from opgrip.traces.schema.tensor_specs import (
    DTYPES,
    LAYOUTS,
    MEMORY_FORMATS,
    Json,
    TensorSpec,
    device_name,
    map_values,
    plain_name,
    sizes,
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
    """A random number generator argument: its device and the seed that it was started from."""

    device: Annotated[str, hashed("device")]
    seed: Annotated[int, coarse("seed")]


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """A group of processes that a collective runs in.

    Attributes
    ----------
    backend : such as `gloo` or `nccl`
    ranks : of its members in the whole program
    rank : of this process in the group
    """

    name: Annotated[str, hashed("text")]
    backend: Annotated[str, hashed("backend")]
    ranks: Public[tuple[int, ...]]
    rank: Public[int]


@dataclass(frozen=True, slots=True)
class ReductionSpec:
    """What a collective reduces by: `SUM`, `MAX`, ..."""

    name: Annotated[str, hashed("reduction")]


@dataclass(frozen=True, slots=True)
class Opaque:
    """An argument that a trace cannot hold, by the name of its type."""

    type_name: Annotated[str, hashed("type")]


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
    """All values in a tree of lists, tuples, dictionaries and objects, in order."""
    inner = children(value)
    if inner is None:
        yield value
    else:
        for item in inner:
            yield from leaves(item)


def tensors(value: object) -> Iterator[TensorSpec]:
    """The tensor arguments in a tree of arguments, in order."""
    return (leaf for leaf in leaves(value) if isinstance(leaf, TensorSpec))


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """The same tree with `function` applied to every leaf."""
    if type(value) is torch.Size or children(value) is None:
        return function(value)
    return with_children(value, lambda item: map_leaves(function, item))


def numbers_of(tree: Any) -> list[int | None]:
    """The numbers of the value models that the tensors in a tree of arguments refer to, in their order."""
    return [number for spec in tensors(tree) for number in value_numbers(spec)]


def with_numbers(tree: Any, numbers: Iterable[int | None]) -> Any:
    """The same tree with other numbers of value models, in the order of `numbers_of`."""
    remaining = iter(numbers)

    def numbered(leaf: Any) -> Any:
        return map_values(lambda _: next(remaining), leaf) if isinstance(leaf, TensorSpec) else leaf

    return map_leaves(numbered, tree)


def _decode_tensor(body: Mapping[str, Json]) -> TensorSpec | Opaque:
    if body["dtype"] not in DTYPES:
        return Opaque(f"{body['dtype']} tensor")
    return tensor_of(body)


def _decode_device(body: Json) -> torch.device | Opaque:
    try:
        return torch.device(device_name(body))
    except RuntimeError:
        return Opaque(f"{body} device")


def _decode_float(body: str) -> float:
    if body not in ("nan", "inf", "-inf"):
        raise FormatError(f"{body!r} is not one of nan, inf, -inf")
    return float(body)


def _decode_complex(body: list[Json]) -> complex:
    real, imaginary = body
    return complex(decode(real), decode(imaginary))


def _decode_dict(body: list[Json]) -> dict[Any, Any]:
    entries = [(decode(key), decode(item)) for key, item in body]
    check_hashes([key for key, _ in entries])
    return dict(entries)


def _decode_generator(body: Mapping[str, Json]) -> GeneratorSpec:
    return GeneratorSpec(device_name(body["device"]), int(body["seed"]))


def _encode_group(group: GroupSpec) -> Json:
    form = {"name": group.name, "backend": group.backend, "ranks": list(group.ranks), "rank": group.rank}
    return {"group": form}


def _decode_group(body: Mapping[str, Json]) -> GroupSpec:
    return GroupSpec(str(body["name"]), str(body["backend"]), sizes(body["ranks"]), int(body["rank"]))


_ENCODERS: dict[type, Callable[[Any], Json]] = {
    complex: lambda value: {"complex": [encode(value.real), encode(value.imag)]},
    list: lambda value: [encode(item) for item in value],
    tuple: lambda value: {"tuple": [encode(item) for item in value]},
    dict: lambda value: {"dict": [[encode(key), encode(item)] for key, item in value.items()]},
    torch.Size: lambda value: {"size": list(value)},
    torch.dtype: lambda value: {"dtype": plain_name(value)},
    torch.device: lambda value: {"device": str(value)},
    torch.layout: lambda value: {"layout": plain_name(value)},
    torch.memory_format: lambda value: {"memory_format": plain_name(value)},
    TensorSpec: lambda value: {"tensor": tensor_form(value)},
    GeneratorSpec: lambda value: {"generator": {"device": value.device, "seed": value.seed}},
    GroupSpec: _encode_group,
    ReductionSpec: lambda value: {"reduction": value.name},
    Opaque: lambda value: {"opaque": value.type_name},
    **object_encoders(encode),
}

_DECODERS: dict[str, Callable[[Any], Any]] = {
    "float": _decode_float,
    "complex": _decode_complex,
    "tuple": lambda body: tuple(decode(item) for item in body),
    "dict": _decode_dict,
    "size": lambda body: torch.Size(sizes(body)),
    "dtype": lambda body: DTYPES.get(body) or Opaque(f"{body} dtype"),
    "device": _decode_device,
    "layout": lambda body: LAYOUTS[body],
    "memory_format": lambda body: MEMORY_FORMATS[body],
    "tensor": _decode_tensor,
    "generator": _decode_generator,
    "group": _decode_group,
    "reduction": lambda body: ReductionSpec(str(body)),
    "opaque": lambda body: Opaque(str(body)),
    **object_decoders(decode),
}
