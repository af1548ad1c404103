"""How floats that are finite and not zero are distributed."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from opgrip.traces.values.drawing import at_quantiles
from opgrip.traces.values.float_bits import Kinds, is_plain, magnitudes, smallest
from opgrip.traces.values.model import sample

SHAPES = ("normal", "uniform", "quantiles")
_TAIL = (0.0, 0.001, 0.005, 0.01, 0.02)
PROBABILITIES = (*_TAIL, *(at / 20 for at in range(1, 20)), *(1 - at for at in reversed(_TAIL)))
"""Those of the quantiles that are kept, closer to each other in the tails."""
FEW = 1024
"""Where a sample holds fewer plain elements than that, they are looked for in the whole tensor."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """A distribution within a range; the fields are those of `Floats`."""

    mean: float
    std: float
    low: float
    high: float
    shape: str = "normal"
    quantiles: list[float] | None = None
    whole: bool = False

    def draw(self, count: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        """So many numbers (N,) that are neither zero nor denormal; two of them are the bounds of the range."""
        device = generator.device
        work = torch.float64 if dtype == torch.float64 else torch.float32
        if self.shape == "quantiles" and self.quantiles is not None:
            values = at_quantiles(self.quantiles, PROBABILITIES, count, generator)
        elif self.shape == "uniform":
            part = torch.rand(count, dtype=work, generator=generator, device=device)
            values = part * self.high + (1 - part) * self.low
        else:
            values = torch.randn(count, dtype=work, generator=generator, device=device)
            values = values.mul_(self.std).add_(self.mean)
        if self.whole:
            values = values.round()
        if count > 1:
            ends = torch.randint(count // 2, (2,), generator=generator, device=device)
            values[ends[0]], values[ends[1] + count // 2] = float(self.low), float(self.high)
        limits = torch.finfo(dtype)
        values = values.clamp_(max(self.low, limits.min), min(max(self.high, limits.min), limits.max)).to(dtype)
        lost = magnitudes(values) < smallest(dtype)
        if bool(lost.any()):
            least = 1.0 if self.whole else float(limits.tiny)
            values = values.masked_fill_(lost, least if self.high >= least else -least)
        return values


def distribution_of(tensor: torch.Tensor, kinds: Kinds, sampled: int) -> Distribution:
    """The distribution of a tensor's plain elements; all zero where there are none.

    Parameters
    ----------
    kinds : what the other elements are
    sampled : elements that a tensor may have to be looked at whole, but for its range
    """
    count = tensor.numel() - kinds.special
    if not count:
        return Distribution(0.0, 0.0, 0.0, 0.0)
    part = sample(tensor, sampled).reshape(-1)
    if kinds.special:
        part = part[is_plain(part)]
        if len(part) < min(count, FEW):
            part = tensor[is_plain(tensor)][:sampled]
    ranked = (part if part.itemsize > 3 else part.float()).sort().values
    low, high = _range(tensor, ranked, kinds)
    mean, std = ranked.mean().item(), ranked.std(correction=0).item()
    # the sum or the square of finite numbers can overflow
    mean = mean if math.isfinite(mean) else low / 2 + high / 2
    std = std if math.isfinite(std) else high / 4 - low / 4
    last = len(ranked) - 1
    quantiles = ranked[[round(at * last) for at in PROBABILITIES]].tolist()
    whole = all(value == math.floor(value) for value in quantiles) and bool((ranked == ranked.round()).all())
    shape = _shape(quantiles, mean, std, len(ranked))
    quantiles[0], quantiles[-1] = low, high
    return Distribution(mean, std, low, high, shape, quantiles if shape == "quantiles" else None, whole)


def _range(tensor: torch.Tensor, ranked: torch.Tensor, kinds: Kinds) -> tuple[float, float]:
    """Smallest and largest plain element."""
    if tensor.numel() == len(ranked) + kinds.special:
        low, high = ranked[0].item(), ranked[-1].item()
    else:
        # zeros have their own share: a bound of zero is not one of the others
        plain = torch.where(is_plain(tensor), tensor, ranked[0].to(tensor.dtype)) if kinds.special else tensor
        low, high = (bound.item() for bound in torch.aminmax(plain))
    return low, high


def _shape(quantiles: list[float], mean: float, std: float, count: int) -> str:
    """The simplest distribution that is not far from the quantiles of so many elements."""
    low, high = quantiles[0], quantiles[-1]
    # by how much the distribution functions of a sample and of what it is from differ by chance, and a bit
    slack = 0.01 + 1 / math.sqrt(count)
    inner = list(zip(PROBABILITIES, quantiles, strict=True))[1:-1]
    if 0 < high - low < math.inf and all(abs((at - low) / (high - low) - share) < slack for share, at in inner):
        return "uniform"
    scale = std * math.sqrt(2)
    if scale > 0 and all(abs((1 + math.erf((at - mean) / scale)) / 2 - share) < slack for share, at in inner):
        return "normal"
    return "quantiles"
