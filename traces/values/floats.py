"""Value models of floating-point tensors and of probabilities, with distributions of floats."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from opgrip.traces.schema.arguments import FormatError
from opgrip.traces.values import drawing as checks
from opgrip.traces.values.drawing import at_quantiles, between, exactly, in_runs, runs_of, shuffled
from opgrip.traces.values.model import PIECES, ROWS, array_of, every_so_many, value_models
from opgrip.traces.values.order import Ordered, last_length, order_of

ROUNDS = 8  # maximum number of times that more numbers are drawn because too many were equal
SAMPLED = 1 << 15  # number of evenly spaced elements from which the distribution is computed


@value_models.register("floats")
@dataclass(frozen=True, slots=True)
class Floats(Ordered):
    """Value model of floats: a distribution within a range, with the shares of zeros, denormals, nan and infinities.

    Complex tensors are described by their real and imaginary parts taken together. *Plain* elements are finite and
    neither zero nor denormal.

    mean, std, low, high : statistics of the plain elements; 0 if there are none
    zeros, nan, inf, minus_inf, denormals : share of all elements, 0 to 1
    shape : distribution of the plain elements: `normal`, `uniform` or `quantiles`
    quantiles : quantiles of the plain elements at `PROBABILITIES`
    whole : True if all plain elements are integers
    distinct : number of different values, if it is known from the output of an operator such as `unique`
    zero_runs : number of runs of zeros in row-major order, relative to the number of elements
    """

    mean: float
    std: float
    low: float
    high: float
    zeros: float
    nan: float
    inf: float
    minus_inf: float
    denormals: float = 0.0
    shape: str = "normal"
    quantiles: list[float] | None = None
    whole: bool = False
    distinct: int | None = None
    zero_runs: float | None = None

    priority: ClassVar[int] = 90
    examined_part: ClassVar[str] = PIECES

    @classmethod
    def fit(cls, tensor: torch.Tensor) -> Floats | None:
        if tensor.dtype.is_complex:
            tensor = torch.view_as_real(tensor)
        if not tensor.dtype.is_floating_point:
            return None
        if tensor.itemsize == 1:
            # 8-bit floats lack most operations
            tensor = tensor.float()
        values = as_floats(tensor)
        kinds = kinds_of(values, tensor.dtype)
        spread = distribution_of(values, tensor.dtype, kinds, SAMPLED)
        order = order_of(values, last_length(tensor))
        total = len(values)
        return cls(
            spread.mean,
            spread.std,
            spread.low,
            spread.high,
            kinds.zeros / total,
            kinds.nan / total,
            kinds.inf / total,
            kinds.minus_inf / total,
            kinds.denormals / total,
            spread.shape,
            spread.quantiles,
            spread.whole,
            zero_runs=runs_of(values == 0) / total if 0 < kinds.zeros < total else None,
            **order,
        )

    def check(self) -> None:
        for value in (self.mean, self.std, self.low, self.high):
            checks.finite(value, "a moment of floats")
        if self.std < 0 or self.low > self.high:
            numbers = f"{self.std}, {self.low} and {self.high}"
            raise FormatError(f"floats: expected std >= 0 and low <= high, got std, low and high {numbers}")
        for value in (self.zeros, self.nan, self.inf, self.minus_inf, self.denormals):
            checks.share(value, "a share of floats")
        if self.shape not in SHAPES:
            raise FormatError(f"floats have an unknown kind of distribution: {str(self.shape)[:40]!r}")
        if self.shape == "quantiles":
            checks.rising(self.quantiles, "quantiles", len(PROBABILITIES))
        checks.flag(self.whole, "whole numbers")
        if self.distinct is not None:
            checks.whole(self.distinct, "a count of distinct values", 1)
        if self.zero_runs is not None:
            checks.share(self.zero_runs, "a share of runs")
        self.check_order()

    def draw(self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        if dtype.is_complex:
            return torch.view_as_complex(self.draw((*shape, 2), dtype.to_real(), generator))
        wide = dtype.is_floating_point and dtype.itemsize > 1
        values = self._values(torch.Size(shape).numel(), dtype if wide else torch.float32, generator)
        if self.zero_runs is None or 0 in (self.rises, self.falls):
            values = self.arranged(values, shape, generator)
        return values.to(dtype).reshape(shape)

    def _values(self, count: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        zeros = round(self.zeros * count)
        if self.zero_runs is None or not zeros:
            return self._other_values(count, dtype, generator, self.zeros)
        mask = in_runs(zeros, count, round(self.zero_runs * count), generator)
        values = torch.zeros(count, dtype=dtype, device=generator.device)
        # shares are relative to all elements
        values[~mask] = self._other_values(count - zeros, dtype, generator, 0.0, count)
        return values

    def _other_values(
        self, count: int, dtype: torch.dtype, generator: torch.Generator, zeros: float, total: int | None = None
    ) -> torch.Tensor:
        specials: list[torch.Tensor] = []
        free, device, total = count, generator.device, count if total is None else total
        for value, share in ((0.0, zeros), (math.nan, self.nan), (math.inf, self.inf), (-math.inf, self.minus_inf)):
            size = min(free, round(share * total))
            specials.append(torch.full((size,), value, dtype=dtype, device=device))
            free -= size
        size = min(free, round(self.denormals * total))
        specials.append(draw_denormals(size, dtype, self.low < 0, generator))
        special = torch.cat(specials)
        plain = self._plain(count - len(special), dtype, generator)
        if not len(special):
            return plain
        values = torch.empty(count, dtype=dtype, device=device)
        places = exactly(len(special), count, generator)
        mixed = sum(len(part) > 0 for part in specials) > 1
        values[places] = shuffled(special, generator) if mixed else special
        values[~places] = plain
        return values

    def _plain(self, count: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        if self.distinct is None or not count:
            return self.spread.draw(count, dtype, generator)
        kinds = min(count, max(1, self.distinct - sum(share > 0 for share in (self.zeros, self.inf, self.minus_inf))))
        values = self.spread.draw(kinds, dtype, generator).unique()
        for _ in range(ROUNDS):
            # floats that are close to each other can become equal in the dtype
            if len(values) < kinds:
                values = torch.cat([values, self.spread.draw(kinds, dtype, generator)]).unique()
        values = shuffled(values, generator)[:kinds]
        return shuffled(
            torch.cat([values, values[between(0, len(values) - 1, count - len(values), generator)]]), generator
        )

    @property
    def spread(self) -> Distribution:
        return Distribution(self.mean, self.std, self.low, self.high, self.shape, self.quantiles, self.whole)


Floats1D = NDArray[np.floating[Any]]  # real numbers (N,) of four or eight bytes

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_NUMPY_INTEGERS: dict[int, Any] = {4: np.int32, 8: np.int64}


@dataclass(frozen=True, slots=True)
class Kinds:
    zeros: int
    denormals: int
    nan: int
    inf: int
    minus_inf: int

    @property
    def special(self) -> int:
        return self.zeros + self.denormals + self.nan + self.inf + self.minus_inf


def as_floats(tensor: torch.Tensor) -> Floats1D:
    wide = tensor if tensor.itemsize > 3 else tensor.float()
    array: Floats1D = array_of(wide).reshape(-1)
    return array


def magnitudes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of floats without the sign bit, as integers, whose order is that of the absolute values."""
    integer = _INTEGERS[tensor.itemsize]
    return tensor.view(integer) & torch.iinfo(integer).max


