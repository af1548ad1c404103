"""Identity of calls: the key by which a call is looked up, and the signature that is created for a new key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch

from opgrip.capture.signatures.layouts import (
    FitValues,
    bytes_of,
    describe_group,
    describe_made_of,
    describe_script_object,
    is_group,
    is_pinned,
    take_apart,
    unpack,
)
from opgrip.capture.torch_compat.torch_private import is_plain, storage_address, without_functions, without_modes
from opgrip.traces.schema.arguments import GeneratorSpec, Opaque, TensorSpec
from opgrip.traces.schema.python_objects import (
    BRANCHES,
    NamedSpec,
    SameSpec,
    ScalarSpec,
    children,
    outline,
    with_children,
)
from opgrip.traces.schema.tensor_specs import PACKED, QUANTIZED, STORAGE, memory_dtype, shape_of

_BY_VALUE = frozenset({bool, int, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})
_SIMPLE_BASES = (bool, int, float, complex, str)
# types of arguments that only Python functions take and that are recorded unchanged
_AS_THEY_ARE = (*(ScalarSpec, NamedSpec, SameSpec, Opaque), *(set, frozenset, slice, range, bytes, type(...)))
_KEYS = _BY_VALUE | {float, tuple, bytes, torch.Size}  # types that are allowed as dictionary keys
_STRIDED = torch.strided


def call_key(op: Hashable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the key by which the signature of a call is looked up."""
    parts: list[Any] = [op]
    tensors: list[torch.Tensor] = []
    _add_all(parts, tensors, args)
    for name, value in kwargs.items():
        parts.append(name)
        _add_all(parts, tensors, (value,))
    if len(tensors) > 1:
        storages = [storage_address(tensor) for tensor in tensors]
        if len(set(storages)) != len(storages):
            parts.append(tuple(map(storages.index, storages)))
    return tuple(parts)


def _add_all(parts: list[Any], tensors: list[torch.Tensor], values: Iterable[Any]) -> None:
    # the most frequent types come first, because this runs for every lookup
    for value in values:
        kind = type(value)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            dtype = value.dtype
            if value.layout is _STRIDED and dtype not in QUANTIZED and not value.is_nested:
                tensors.append(value)
                parts += (kind, value.shape, value.stride(), dtype, value.device, value.requires_grad)
                parts += (value.storage_offset(), value.is_conj(), value.is_neg())
            else:
                _add_unusual_tensor(parts, tensors, value)
        elif kind in _BY_VALUE:
            parts += (kind, value)
        elif kind is float:
            # nan is not equal to itself, and -0.0 is equal to 0.0
            parts += (kind, value if value and value == value else repr(value))
        elif kind is list or kind is tuple:
            parts += (kind, len(value))
            _add_all(parts, tensors, value)
        else:
            _add_unusual(parts, tensors, value)


def _add_unusual(parts: list[Any], tensors: list[torch.Tensor], value: Any) -> None:
    kind = type(value)
    if isinstance(value, torch.Tensor):
        _add_unusual_tensor(parts, tensors, value)
    elif isinstance(value, list | tuple):
        parts += (kind, len(value))
        _add_all(parts, tensors, value)
    elif isinstance(value, dict):
        parts += (kind, len(value), *value)
        _add_all(parts, tensors, value.values())
    elif isinstance(value, torch.Generator):
        parts += (kind, value.device, value.initial_seed())
    elif isinstance(value, np.generic):
        _add_all(parts, tensors, (value.item(),))
    elif isinstance(value, _SIMPLE_BASES):
        parts += (kind, repr(value))
    elif isinstance(value, torch.UntypedStorage):
        parts.append(kind)
        _add_all(parts, tensors, (bytes_of(value),))
    elif isinstance(value, torch.ScriptObject):
        parts += (kind, _outline(value)[0])
    elif isinstance(value, BRANCHES):
        parts += (kind, *outline(value))
        _add_all(parts, tensors, children(value) or ())
    elif isinstance(value, _AS_THEY_ARE):
        parts += (kind, repr(value))
    elif is_group(value):
        parts += (kind, describe_group(value))
    else:
        parts.append(kind)


