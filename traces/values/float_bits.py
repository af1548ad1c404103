"""Zeros, denormals, nan and inf, told by the bits: comparing takes denormals for zeros where the CPU flushes them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Kinds:
    """How many elements are not plain numbers."""

    zeros: int
    denormals: int
    nan: int
    inf: int
    minus_inf: int

    @property
    def special(self) -> int:
        """All of them."""
        return self.zeros + self.denormals + self.nan + self.inf + self.minus_inf


def magnitudes(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a float of two bytes or more without its sign: they stand in the order of absolute values."""
    integer = _INTEGERS[tensor.itemsize]
    return tensor.view(integer) & torch.iinfo(integer).max


@cache
def smallest(dtype: torch.dtype) -> int:
    """Bits of the smallest number that is not denormal."""
    return _bits(torch.finfo(dtype).tiny, dtype)


@cache
def largest(dtype: torch.dtype) -> int:
    """Bits of inf; those of nan are more."""
    return _bits(math.inf, dtype)


def kinds_of(tensor: torch.Tensor) -> Kinds:
    """The counts of a tensor of floats of two bytes or more."""
    bits = magnitudes(tensor)
    low, high = smallest(tensor.dtype), largest(tensor.dtype)
    zeros = tensor.numel() - int(torch.count_nonzero(bits))
    denormal = nan = inf = minus_inf = 0
    least, most = (int(bound) for bound in torch.aminmax(bits))
    if least < low:
        denormal = int(torch.count_nonzero(bits < low)) - zeros
    if most >= high:
        nan = int(torch.count_nonzero(bits > high))
        infinite = tensor[bits == high]
        inf = int(torch.count_nonzero(infinite > 0))
        minus_inf = len(infinite) - inf
    return Kinds(zeros, denormal, nan, inf, minus_inf)


def is_plain(tensor: torch.Tensor) -> torch.Tensor:
    """Which elements are finite and neither zero nor denormal."""
    bits = magnitudes(tensor)
    return (bits >= smallest(tensor.dtype)) & (bits < largest(tensor.dtype))


def draw_denormals(count: int, dtype: torch.dtype, signed: bool, generator: torch.Generator) -> torch.Tensor:
    """So many denormal numbers (N,), of both signs if they have one."""
    integer = _INTEGERS[dtype.itemsize]
    device = generator.device
    bits = torch.randint(1, smallest(dtype), (count,), dtype=integer, generator=generator, device=device)
    if signed:
        negative = torch.rand(count, generator=generator, device=device) < 0.5
        bits = torch.where(negative, bits | torch.iinfo(integer).min, bits)
    return bits.view(dtype)


def _bits(value: float, dtype: torch.dtype) -> int:
    return int(torch.tensor(value, dtype=dtype).view(_INTEGERS[dtype.itemsize]))
