"""Zeros, denormals, nan and inf, told by the bits: comparing takes denormals for zeros where the CPU flushes them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from opgrip.traces.values.tensor_arrays import array_of

Floats1D = NDArray[np.floating[Any]]
"""Real numbers (N,) of four or eight bytes."""

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_NUMPY_INTEGERS: dict[int, Any] = {4: np.int32, 8: np.int64}


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


def as_floats(tensor: torch.Tensor) -> Floats1D:
    """The elements of a tensor of floats, in row-major order; narrow ones with more digits, none of them rounded."""
    wide = tensor if tensor.itemsize > 3 else tensor.float()
    array: Floats1D = array_of(wide).reshape(-1)
    return array


def magnitudes(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a float of two bytes or more without its sign: they stand in the order of absolute values."""
    integer = _INTEGERS[tensor.itemsize]
    return tensor.view(integer) & torch.iinfo(integer).max


@cache
def smallest(dtype: torch.dtype) -> int:
    """Bits of the smallest number that is not denormal."""
    return int(torch.tensor(torch.finfo(dtype).tiny, dtype=dtype).view(_INTEGERS[dtype.itemsize]))


def kinds_of(values: Floats1D, dtype: torch.dtype) -> Kinds:
    """The counts of floats that were of this dtype."""
    bits = _magnitudes(values)
    low, high = _bounds(dtype, values.dtype.itemsize)
    zeros = len(values) - int(np.count_nonzero(bits))
    denormal = nan = inf = minus_inf = 0
    if len(values) and bits.min() < low:
        denormal = int(np.count_nonzero(bits < low)) - zeros
    if len(values) and bits.max() >= high:
        nan = int(np.count_nonzero(bits > high))
        infinite = values[bits == high]
        inf = int(np.count_nonzero(infinite > 0))
        minus_inf = len(infinite) - inf
    return Kinds(zeros, denormal, nan, inf, minus_inf)


def is_plain(values: Floats1D, dtype: torch.dtype) -> NDArray[np.bool_]:
    """Which elements are finite and neither zero nor denormal in that dtype."""
    bits = _magnitudes(values)
    low, high = _bounds(dtype, values.dtype.itemsize)
    return (bits >= low) & (bits < high)


def draw_denormals(count: int, dtype: torch.dtype, signed: bool, generator: torch.Generator) -> torch.Tensor:
    """So many denormal numbers (N,), of both signs if they have one."""
    integer = _INTEGERS[dtype.itemsize]
    device = generator.device
    bits = torch.randint(1, smallest(dtype), (count,), dtype=integer, generator=generator, device=device)
    if signed:
        negative = torch.rand(count, generator=generator, device=device) < 0.5
        bits = torch.where(negative, bits | torch.iinfo(integer).min, bits)
    return bits.view(dtype)


def _magnitudes(values: Floats1D) -> NDArray[Any]:
    integer = _NUMPY_INTEGERS[values.dtype.itemsize]
    bits: NDArray[Any] = values.view(integer) & np.iinfo(integer).max
    return bits


@cache
def _bounds(dtype: torch.dtype, itemsize: int) -> tuple[int, int]:
    """Bits of a dtype's smallest number that is not denormal, and of inf, in floats of so many bytes."""
    integer = _NUMPY_INTEGERS[itemsize]
    real = np.float32 if itemsize == 4 else np.float64
    bounds = np.array([torch.finfo(dtype).tiny, math.inf], dtype=real).view(integer)
    return int(bounds[0]), int(bounds[1])
