"""Numbers at equal distances: `arange`, each of its elements repeated, the whole of it repeated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from opgrip.traces.values import checks
from opgrip.traces.values.model import leading, value_models

HEAD = 64
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
        head = leading(tensor, HEAD).reshape(-1).tolist()
        if not _may_be(head):
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


def _may_be(head: list[int] | list[float]) -> bool:
    """Whether a progression can begin with these elements."""
    first = head[0]
    repeats = next((at for at, value in enumerate(head) if value != first), None)
    if not repeats:
        # nan is not even equal to itself
        return repeats is None
    step = head[repeats] - first
    for count, at in enumerate(range(0, len(head), repeats)):
        if head[at] != first + step * count:
            return head[at] == first
    return True


def _first(mask: torch.Tensor) -> int | None:
    """Place of the first true element."""
    at = int(mask.view(torch.uint8).argmax()) if len(mask) else 0
    return at if len(mask) and bool(mask[at]) else None


def _ramp(start: int | float, step: int | float, count: int, device: torch.device) -> torch.Tensor:
    places = torch.arange(count, device=device)
    return (places if type(step) is int else places.double()) * step + start
