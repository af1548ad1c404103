"""How floats that are finite and not zero are distributed."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from opgrip.traces.values.drawing import at_quantiles
from opgrip.traces.values.float_bits import Floats1D, Kinds, is_plain, magnitudes, smallest
from opgrip.traces.values.model import every_so_many

SHAPES = ("normal", "uniform", "quantiles")
_TAIL = (0.0, 0.001, 0.005, 0.01, 0.02)
PROBABILITIES = (*_TAIL, *(at / 20 for at in range(1, 20)), *(1 - at for at in reversed(_TAIL)))
"""Those of the quantiles that are kept, closer to each other in the tails."""
DIGITS = 9
"""Significant ones that tell any two numbers of 32 bits apart (IEEE 754-2019, 5.12.2)."""
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


def distribution_of(values: Floats1D, dtype: torch.dtype, kinds: Kinds, sampled: int) -> Distribution:
    """The distribution of the plain elements; all zero where there are none.

    Parameters
    ----------
    dtype : what the values were of
    kinds : what the other elements are
    sampled : so many elements are looked at, but for their range
    """
    count = len(values) - kinds.special
    if not count:
        return Distribution(0.0, 0.0, 0.0, 0.0)
    part = every_so_many(values, sampled)
    if kinds.special:
        part = part[is_plain(part, dtype)]
        if len(part) < min(count, FEW):
            part = values[is_plain(values, dtype)][:sampled]
    ranked = np.sort(part)
    low, high = _range(values, dtype, ranked, kinds)
    # the sum or the square of finite numbers can overflow
    with np.errstate(over="ignore", invalid="ignore"):
        mean = float(ranked.mean(dtype=np.float64))
        centred = ranked - ranked.dtype.type(mean)
        std = math.sqrt(float(np.dot(centred, centred)) / len(ranked))
    mean = mean if math.isfinite(mean) else low / 2 + high / 2
    std = std if math.isfinite(std) else high / 4 - low / 4
    last = len(ranked) - 1
    quantiles = ranked[[round(at * last) for at in PROBABILITIES]].tolist()
    whole = all(value == math.floor(value) for value in quantiles) and bool((ranked == np.rint(ranked)).all())
    shape = _shape(quantiles, mean, std, len(ranked))
    quantiles[0], quantiles[-1] = low, high
    marks = quantiles if shape == "quantiles" else ()
    mean, std, low, high, *kept = _shortened([mean, std, low, high, *marks], dtype)
    return Distribution(mean, std, low, high, shape, kept or None, whole)


def _shortened(values: list[float], dtype: torch.dtype) -> list[float]:
    """The same numbers of the dtype in the fewest digits, which halves what they take in a trace."""
    if dtype == torch.float64:
        return values
    # next to the ends of its range a number could round out of it
    limits = torch.finfo(dtype)
    least, most = 2 * limits.tiny, limits.max / 2
    return [float(f"{value:.{DIGITS}g}") if least < abs(value) < most else value for value in values]


def _range(values: Floats1D, dtype: torch.dtype, ranked: Floats1D, kinds: Kinds) -> tuple[float, float]:
    """Smallest and largest plain element."""
    if len(values) == len(ranked) + kinds.special:
        plain = ranked[[0, -1]]
    else:
        # zeros have their own share: a bound of zero is not one of the others
        plain = np.where(is_plain(values, dtype), values, ranked[0]) if kinds.special else values
    return float(plain.min()), float(plain.max())


def _shape(quantiles: list[float], mean: float, std: float, count: int) -> str:
    """The simplest distribution that is not far from the quantiles of so many elements."""
    low, high = quantiles[0], quantiles[-1]
    # by how much the distribution functions of a sample and of what it is from differ by chance, and a bit
    slack = 0.01 + 1 / math.sqrt(count)
    if low == high:
        return "uniform"
    inner = list(zip(PROBABILITIES, quantiles, strict=True))[1:-1]
    if 0 < high - low < math.inf and all(abs((at - low) / (high - low) - share) < slack for share, at in inner):
        return "uniform"
    scale = std * math.sqrt(2)
    if scale > 0 and all(abs((1 + math.erf((at - mean) / scale)) / 2 - share) < slack for share, at in inner):
        return "normal"
    return "quantiles"