@cache
def smallest(dtype: torch.dtype) -> int:
    return int(torch.tensor(torch.finfo(dtype).tiny, dtype=dtype).view(_INTEGERS[dtype.itemsize]))


def kinds_of(values: Floats1D, dtype: torch.dtype) -> Kinds:
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
    bits = _magnitudes(values)
    low, high = _bounds(dtype, values.dtype.itemsize)
    return (bits >= low) & (bits < high)


def draw_denormals(count: int, dtype: torch.dtype, signed: bool, generator: torch.Generator) -> torch.Tensor:
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
    integer = _NUMPY_INTEGERS[itemsize]
    real = np.float32 if itemsize == 4 else np.float64
    bounds = np.array([torch.finfo(dtype).tiny, math.inf], dtype=real).view(integer)
    return int(bounds[0]), int(bounds[1])


SHAPES = ("normal", "uniform", "quantiles")
_TAIL = (0.0, 0.001, 0.005, 0.01, 0.02)
# probabilities of the quantiles that are kept, denser in the tails
PROBABILITIES = (*_TAIL, *(at / 20 for at in range(1, 20)), *(1 - at for at in reversed(_TAIL)))
DIGITS = 9  # number of significant digits that distinguish any two 32-bit floats (IEEE 754-2019, 5.12.2)
FEW = 1024  # number of plain elements in a sample below which the whole tensor is searched for more


