"""How a tensor grows with the batch: which of its sizes, steps and offset are multiplied."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from opgrip.replay.operators.lookup import Unsupported
from opgrip.traces.schema.arguments import TensorSpec


@dataclass(frozen=True, slots=True)
class Growth:
    """What of a tensor is multiplied when the batch is.

    Attributes
    ----------
    sizes, steps : dimensions whose size, whose stride is multiplied
    outer : of each dimension in `sizes`, how often the whole batch stands in it: 1 where rows of one element of the
        batch are behind each other, T in that of size T * B which is made of (T, B)
    offset : whether its offset is
    item : of a tensor that belongs to one element of the batch, that element's place
    lost : why it is not known, None where it is
    """

    sizes: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    outer: tuple[int, ...] = ()
    offset: bool = False
    item: int | None = None
    lost: str | None = None

    @property
    def any(self) -> bool:
        """Whether something is multiplied."""
        return bool(self.sizes or self.steps or self.offset)


PLAIN = Growth()
"""Of a tensor that knows nothing of the batch."""


def growth_of(spec: TensorSpec, sizes: Collection[int]) -> Growth:
    """Of a tensor that has memory of its own, whose sizes in these dimensions are multiplied."""
    return Growth(tuple(sorted(sizes)), grown_steps(spec.shape, spec.stride or (), sizes), (1,) * len(sizes))


def grown_steps(shape: Sequence[int], stride: Sequence[int], sizes: Collection[int]) -> tuple[int, ...]:
    """The dimensions that step over one that grows, and so step further when it does.

    Where sizes of one leave it open which of two dimensions is inside the other, it is the later one.
    """
    dimensions = []
    for outer in range(len(stride)):
        for inner in sizes:
            over = stride[outer] >= stride[inner] * max(shape[inner], 1)
            same = stride[outer] == stride[inner]
            if inner != outer and stride[outer] and stride[inner] and over and (not same or outer < inner):
                dimensions.append(outer)
                break
    return tuple(dimensions)


def grown(spec: TensorSpec, growth: Growth, factor: int) -> TensorSpec:
    """The tensor as it would be in a batch `factor` times as large.

    Raises
    ------
    Unsupported : for one that grows and has no strides
    """
    if not growth.any:
        return spec
    if spec.stride is None or spec.made_of is not None:
        raise Unsupported("a tensor that is sparse, quantized or nested has no batch dimension to scale")
    return replace(
        spec,
        shape=_multiplied(spec.shape, growth.sizes, factor),
        stride=_multiplied(spec.stride, growth.steps, factor),
        offset=spec.offset * factor if growth.offset else spec.offset,
    )


def met_growth(spec: TensorSpec, shape: Sequence[int], stride: Sequence[int], offset: int, factor: int) -> Growth:
    """What was multiplied of a tensor to become that.

    Raises
    ------
    ValueError : where it is not the tensor with some numbers multiplied
    """
    before, after = (*spec.shape, *(spec.stride or ())), (*shape, *stride)
    if len(before) != len(after):
        raise ValueError("it has another number of dimensions")
    moved = [place for place, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]
    count = len(spec.shape)
    # the stride of a dimension of one element says nothing, and operators choose it freely
    moved = [place for place in moved if place < count or before[place - count] > 1]
    if any(after[place] != before[place] * factor for place in moved):
        raise ValueError(f"a size of {tuple(spec.shape)} becomes one of {tuple(shape)}")
    if offset not in (spec.offset, spec.offset * factor):
        raise ValueError("its offset grows by something else")
    sizes = tuple(place for place in moved if place < count)
    steps = tuple(place - count for place in moved if place >= count)
    return Growth(sizes, steps, (1,) * len(sizes), offset != spec.offset)


def _multiplied(values: tuple[int, ...], places: Collection[int], factor: int) -> Any:
    return tuple(value * factor if place in places else value for place, value in enumerate(values))
