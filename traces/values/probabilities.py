"""Rows of probabilities, as softmax gives them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from opgrip.traces.schema.arguments import FormatError
from opgrip.traces.values import drawing as checks
from opgrip.traces.values.distribution import as_floats, draw_denormals, kinds_of
from opgrip.traces.values.drawing import exactly
from opgrip.traces.values.model import ROWS, value_models

TRIED = 1 << 15
"""On so many elements the spread of the logits is found."""
STEPS = 24


@value_models.register("probabilities")
@dataclass(frozen=True, slots=True)
class Probabilities:
    """Rows along the last dimension that are not negative and add up to one.

    Attributes
    ----------
    peak : mean over the rows of the largest probability
    zeros, denormals : share of all elements
    """

    peak: float
    zeros: float
    denormals: float = 0.0

    priority: ClassVar[int] = 70
    seen: ClassVar[str] = ROWS

    @classmethod
    def fit(cls, tensor: torch.Tensor) -> Probabilities | None:
        """The model of floats in rows of two or more."""
        if not tensor.dtype.is_floating_point or tensor.itemsize < 2 or tensor.dim() < 1 or tensor.shape[-1] < 2:
            return None
        # a sum of rounded numbers is off by some roundings
        tolerance = max(8 * torch.finfo(tensor.dtype).eps, 1e-5)
        first = float(tensor[(0,) * (tensor.dim() - 1)].float().sum())
        if not abs(first - 1) < tolerance:
            return None
        sums = tensor.sum(-1, dtype=torch.float64 if tensor.dtype == torch.float64 else torch.float32)
        if not bool(((sums - 1).abs() < tolerance).all()) or float(tensor.min()) < 0:
            return None
        kinds = kinds_of(as_floats(tensor), tensor.dtype)
        peak = tensor.amax(-1).double().mean().item()
        return cls(min(1.0, peak), kinds.zeros / tensor.numel(), kinds.denormals / tensor.numel())

    def check(self) -> None:
        """Shares."""
        for value in (self.peak, self.zeros, self.denormals):
            checks.share(value, "a probability")
        if self.zeros + self.denormals > 1 + 1e-9:
            raise FormatError("more zeros and denormals than elements")

    def draw(self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        """Rows whose largest elements have that mean; exactly as many zeros and denormals."""
        length = shape[-1] if shape else 1
        count, device = torch.Size(shape).numel(), generator.device
        rows = count // length
        work = torch.float64 if dtype == torch.float64 else torch.float32
        logits = torch.randn(rows, length, dtype=work, generator=generator, device=device)
        places = torch.arange(rows, device=device)
        small = dtype if dtype.is_floating_point and dtype.itemsize > 1 else torch.float32
        zeros, denormals = round(self.zeros * count), round(self.denormals * count)
        lost = exactly(zeros + denormals, count - rows, generator)
        tops = logits.argmax(-1)
        free = torch.ones(rows, length, dtype=torch.bool, device=device)
        free[places, tops] = False
        lost = free.masked_scatter(free, lost)
        logits = logits.masked_fill(lost, -math.inf)
        values = (logits * self._spread(logits, length)).softmax(-1).to(small)
        # far from the top, a softmax underflows
        tiny = torch.finfo(small).tiny
        values = torch.where(lost, values, values.clamp(min=tiny))
        if denormals:
            filled = exactly(denormals, int(torch.count_nonzero(lost)), generator)
            special = torch.zeros(len(filled), dtype=small, device=device)
            special[filled] = draw_denormals(int(torch.count_nonzero(filled)), small, False, generator)
            values[lost] = special
        return values.to(dtype).reshape(shape)

    def _spread(self, logits: torch.Tensor, length: int) -> float:
        """What normal logits are to be multiplied with so that the mean of the largest probability is right."""
        part = logits[: max(1, TRIED // length)]
        low, high = 0.0, 1.0
        while high < 1e4 and float((part * high).softmax(-1).amax(-1).mean()) < self.peak:
            low, high = high, 2 * high
        for _ in range(STEPS):
            middle = (low + high) / 2
            # -inf times zero is nan
            reached = float((part * max(middle, 1e-9)).softmax(-1).amax(-1).mean())
            low, high = (middle, high) if reached < self.peak else (low, middle)
        return max(high, 1e-9)