MOST_OUTLINES = 256  # maximum number of custom objects that are kept alive with their keys
_outlines: dict[int, tuple[torch.ScriptObject, Hashable, int]] = {}


def _outline(value: torch.ScriptObject) -> tuple[Hashable, int]:
    # Unpacking copies weights. Objects are identified by address, and kept alive so that no other gets the address.
    cached = _outlines.get(hash(value))
    if cached is not None:
        return cached[1:]
    unpacked = unpack(value)
    if unpacked is None:
        return describe_script_object(value), 0
    outline = call_key(unpacked.cls, unpacked.content, {}), len(tensors_in(unpacked.content))
    if len(_outlines) >= MOST_OUTLINES:
        _outlines.clear()
    _outlines[hash(value)] = value, *outline
    return outline


def forget_outlines() -> None:
    """Empty the cache of descriptions of script objects, and release these objects."""
    _outlines.clear()


def _add_unusual_tensor(parts: list[Any], tensors: list[torch.Tensor], value: torch.Tensor) -> None:
    layout = value.layout
    parts += (type(value), value.dtype, value.device, layout, value.requires_grad)
    made_of, facts = take_apart(value)
    parts += facts
    _add_all(parts, tensors, made_of)
    if value.is_nested:
        return
    parts.append(value.shape)
    if layout is torch.strided:
        tensors.append(value)
        parts += (value.stride(), value.storage_offset(), value.is_conj(), value.is_neg())


