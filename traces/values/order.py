"""The order in which values stand: sorted, in runs, in blocks of equals, close to their neighbours, or none."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from opgrip.traces.arguments import FormatError
from opgrip.traces.values import checks
from opgrip.traces.values.drawing import exactly, shuffled
from opgrip.traces.values.model import leading

LOOKED_AT = 1 << 20
"""So many elements, the first ones, are compared with their neighbours."""
STEPPED = 1 << 15
"""So many elements, the first ones, are subtracted from their neighbours."""
CLOSE = 0.7
"""Neighbours are close to each other where they differ by less than this part of what any two elements do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ordered:
    """Base of a model whose elements have an order.

    Attributes
    ----------
    rises, falls : share of neighbours, in row-major order, of which the second is larger, smaller; None in old traces
    step : mean distance of neighbours
    by_row : every row along the last dimension is sorted, upwards where there are more rises
    """

    rises: float | None = None
    falls: float | None = None
    step: float | None = None
    by_row: bool = False

    def check_order(self) -> None:
        """Shares that make no more than a whole."""
        for value, what in ((self.rises, "a share of rises"), (self.falls, "a share of falls")):
            if value is not None:
                checks.share(value, what)
        if (self.rises is None) != (self.falls is None) or (self.rises or 0) + (self.falls or 0) > 1 + 1e-9:
            raise FormatError("rises and falls that do not fit together")
        if self.step is not None:
            checks.finite(self.step, "a step")
        checks.flag(self.by_row, "sorted rows")

    def arranged(self, values: torch.Tensor, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        """Values in that order.

        Parameters
        ----------
        values : (N,), in random order
        shape : of the tensor that they are for
        """
        pairs = len(values) - 1
        if self.rises is None or self.falls is None or pairs < 1:
            return values
        downwards = self.falls > self.rises
        if self.by_row and len(shape) > 1:
            return values.reshape(-1, shape[-1]).sort(dim=-1, descending=downwards).values.reshape(-1)
        rises, falls = round(self.rises * pairs), round(self.falls * pairs)
        if min(rises, falls) == 0:
            return values.sort(descending=downwards).values
        step = None if self.step is None else self.step * pairs / (rises + falls)
        if pairs - rises - falls > 0.02 * pairs:
            blocks = _blocks(values, rises + falls + 1, generator)
            if blocks is not None:
                units, lengths = blocks
                order = _order(units, rises, falls, step, generator)
                return units[order].repeat_interleave(lengths[order])
        return values[_order(values, rises, falls, step, generator)]


def order_of(tensor: torch.Tensor) -> dict[str, Any]:
    """The fields of `Ordered` for a tensor."""
    part = leading(tensor, LOOKED_AT)
    flat = part.reshape(-1)
    pairs = len(flat) - 1
    if pairs < 1:
        return {}
    rising, falling = (flat[1:] > flat[:-1]), (flat[1:] < flat[:-1])
    rises, falls = int(torch.count_nonzero(rising)), int(torch.count_nonzero(falling))
    apart = flat[: STEPPED + 1].double().diff().abs()
    step = apart.mean().item()
    if not math.isfinite(step):
        apart = apart[apart.isfinite()]
        step = apart.mean().item() if len(apart) else 0.0
    by_row = False
    if part.dim() > 1 and part.shape[-1] > 2 and 0 < min(rises, falls) < len(flat) // part.shape[-1]:
        # rows that are sorted turn back nowhere but between them
        turns = falling if falls < rises else rising
        between = turns[part.shape[-1] - 1 :: part.shape[-1]]
        by_row = int(torch.count_nonzero(between)) == min(rises, falls)
    return {"rises": rises / pairs, "falls": falls / pairs, "step": step, "by_row": by_row}


def _blocks(values: torch.Tensor, count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Equal values put together to so many blocks: the value and length of each, in random order.

    None where the equal neighbours that there are come of themselves among values in random order.
    """
    ranked = values.sort().values
    total = len(ranked)
    changes = ranked[1:] != ranked[:-1]
    ends = changes.nonzero().reshape(-1) + 1
    sizes = torch.cat([ends, ends.new_tensor([total])]).diff(prepend=ends.new_zeros(1)).double()
    chance = float((sizes * sizes).sum()) / total**2
    by_chance = total * chance
    if total - count < 1.2 * by_chance + 4 * math.sqrt(by_chance + 1):
        return None
    # blocks of equal value that come to lie side by side are one
    count = min(total, max(len(sizes), round(count / max(1 - chance, 0.05))))
    inside = (~changes).nonzero().reshape(-1) + 1
    cuts = inside[exactly(count - len(sizes), len(inside), generator)]
    starts = torch.cat([ends.new_zeros(1), ends, cuts]).sort().values
    lengths = starts.diff(append=starts.new_tensor([total]))
    mixed = torch.randperm(len(starts), generator=generator, device=values.device)
    return ranked[starts[mixed]], lengths[mixed]


def _order(
    values: torch.Tensor, rises: int, falls: int, step: float | None, generator: torch.Generator
) -> torch.Tensor:
    """Places to take values, which are in random order, from."""
    total, device = len(values), values.device
    places = torch.arange(total, device=device)
    turns = min(rises, falls)
    if turns <= (total - 1) // 4:
        ranked = values.argsort(stable=True, descending=falls > rises)
        runs = shuffled(places * (turns + 1) // total, generator)
        return ranked[runs[ranked].argsort(stable=True)]
    apart = values[: STEPPED + 1].double().diff().abs()
    apart = apart[apart.isfinite() & (apart > 0)]
    usual = apart.mean().item() if len(apart) else 0.0
    if step is None or not 0 < step < CLOSE * usual:
        return places
    # a random walk between two walls visits all ranks alike; its mean step is 0.8 times its spread, and that of two
    # elements at random a third of the way
    noise = torch.randn(total, dtype=torch.float64, generator=generator, device=device)
    walk = (noise * (step / usual / 3 / 0.8)).cumsum(0)
    folded = (walk.remainder(2) - 1).abs()
    order = torch.empty_like(places)
    order[folded.argsort()] = values.argsort()
    return order
