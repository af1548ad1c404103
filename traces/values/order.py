"""The order of a tensor's values, and the value model of permutations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from opgrip.traces.schema.arguments import FormatError
from opgrip.traces.values import drawing as checks
from opgrip.traces.values.drawing import distinct, exactly, shuffled
from opgrip.traces.values.model import MOST, array_of, pieces, value_models

LOOKED_AT = 1 << 20  # number of leading elements that are compared with their neighbours
STEPPED = 1 << 15  # number of leading elements whose differences to their neighbours are computed
SHARE_DIGITS = 10  # digits after the point, enough to recover the number of rises among the examined elements
STEP_DIGITS = 6  # number of significant digits of a mean difference
TRIES = 8  # number of fixed-point iterations
CLOSE = 0.7  # limit of the mean difference of neighbours, relative to random pairs, below which they are close
WALK = 1 << 16  # number of elements in a random walk, few enough to be sorted within the processor's caches
SORTED_BY_NUMPY = (torch.float32, torch.float64, torch.int32, torch.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ordered:
    """Base class of value models that keep whether neighbouring elements rise or fall.

    rises, falls : shares of neighbouring pairs, in row-major order, in which the second element is larger (`rises`) or
        smaller (`falls`)
    step : mean absolute difference of neighbours
    by_row : True if every row along the last dimension is sorted
    """

    rises: float | None = None
    falls: float | None = None
    step: float | None = None
    by_row: bool = False

    def check_order(self) -> None:
        for value, what in ((self.rises, "a share of rises"), (self.falls, "a share of falls")):
            if value is not None:
                checks.share(value, what)
        if (self.rises is None) != (self.falls is None) or (self.rises or 0) + (self.falls or 0) > 1 + 1e-9:
            shares = f"{self.rises} and {self.falls}"
            raise FormatError(f"shares of rises and falls: expected both, with a sum of at most 1, got {shares}")
        if self.step is not None:
            checks.finite(self.step, "a step")
            if self.step < 0:
                raise FormatError(f"mean difference of neighbours: expected at least 0, got {self.step}")
        checks.flag(self.by_row, "sorted rows")

    def arranged(self, values: torch.Tensor, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        """Rearrange values, (N,), so that neighbours rise and fall about as often as recorded."""
        pairs = len(values) - 1
        if self.rises is None or self.falls is None or pairs < 1:
            return values
        downwards = self.falls > self.rises
        if self.by_row and len(shape) > 1:
            return values.reshape(-1, shape[-1]).sort(dim=-1, descending=downwards).values.reshape(-1)
        rises, falls = round(self.rises * pairs), round(self.falls * pairs)
        turns, changes = min(rises, falls), rises + falls
        if turns <= changes // 4:
            return _in_runs(values, turns + 1, downwards, generator)
        usual, differing = _mean_step(_as_array(values)), int(torch.count_nonzero(values[1:] != values[:-1]))
        # only pairs of different neighbours show whether neighbours are close
        if self.step and self.step / changes < CLOSE * usual / max(1, differing):
            return _random_walk(values, self.step, usual, generator)
        return values if changes > 0.98 * pairs else _in_blocks(values, changes + 1, generator)


def last_length(tensor: torch.Tensor) -> int:
    return tensor.shape[-1] if tensor.dim() else 1


def order_of(values: NDArray[Any], row: int) -> dict[str, Any]:
    flat = values[: max(1, LOOKED_AT // row) * row if row < len(values) else LOOKED_AT]
    pairs = len(flat) - 1
    if pairs < 1:
        return {}
    rising, falling = (flat[1:] > flat[:-1]), (flat[1:] < flat[:-1])
    rises, falls = int(np.count_nonzero(rising)), int(np.count_nonzero(falling))
    by_row = False
    if 2 < row < len(flat) and 0 < min(rises, falls) < len(flat) // row:
        # in sorted rows, the direction only reverses between rows
        turns = falling if falls < rises else rising
        by_row = int(np.count_nonzero(turns[row - 1 :: row])) == min(rises, falls)
    shares = {name: round(count / pairs, SHARE_DIGITS) for name, count in (("rises", rises), ("falls", falls))}
    return {**shares, "step": float(f"{_mean_step(flat):.{STEP_DIGITS}g}"), "by_row": by_row}


def _in_runs(values: torch.Tensor, count: int, downwards: bool, generator: torch.Generator) -> torch.Tensor:
    ranked = values.sort(descending=downwards).values
    if count == 1:
        return ranked
    runs = shuffled(torch.arange(len(values), device=values.device) * count // len(values), generator)
    return ranked[runs.argsort(stable=True)]


def _as_array(values: torch.Tensor) -> NDArray[Any]:
    return values.double().cpu().numpy()


def _mean_step(values: NDArray[Any]) -> float:
    with np.errstate(over="ignore", invalid="ignore"):
        distances = np.abs(np.diff(values[: STEPPED + 1].astype(np.float64)))
        mean = float(distances.mean()) if len(distances) else 0.0
    if math.isfinite(mean):
        return mean
    distances = distances[np.isfinite(distances)]
    return float(distances.mean()) if len(distances) else 0.0


def _random_walk(values: torch.Tensor, step: float, usual: float, generator: torch.Generator) -> torch.Tensor:
    # values are in random order, so any part is representative and each row can have its own walk
    sample, rest = values[:WALK], values[WALK:]
    # the mean step of the walk is 0.8 times its spread; random pairs are a third of the range apart on average
    spread = step / usual / 3 / 0.8
    ranked = sample.sort().values
    noise = torch.randn(len(sample), dtype=torch.float64, generator=generator, device=values.device)
    for _ in range(3):
        walk = _walk_of_rows(ranked[None], noise[None], spread)[0]
        # adjusts for values that are denser in some ranges than in others
        spread *= step / max(_mean_step(_as_array(walk)), 1e-3 * step)
    walks = [walk]
    for rows in (rest[: len(rest) // WALK * WALK].reshape(-1, WALK), rest[len(rest) // WALK * WALK :][None]):
        noise = torch.randn(rows.shape, dtype=torch.float64, generator=generator, device=values.device)
        walks.append(_walk_of_rows(_sorted_rows(rows), noise, spread).reshape(-1))
    return torch.cat(walks)


def _walk_of_rows(ranked: torch.Tensor, noise: torch.Tensor, spread: float) -> torch.Tensor:
    folded = ((noise * spread).cumsum(-1).remainder(2) - 1).abs()
    order = torch.from_numpy(folded.numpy().argsort(axis=-1)) if folded.is_cpu else folded.argsort(dim=-1)
    return torch.empty_like(ranked).scatter_(-1, order, ranked)


def _sorted_rows(rows: torch.Tensor) -> torch.Tensor:
    # numpy sorts several times faster than torch on a CPU
    if rows.is_cpu and rows.dtype in SORTED_BY_NUMPY:
        return torch.from_numpy(np.sort(rows.numpy(), axis=-1))
    return rows.sort(dim=-1).values


def _in_blocks(values: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
    ranked = values.sort().values
    total = len(ranked)
    changes = ranked[1:] != ranked[:-1]
    ends = changes.nonzero().reshape(-1) + 1
    sizes = torch.cat([ends, ends.new_tensor([total])]).diff(prepend=ends.new_zeros(1)).double()
    by_chance = float((sizes * sizes).sum()) / total
    if total - count < 1.2 * by_chance + 4 * math.sqrt(by_chance + 1):
        return values
    inside = (~changes).nonzero().reshape(-1) + 1
    weights = (sizes - 1) / len(inside)
    blocks = target_blocks = float(max(count, len(sizes)))
    for _ in range(TRIES):
        # adjacent blocks of equal value merge into one
        each = 1 + (blocks - len(sizes)) * weights
        blocks = min(float(total), target_blocks + float((each * (each - 1)).sum()) / blocks)
    cuts = inside[exactly(round(blocks) - len(sizes), len(inside), generator)]
    starts = torch.cat([ends.new_zeros(1), ends, cuts]).sort().values
    lengths = starts.diff(append=starts.new_tensor([total]))
    mixed = torch.randperm(len(starts), generator=generator, device=values.device)
    return ranked[starts[mixed]].repeat_interleave(lengths[mixed])


@value_models.register("permutation")
@dataclass(frozen=True, slots=True)
class Permutation(Ordered):
    """Value model of a permutation of the integers from `low` to `high`, such as a result of `argsort`."""

    low: int
    high: int

    priority: ClassVar[int] = 40

    @classmethod
    def fit(cls, tensor: torch.Tensor) -> Permutation | None:
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool:
            return None
        if tensor.itemsize == 1 and tensor.numel() > 256:
            return None
        if tensor.numel() > MOST and len(np.unique(array_of((part := pieces(tensor)).to(torch.int64)))) < part.numel():
            return None
        values = array_of(tensor.to(torch.int64)).reshape(-1)
        low, high = int(values.min()), int(values.max())
        count = len(values)
        # the sum rules out most other tensors; it may overflow in the same way on both sides
        if high - low + 1 != count or (int(values.sum()) - (low + high) * count // 2) % (1 << 64):
            return None
        if int(np.bincount(values - low).max()) != 1:
            return None
        return cls(low, high, **order_of(values, last_length(tensor)))

    def check(self) -> None:
        checks.whole(self.low, "a lower bound")
        checks.whole(self.high, "an upper bound", self.low)
        self.check_order()

    def draw(self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        count, width = torch.Size(shape).numel(), self.high - self.low + 1
        if count <= width:
            values = distinct(count, self.low, self.high, generator)
        else:
            values = torch.randperm(count, generator=generator, device=generator.device) % width + self.low
        return self.arranged(values, shape, generator).to(dtype).reshape(shape)
