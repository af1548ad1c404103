"""Numbers at equal distances: `arange`, each of its elements repeated, the whole of it repeated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from opgrip.traces.values import checks
from opgrip.traces.values.model import leading, value_models

HEADS = (64, 1 << 12, 1 << 16)
"""So many elements, the first ones, are looked at before all are, until two of them differ."""
WIDE_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)


@value_models.register("progression")
@dataclass(frozen=True, slots=True)
class Progression:
    """Element i, in row-major order, is `start + step * (i // repeats % period)`: exact.

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
        flat = tensor.reshape(-1)
        if flat.dtype in WIDE_UNSIGNED:
            # torch lacks most operations for these
            flat = flat.to(torch.int64)
        repeats = _first(flat != flat[0])
        if not repeats:
            return None
        blocks = flat[::repeats]
        start, step = flat[0].item(), flat[repeats].item() - flat[0].item()
        period = _first(blocks != _ramp(start, step, len(blocks), flat.device)) or len(blocks)
        ramp = _ramp(start, step, period, flat.device)
        whole = len(flat) // (repeats * period) * (repeats * period)
        if not bool((flat[:whole].view(-1, period, repeats) == ramp[:, None]).all()):
            return None
        rest = len(flat) - whole
        if not bool((flat[whole:] == ramp[: -(-rest // repeats)].repeat_interleave(repeats)[:rest]).all()):
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
        values = head.to(torch.float64 if tensor.dtype.is_floating_point else torch.int64).numpy()
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
    return not breaks[period] or bool((blocks == np.resize(blocks[:period], len(blocks))).all())


def _first(mask: torch.Tensor) -> int | None:
    """Place of the first true element."""
    at = int(mask.view(torch.uint8).argmax()) if len(mask) else 0
    return at if len(mask) and bool(mask[at]) else None


def _ramp(start: int | float, step: int | float, count: int, device: torch.device) -> torch.Tensor:
    places = torch.arange(count, device=device)
    return (places if type(step) is int else places.double()) * step + start