def describe_call(
    args: Sequence[Any], kwargs: Mapping[str, Any], fit_for: Callable[[int | str], FitValues]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the specs (descriptions in the trace) of a call's arguments.

    fit_for : takes the position or keyword of an argument; returns a function that numbers a tensor's value model
    """
    if torch.ScriptObject in map(type, (*args, *kwargs.values())):
        args = tuple(_unpacked(value) for value in args)
        kwargs = {name: _unpacked(value) for name, value in kwargs.items()}
    groups = _sharing(tensors_in((*args, *kwargs.values())))
    described_args = tuple(_describe(value, groups, fit_for(place)) for place, value in enumerate(args))
    return described_args, {str(name): _describe(value, groups, fit_for(name)) for name, value in kwargs.items()}


def _unpacked(value: Any) -> Any:
    unpacked = unpack(value) if isinstance(value, torch.ScriptObject) else None
    return value if unpacked is None else unpacked


def describe_result(result: Any) -> Any:
    return _describe(result, {}, lambda tensor: None)


@cache
def _without_storage() -> torch.Tensor:
    with without_modes(), without_functions():
        return torch.empty(0, layout=torch.sparse_coo, device="cpu")


def argument_tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    values = (*args, *kwargs.values())
    if torch.ScriptObject in map(type, values):
        return tensors_in(
            [_without_storage()] * _outline(value)[1] if type(value) is torch.ScriptObject else value
            for value in values
        )
    return tensors_in(values)


def names_meta(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    values = (*args, *kwargs.values())
    return torch.device in map(type, values) and any(
        type(value) is torch.device and value.type == "meta" for value in values
    )


def tensors_in(values: Iterable[Any]) -> list[torch.Tensor]:
    """Return all tensors in arguments or results, in order; a storage counts as a tensor of its bytes."""
    tensors: list[torch.Tensor] = []
    _collect(tensors, values)
    return tensors


def _collect(tensors: list[torch.Tensor], values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif type(value) in _BY_VALUE:
            continue
        elif isinstance(value, list | tuple):
            _collect(tensors, value)
        elif isinstance(value, dict):
            _collect(tensors, value.values())
        elif isinstance(value, BRANCHES):
            _collect(tensors, children(value) or ())
        elif isinstance(value, torch.UntypedStorage):
            tensors.append(bytes_of(value))


def _sharing(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    counts: Counter[int] = Counter()
    for tensor in tensors:
        made_of, _ = ((), ()) if _is_memory(tensor) else take_apart(tensor)
        counts.update(map(storage_address, made_of))
        if _is_memory(tensor):
            counts[storage_address(tensor)] += 1
    return {address: number for number, address in enumerate(filter(lambda item: counts[item] > 1, counts))}


def _is_memory(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def _describe(value: Any, groups: Mapping[int, int], fit: FitValues) -> Any:
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return _describe_tensor(value, groups, fit)
    if kind in _BY_VALUE or kind in (float, complex):
        return value
    if kind is torch.Size:
        return value
    if isinstance(value, tuple):
        return tuple(_describe(item, groups, fit) for item in value)
    if isinstance(value, list):
        return [_describe(item, groups, fit) for item in value]
    if isinstance(value, dict) and all(type(name) in _KEYS for name in value):
        return {name: _describe(item, groups, fit) for name, item in value.items()}
    if isinstance(value, BRANCHES):
        return with_children(value, lambda item: _describe(item, groups, fit))
    if isinstance(value, _AS_THEY_ARE):
        return value
    if isinstance(value, torch.Generator):
        return GeneratorSpec(str(value.device), value.initial_seed())
    if isinstance(value, np.generic):
        return _describe(value.item(), groups, fit)
    if isinstance(value, torch.UntypedStorage):
        described = _describe_tensor(bytes_of(value), groups, lambda tensor: None)
        return described if isinstance(described, Opaque) else replace(described, cls=STORAGE)
    if isinstance(value, torch.ScriptObject):
        return describe_script_object(value)
    if is_group(value):
        return describe_group(value)
    for base in _SIMPLE_BASES:
        # for example enumerations, which an operator uses as their number or text
        if isinstance(value, base):
            return base(value)  # type: ignore[arg-type]
    return Opaque(f"{kind.__module__}.{kind.__qualname__}")


def _describe_tensor(tensor: torch.Tensor, groups: Mapping[int, int], fit: FitValues) -> TensorSpec | Opaque:
    plain, memory = is_plain(type(tensor)), _is_memory(tensor)
    if tensor.is_nested and not (plain and tensor.layout is torch.strided):
        # its sizes are not integers
        return Opaque("nested tensor")
    return TensorSpec(
        shape=shape_of(tensor),
        stride=tuple(map(int, tensor.stride())) if memory else None,
        dtype=tensor.dtype,
        device=str(tensor.device),
        layout=tensor.layout,
        offset=int(tensor.storage_offset()) if memory else 0,
        requires_grad=tensor.requires_grad,
        storage=groups.get(storage_address(tensor)) if memory and groups else None,
        values=_fit_values(tensor, fit) if memory and plain and not tensor.is_meta else None,
        conj=tensor.is_conj() if memory else False,
        neg=tensor.is_neg() if memory else False,
        cls=None if plain else type(tensor).__qualname__,
        pinned=memory and plain and is_pinned(tensor),
        made_of=describe_made_of(tensor, lambda part, fit: _describe_part(part, groups, fit), fit),
    )


def _describe_part(part: torch.Tensor, groups: Mapping[int, int], fit: FitValues) -> TensorSpec:
    described = _describe_tensor(part, groups, fit)
    assert isinstance(described, TensorSpec), "parts are plain"
    # only the whole tensor requires a gradient
    return replace(described, requires_grad=False)


def _fit_values(tensor: torch.Tensor, fit: FitValues) -> int | None:
    if tensor.is_quantized:
        return None if tensor.dtype in PACKED else fit(tensor.int_repr())
    dtype = memory_dtype(tensor.dtype)
    return fit(tensor if dtype is tensor.dtype else tensor.view(dtype))
