"""Value model of floating-point tensors: distribution, order, and shares of values that are not plain numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from opgrip.traces.schema.arguments import FormatError
from opgrip.traces.values import drawing as checks
from opgrip.traces.values.distribution import (
    PROBABILITIES,
    SHAPES,
    Distribution,
    as_floats,
    distribution_of,
    draw_denormals,
    kinds_of,
)
from opgrip.traces.values.drawing import between, exactly, in_runs, runs_of, shuffled
from opgrip.traces.values.model import PIECES, value_models
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
    quantiles : quantiles of the plain elements at `distribution.PROBABILITIES`; None for other shapes
    whole : True if all plain elements are integers
    distinct : number of different values, if an operator's output determines it
    zero_runs : number of runs of zeros in row-major order, relative to the number of elements; None without zeros. (The
        square root of a run of zeros takes a fifth of the time of scattered zeros.)
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
            raise FormatError(f"floats have a distribution of the unknown shape {str(self.shape)[:40]!r}")
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
