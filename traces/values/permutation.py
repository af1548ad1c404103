"""Every whole number of a range, once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from opgrip.traces.values import drawing as checks
from opgrip.traces.values.drawing import distinct
from opgrip.traces.values.model import MOST, pieces, value_models
from opgrip.traces.values.order import Ordered, last_length, order_of
from opgrip.traces.values.tensor_arrays import array_of


@value_models.register("permutation")
@dataclass(frozen=True, slots=True)
class Permutation(Ordered):
    """The range of a permutation, as `randperm` and `argsort` give it, and its order."""

    low: int
    high: int

    priority: ClassVar[int] = 40

    @classmethod
    def fit(cls, tensor: torch.Tensor) -> Permutation | None:
        """The model of integers no two of which are equal, with none missing between them."""
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool:
            return None
        if tensor.itemsize == 1 and tensor.numel() > 256:
            return None
        if tensor.numel() > MOST and _has_equal(pieces(tensor)):
            return None
        values = array_of(tensor.to(torch.int64)).reshape(-1)
        low, high = int(values.min()), int(values.max())
        count = len(values)
        # most others are told by their sum, which may overflow alike on both sides
        if high - low + 1 != count or (int(values.sum()) - (low + high) * count // 2) % (1 << 64):
            return None
        if int(np.bincount(values - low).max()) != 1:
            return None
        return cls(low, high, **order_of(values, last_length(tensor)))

    def check(self) -> None:
        """A range."""
        checks.whole(self.low, "a lower bound")
        checks.whole(self.high, "an upper bound", self.low)
        self.check_order()

    def draw(self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        """Another permutation; some of the numbers where the shape holds fewer, all as often where it holds more."""
        count, width = torch.Size(shape).numel(), self.high - self.low + 1
        if count <= width:
            values = distinct(count, self.low, self.high, generator)
        else:
            values = torch.randperm(count, generator=generator, device=generator.device) % width + self.low
        return self.arranged(values, shape, generator).to(dtype).reshape(shape)


def _has_equal(part: torch.Tensor) -> bool:
    return len(np.unique(array_of(part.to(torch.int64)))) < part.numel()
