"""What makes two calls the same: the key that a call is looked up by, and the signature made where it is new.

The key is built at every call, the signature once. A key holds, for every argument, what a signature would hold, as
hashable values with their types, since 1, 1.0 and True are equal to Python and different to an operator.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from opgrip.capture.collectives import describe_script_object
from opgrip.capture.torch_private import storage_address
from opgrip.traces.arguments import GeneratorSpec, Opaque, TensorSpec

FitValues = Callable[[torch.Tensor], int | None]

_BY_VALUE = frozenset({bool, int, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})
_SIMPLE_BASES = (bool, int, float, complex, str)


def call_key(op: Hashable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The key of a call: equal for two calls just when their signatures are."""
    parts: list[Any] = [op]
    found: list[torch.Tensor] = []
    _add_all(parts, found, args)
    for name, value in kwargs.items():
        parts.append(name)
        _add_all(parts, found, (value,))
    if len(found) > 1:
        storages = [storage_address(tensor) for tensor in found]
        if len(set(storages)) != len(storages):
            parts.append(tuple(map(storages.index, storages)))
    return tuple(parts)


def _add_all(parts: list[Any], found: list[torch.Tensor], values: Iterable[Any]) -> None:
    # the kinds that operators take most often first: this is run for every call
    for value in values:
        kind = type(value)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            if value.layout is torch.strided and not value.is_nested:
                found.append(value)
                parts += (
                    *(kind, value.shape, value.stride(), value.dtype, value.device, value.requires_grad),
                    *(value.storage_offset(), value.is_conj(), value.is_neg()),
                )
            else:
                _add_unusual_tensor(parts, found, value)
        elif kind in _BY_VALUE:
            parts += (kind, value)
        elif kind is float:
            # nan is not equal to itself, and -0.0 is equal to 0.0
            parts += (kind, value if value and value == value else repr(value))
        elif kind is list or kind is tuple:
            parts += (kind, len(value))
            _add_all(parts, found, value)
        else:
            _add_unusual(parts, found, value)


def _add_unusual(parts: list[Any], found: list[torch.Tensor], value: Any) -> None:
    kind = type(value)
    if isinstance(value, torch.Tensor):
        _add_unusual_tensor(parts, found, value)
    elif isinstance(value, list | tuple):
        parts += (kind, len(value))
        _add_all(parts, found, value)
    elif isinstance(value, dict):
        parts += (kind, len(value), *value)
        _add_all(parts, found, value.values())
    elif isinstance(value, torch.Generator):
        parts += (kind, value.device, value.initial_seed())
    elif isinstance(value, np.generic):
        _add_all(parts, found, (value.item(),))
    elif isinstance(value, _SIMPLE_BASES):
        parts += (kind, repr(value))
    elif isinstance(value, torch.ScriptObject):
        parts += (kind, describe_script_object(value))
    else:
        parts.append(kind)


def _add_unusual_tensor(parts: list[Any], found: list[torch.Tensor], value: torch.Tensor) -> None:
    layout = value.layout
    parts += (type(value), value.dtype, value.device, layout, value.requires_grad)
    if value.is_nested:
        return
    parts.append(value.shape)
    if layout is torch.strided:
        found.append(value)
        parts += (value.stride(), value.storage_offset(), value.is_conj(), value.is_neg())


def describe_call(
    args: Sequence[Any], kwargs: Mapping[str, Any], fit: FitValues
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call as a signature holds them.

    Parameters
    ----------
    fit : gives the number of the value model of a tensor, or None
    """
    groups = _sharing(tensors_in((*args, *kwargs.values())))
    described_args = tuple(_describe(value, groups, fit) for value in args)
    return described_args, {str(name): _describe(value, groups, fit) for name, value in kwargs.items()}


def describe_result(result: Any) -> Any:
    """What a call returned, in the same form, without values."""
    return _describe(result, {}, lambda tensor: None)


def tensors_in(values: Iterable[Any]) -> list[torch.Tensor]:
    """All tensors in arguments or results, in order."""
    found: list[torch.Tensor] = []
    _collect(found, values)
    return found


def _collect(found: list[torch.Tensor], values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            _collect(found, value)
        elif isinstance(value, dict):
            _collect(found, value.values())


def _sharing(found: list[torch.Tensor]) -> dict[int, int]:
    """The number of the shared storage of each tensor, by the tensor's id; those that share none are left out."""
    by_storage: dict[int, list[torch.Tensor]] = {}
    for tensor in found:
        if tensor.layout is torch.strided and not tensor.is_nested:
            by_storage.setdefault(storage_address(tensor), []).append(tensor)
    shared = [group for group in by_storage.values() if len(group) > 1]
    return {id(tensor): number for number, group in enumerate(shared) for tensor in group}


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
    if isinstance(value, dict) and all(type(name) in (str, int) for name in value):
        return {name: _describe(item, groups, fit) for name, item in value.items()}
    if isinstance(value, torch.Generator):
        return GeneratorSpec(str(value.device), value.initial_seed())
    if isinstance(value, np.generic):
        return _describe(value.item(), groups, fit)
    if isinstance(value, torch.ScriptObject):
        return describe_script_object(value)
    for base in _SIMPLE_BASES:
        # enumerations and the like: an operator takes them for the number or text that they are
        if isinstance(value, base):
            return base(value)  # type: ignore[arg-type]
    return Opaque(f"{kind.__module__}.{kind.__qualname__}")


def _describe_tensor(tensor: torch.Tensor, groups: Mapping[int, int], fit: FitValues) -> TensorSpec | Opaque:
    if tensor.is_nested:
        # its sizes are no numbers
        return Opaque("nested tensor")
    strided = tensor.layout is torch.strided
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return TensorSpec(
        shape=tuple(int(size) for size in tensor.shape),
        stride=tuple(int(step) for step in tensor.stride()) if strided else None,
        dtype=tensor.dtype,
        device=str(tensor.device),
        layout=tensor.layout,
        offset=int(tensor.storage_offset()) if strided else 0,
        requires_grad=tensor.requires_grad,
        storage=groups.get(id(tensor)),
        values=fit(tensor) if strided and plain and not tensor.is_meta and not tensor.is_quantized else None,
        conj=tensor.is_conj() if strided else False,
        neg=tensor.is_neg() if strided else False,
        cls=None if plain else type(tensor).__qualname__,
    )
