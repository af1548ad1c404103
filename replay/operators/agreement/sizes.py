"""What a call's arguments have, and what they should have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor

from opgrip.traces.schema.arguments import TensorSpec

Call: TypeAlias = Mapping[str, Any]
"""What a call takes, by the names of the operator's schema: tensors, or what a trace says of them."""
Sizes: TypeAlias = tuple[str, object, object]
"""A name, what it has, and what it should have."""
Check: TypeAlias = Callable[[Call], Iterator[Sizes]]


def is_tensor(value: object) -> bool:
    """Whether it is a tensor, or what a trace says of one."""
    return isinstance(value, Tensor | TensorSpec)


def shape_of(value: Any) -> tuple[int, ...]:
    """The shape of a tensor."""
    return tuple(value.shape)


def shapes(call: Call, expected: tuple[int, ...], *names: str) -> Iterator[Sizes]:
    """The arguments of these names that are tensors have this shape."""
    for name in names:
        if is_tensor(call.get(name)):
            yield name, shape_of(call[name]), expected


def elements(call: Call, expected: int, *names: str) -> Iterator[Sizes]:
    """The arguments of these names that are tensors have as many elements."""
    for name in names:
        if is_tensor(call.get(name)):
            yield name, prod(shape_of(call[name])), expected


def dtypes(call: Call, expected: torch.dtype, *names: str) -> Iterator[Sizes]:
    """The arguments of these names that are tensors have this dtype."""
    for name in names:
        if is_tensor(call.get(name)):
            yield name, call[name].dtype, expected


def own_memory(*names: str) -> Check:
    """The elements of these arguments, tensors or lists of them, share no memory: the kernel reads as many in a row."""

    def check(call: Call) -> Iterator[Sizes]:
        for name in names:
            value = call.get(name)
            for tensor in value if isinstance(value, list | tuple) else (value,):
                if is_tensor(tensor) and _has_strides(tensor):
                    count = prod(shape_of(tensor))
                    yield f"elements of {name} in memory", min(_places(tensor), count), count

    return check


def ends_in_a_row(call: Call, *names: str) -> Iterator[Sizes]:
    """The last dimension of these arguments lies in a row."""
    for name in names:
        tensor = call.get(name)
        if is_tensor(tensor) and shape_of(tensor)[-1] > 1:
            yield f"the last stride of {name}", _strides(tensor)[-1], 1


def both(*checks: Check) -> Check:
    """All of some checks, in their order."""

    def check(call: Call) -> Iterator[Sizes]:
        for one in checks:
            yield from one(call)

    return check


def _has_strides(tensor: Any) -> bool:
    if isinstance(tensor, TensorSpec):
        return tensor.stride is not None
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_mkldnn


def _places(tensor: Any) -> int:
    """How many places in memory a tensor with strides reaches over."""
    if 0 in tensor.shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape_of(tensor), _strides(tensor), strict=True))


def _strides(tensor: Any) -> tuple[int, ...]:
    return tuple((tensor.stride or ()) if isinstance(tensor, TensorSpec) else tensor.stride())
