"""Mean, spread and range of a floating-point tensor, and the share of values that are not plain numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from opgrip.traces.arguments import FormatError
from opgrip.traces.values.model import sample, value_models

SAMPLED = 1 << 15
"""Above this many elements, all but the range is of an even sample."""


@value_models.register("floats")
@dataclass(frozen=True, slots=True)
class Floats:
    """A normal distribution cut to a range, with exact zeros, nan and inf in their shares.

    Complex tensors are described by their real and imaginary parts taken together.

    Attributes
    ----------
    mean, std, low, high : of the elements that are finite and not zero; 0 where there are none
    zeros, nan, inf, minus_inf : share of all elements, 0 to 1
    """

    mean: float
    std: float
    low: float
    high: float
    zeros: float
    nan: float
    inf: float
    minus_inf: float

    priority: ClassVar[int] = 30

    @classmethod
    def fit(cls, tensor: torch.Tensor) -> Floats | None:
        """The model of a floating-point or complex tensor."""
        if tensor.dtype.is_complex:
            tensor = torch.view_as_real(tensor.resolve_conj())
        if not tensor.dtype.is_floating_point:
            return None
        if tensor.numel() > SAMPLED:
            part = cls.fit(sample(tensor, SAMPLED))
            # half and 8-bit floats lack some operations
            bounds = [float(bound) for bound in torch.aminmax(tensor if tensor.itemsize > 3 else tensor.float())]
            if part is not None and all(math.isfinite(bound) for bound in bounds):
                # zeros have their own share: a bound of zero is not one of the others
                return replace(part, low=bounds[0] or part.low, high=bounds[1] or part.high)
        # half and 8-bit floats lack some of these operations
        values = tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()
        total = values.numel()
        zeros = total - int(torch.count_nonzero(values))
        nan = inf = minus_inf = 0
        if not bool(values.isfinite().all()):
            nan, inf = int(values.isnan().sum()), int((values == math.inf).sum())
            minus_inf = int((values == -math.inf).sum())
        plain = values[values.isfinite() & (values != 0)] if zeros or nan or inf or minus_inf else values
        shares = (zeros / total, nan / total, inf / total, minus_inf / total)
        if not plain.numel():
            return cls(0.0, 0.0, 0.0, 0.0, *shares)
        low, high = (float(bound) for bound in torch.aminmax(plain))
        mean, std = plain.mean().item(), plain.std(correction=0).item()
        # the sum or the square of finite numbers can overflow
        mean = mean if math.isfinite(mean) else low / 2 + high / 2
        std = std if math.isfinite(std) else high / 4 - low / 4
        return cls(mean, std, low, high, *shares)

    def check(self) -> None:
        """Finite moments, shares between 0 and 1."""
        shares = (self.zeros, self.nan, self.inf, self.minus_inf)
        if not all(math.isfinite(value) for value in (self.mean, self.std, self.low, self.high)) or self.std < 0:
            raise FormatError("floats without finite moments")
        if self.low > self.high or not all(0 <= share <= 1 for share in shares):
            raise FormatError("floats whose range or shares are impossible")

    def draw(self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        """Normal values within the range; zeros, nan and inf at random places."""
        if dtype.is_complex:
            parts = self.draw((*shape, 2), dtype.to_real(), generator)
            return torch.view_as_complex(parts)
        work = torch.float64 if dtype == torch.float64 else torch.float32
        values = torch.randn(shape, dtype=work, generator=generator, device=generator.device)
        values = values.mul_(self.std).add_(self.mean).clamp_(self.low, self.high)
        shares = [(0.0, self.zeros), (math.nan, self.nan), (math.inf, self.inf), (-math.inf, self.minus_inf)]
        if any(share for _, share in shares):
            place = torch.rand(shape, generator=generator, device=generator.device)
            below = 0.0
            for value, share in shares:
                values[(place >= below) & (place < below + share)] = value
                below += share
        return values.to(dtype)
