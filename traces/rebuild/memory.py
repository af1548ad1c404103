"""Lays tensors out in memory as a trace tells: with their strides, and sharing what they shared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from opgrip.errors import FormatError
from opgrip.traces.schema.tensor_specs import TensorSpec

Values = Callable[[TensorSpec, tuple[int, ...]], torch.Tensor]


def lay_out(specs: Sequence[TensorSpec], values: Values, device: Callable[[str], str] = str) -> list[torch.Tensor]:
    """The tensors of some specs; those of one number of storage in the same memory.

    A tensor that requires a gradient is the result of an operator, so that a function may write into it.

    Parameters
    ----------
    values : gives those of a tensor, in the shape that it is asked for: of a dimension of stride 0 one index alone
    device : where tensors go that were on another one

    Raises
    ------
    FormatError : for a tensor that is no plain one with strides
    """
    extents: dict[Any, int] = {}
    for place, spec in enumerate(specs):
        if spec.stride is None or spec.made_of is not None or spec.layout is not torch.strided or spec.cls is not None:
            raise FormatError("a tensor that is no plain one in memory")
        key = _key(place, spec)
        extents[key] = max(extents.get(key, 0), spec.extent)
    memory: dict[Any, torch.UntypedStorage] = {}
    tensors = []
    for place, spec in enumerate(specs):
        key = _key(place, spec)
        if key not in memory:
            zeros = torch.zeros(extents[key], dtype=torch.uint8, device=device(spec.device))
            memory[key] = zeros.untyped_storage()
        tensor = tensor_over(memory[key], spec)
        if 0 not in spec.shape and spec.device != "meta":
            once = once_shape(spec)
            tensor.as_strided(once, spec.stride or (), spec.offset).copy_(values(spec, once))
        tensors.append(tensor)
    # not before all values are there: they are written in place
    return [as_result(tensor) if spec.requires_grad else tensor for spec, tensor in zip(specs, tensors, strict=True)]


def once_shape(spec: TensorSpec) -> tuple[int, ...]:
    """A tensor's shape with one index of each dimension of stride 0, as whole values are kept."""
    steps = spec.stride or (1,) * len(spec.shape)
    return tuple(1 if step == 0 else size for size, step in zip(spec.shape, steps, strict=True))


def tensor_over(storage: torch.UntypedStorage, spec: TensorSpec) -> torch.Tensor:
    """The tensor of a spec over some memory: no view of another tensor."""
    assert spec.stride is not None, "the caller's business"
    empty = torch.empty(0, dtype=spec.dtype, device=storage.device)
    return empty.set_(storage, spec.offset, spec.shape, spec.stride)


def as_result(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor that requires a gradient and that an operator gave."""
    with torch.enable_grad():
        result: torch.Tensor = _Result.apply(torch.zeros((), requires_grad=True), tensor)
    return result


class _Result(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as it is."""
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Nothing for what stands before it."""
        return torch.zeros(()), None


def _key(place: int, spec: TensorSpec) -> Any:
    return ("own", place) if spec.storage is None else (spec.storage, spec.device)
