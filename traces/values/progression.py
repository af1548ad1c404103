"""Numbers at equal distances: `arange`, each of its elements repeated, the whole of it repeated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from opgrip.traces.values import drawing as checks
from opgrip.traces.values.model import array_of, leading, taken, value_models

HEADS = (64, 1 << 12)
"""So many elements, the first ones, are looked at before others are, until two of them differ."""
LOOKED_AT = 1 << 14
"""Elements that must stand where the progression has them; of a tensor that has no more, all."""
MOST_STEP = 1 << 62
"""No step is as large, and no progression as long: the numbers are of 64 bits."""
WIDE_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)


@value_models.register("progression")
@dataclass(frozen=True, slots=True)
class Progression:
    """Element i, in row-major order, is `start + step * (i // repeats % period)`, exactly.

    So are the coordinates of a grid's cells, in one column each.
    """

    start: int | float
    step: int | float
    repeats: int
    period: int

    priority: ClassVar[int] = 30

    @classmethod
    def fit(cls, tensor: torch.Tensor) -> Progression | None:
        """The model of a tensor of whole numbers, or of floats that are exactly such multiples."""
        narrow = tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1
        if tensor.dtype == torch.bool or tensor.dtype.is_complex or narrow:
            return None
        if not _may_be(tensor):
            return None
        if tensor.dtype in WIDE_UNSIGNED:
            # torch lacks most operations for these
            tensor = tensor.to(torch.int64)
        count = tensor.numel()
        places = _looked_at(count)
        values = _at(tensor, places)
        start = values[0].item()
        repeats = _first_change(tensor, places, values)
        if not repeats:
            return None
        step = _at(tensor, np.array([repeats]))[0].item() - start
        if not -MOST_STEP < step < MOST_STEP:
            return None
        blocks = places // repeats
        period = _period(tensor, blocks, values != start + step * blocks, start, step, repeats) or -(-count // repeats)
        if abs(step) * period >= MOST_STEP or not bool((values == start + step * (blocks % period)).all()):
            return None
        return cls(start, step, repeats, period)

    def check(self) -> None:
        """Numbers of 64 bits from the first to the last."""
        checks.whole(self.repeats, "a count of repeats", 1)
        checks.whole(self.period, "a period", 1)
        for value in (self.start, self.step, self.start + self.step * (self.period - 1)):
            if type(value) is int:
                checks.whole(value, "a progression")
            else:
                checks.finite(value, "a progression")

    def draw(self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        """The same numbers; from the start again where the shape holds more."""
        places = torch.arange(torch.Size(shape).numel(), device=generator.device)
        places = places // self.repeats % self.period
        whole = type(self.start) is type(self.step) is int
        return ((places if whole else places.double()) * self.step + self.start).to(dtype).reshape(shape)


def _may_be(tensor: torch.Tensor) -> bool:
    """Whether a progression can begin with a tensor's first elements."""
    for count in HEADS:
        head = leading(tensor, count).reshape(-1)
        values = array_of(head.to(torch.float64 if tensor.dtype.is_floating_point else torch.int64))
        differs = values != values[0]
        repeats = int(differs.argmax())
        if differs[repeats]:
            # nan is not even equal to itself
            return bool(repeats) and _goes_on(values[::repeats])
    return True


def _goes_on(blocks: NDArray[Any]) -> bool:
    """Whether these begin a progression, which begins anew after some."""
    ramp = blocks[0] + (blocks[1] - blocks[0]) * np.arange(len(blocks))
    breaks = blocks != ramp
    period = int(breaks.argmax())
    if not breaks[period]:
        return True
    return bool(blocks[period] == blocks[0] and (blocks == np.resize(blocks[:period], len(blocks))).all())


def _looked_at(count: int) -> NDArray[np.int64]:
    """Places of the elements that are looked at, ascending: all, or the first ones and some of the others."""
    if count <= LOOKED_AT:
        return np.arange(count)
    rest = np.linspace(HEADS[-1], count - 1, LOOKED_AT - HEADS[-1], dtype=np.int64)
    return np.concatenate([np.arange(HEADS[-1]), rest])


def _at(tensor: torch.Tensor, places: NDArray[np.int64]) -> NDArray[Any]:
    """Elements by their places in row-major order, as float64 or int64."""
    if tensor.is_contiguous():
        offsets = places
    else:
        indices = np.unravel_index(places, tensor.shape)
        offsets = np.sum([index * step for index, step in zip(indices, tensor.stride(), strict=True)], axis=0)
    elements = taken(tensor, offsets, int(offsets.max()) + 1)
    array: NDArray[Any] = array_of(elements.to(torch.float64 if tensor.dtype.is_floating_point else torch.int64))
    return array


def _first_change(tensor: torch.Tensor, places: NDArray[np.int64], values: NDArray[Any]) -> int | None:
    """The first place whose element is not the first one, where elements come in blocks, as in a progression."""
    differs = values != values[0]
    at = int(differs.argmax())
    # nan is not even equal to itself
    if not differs[at] or not at:
        return None
    between = np.arange(places[at - 1] + 1, places[at] + 1)
    return int(between[(_at(tensor, between) != values[0]).argmax()])


def _period(
    tensor: torch.Tensor,
    blocks: NDArray[np.int64],
    breaks: NDArray[np.bool_],
    start: float,
    step: float,
    repeats: int,
) -> int | None:
    """The first block that does not go on as those before it do, where a period ends; None where all do.

    Parameters
    ----------
    blocks, breaks : numbers of blocks that were looked at, and whether these do not
    """
    at = int(breaks.argmax())
    if not breaks[at]:
        return None
    between = np.arange(blocks[at - 1] + 1, blocks[at] + 1)
    if not len(between):
        return None
    differs = _at(tensor, between * repeats) != start + step * between
    return int(between[differs.argmax()])