@dataclass(frozen=True, slots=True)
class Distribution:
    mean: float
    std: float
    low: float
    high: float
    shape: str = "normal"
    quantiles: list[float] | None = None
    whole: bool = False

    def draw(self, count: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
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
    mean, std, low, high, *short_marks = _shortened([mean, std, low, high, *marks], dtype)
    return Distribution(mean, std, low, high, shape, short_marks or None, whole)


def _shortened(values: list[float], dtype: torch.dtype) -> list[float]:
    if dtype == torch.float64:
        return values
    # a number next to the end of the dtype's range could be rounded out of it
    limits = torch.finfo(dtype)
    least, most = 2 * limits.tiny, limits.max / 2
    return [float(f"{value:.{DIGITS}g}") if least < abs(value) < most else value for value in values]


def _range(values: Floats1D, dtype: torch.dtype, ranked: Floats1D, kinds: Kinds) -> tuple[float, float]:
    if len(values) == len(ranked) + kinds.special:
        plain = ranked[[0, -1]]
    else:
        # zeros are counted separately, so a bound of zero does not belong to the plain elements
        plain = np.where(is_plain(values, dtype), values, ranked[0]) if kinds.special else values
    return float(plain.min()), float(plain.max())


def _shape(quantiles: list[float], mean: float, std: float, count: int) -> str:
    low, high = quantiles[0], quantiles[-1]
    # by how much the distribution functions of a sample and of its source differ by chance, plus a margin
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


TRIED = 1 << 15  # number of elements used to find the spread of the logits
STEPS = 24


@value_models.register("probabilities")
@dataclass(frozen=True, slots=True)
class Probabilities:
    """Value model of rows, along the last dimension, of non-negative numbers that add up to one.

    peak : mean over the rows of the largest probability
    zeros, denormals : share of all elements, 0 to 1
    """

    peak: float
    zeros: float
    denormals: float = 0.0

    priority: ClassVar[int] = 70
    examined_part: ClassVar[str] = ROWS

    @classmethod
    def fit(cls, tensor: torch.Tensor) -> Probabilities | None:
        if not tensor.dtype.is_floating_point or tensor.itemsize < 2 or tensor.dim() < 1 or tensor.shape[-1] < 2:
            return None
        # the sum of rounded numbers has the error of several roundings
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
        for value in (self.peak, self.zeros, self.denormals):
            checks.share(value, "a probability")
        if self.zeros + self.denormals > 1 + 1e-9:
            shares = f"{self.zeros} and {self.denormals}"
            raise FormatError(f"zeros and denormals: expected shares with a sum of at most 1, got {shares}")

    def draw(self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
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
        # a softmax underflows far below its maximum
        tiny = torch.finfo(small).tiny
        values = torch.where(lost, values, values.clamp(min=tiny))
        if denormals:
            filled = exactly(denormals, int(torch.count_nonzero(lost)), generator)
            special = torch.zeros(len(filled), dtype=small, device=device)
            special[filled] = draw_denormals(int(torch.count_nonzero(filled)), small, False, generator)
            values[lost] = special
        return values.to(dtype).reshape(shape)

    def _spread(self, logits: torch.Tensor, length: int) -> float:
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
