"""What value models draw with, in bounded memory, and checks of their fields."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from opgrip.traces.schema.arguments import FormatError

LOWEST, HIGHEST = -(1 << 63), (1 << 63) - 1
"""What a torch integer of 64 bits holds."""
UNSIGNED = (1 << 64) - 1


def whole(value: Any, what: str, low: int = LOWEST, high: int = HIGHEST) -> None:
    """A whole number from `low` to `high`, by default one of 64 bits."""
    if type(value) is not int or not low <= value <= high:
        raise FormatError(f"{what} that is no whole number from {low} to {high}: {str(value)[:40]}")


def finite(value: Any, what: str) -> None:
    """A finite number, of a size that a float holds."""
    if type(value) not in (int, float) or (not -UNSIGNED <= value <= UNSIGNED and type(value) is int):
        raise FormatError(f"{what} that is no number: {str(value)[:40]}")
    if not math.isfinite(value):
        raise FormatError(f"{what} that is not finite: {value}")


def share(value: Any, what: str) -> None:
    """A number from 0 to 1."""
    finite(value, what)
    if not 0 <= value <= 1:
        raise FormatError(f"{what} that is no share from 0 to 1: {value}")


def flag(value: Any, what: str) -> None:
    """True or false."""
    if type(value) is not bool:
        raise FormatError(f"{what} that is neither true nor false: {str(value)[:40]}")


def listed(values: Any, what: str, least: int, most: int) -> None:
    """A list of `least` to `most` items."""
    if not isinstance(values, list) or not least <= len(values) <= most:
        raise FormatError(f"{what} that is no list of {least} to {most} items")


def rising(values: Any, what: str, length: int) -> None:
    """A list of so many finite numbers, none smaller than the one before it, as quantiles are."""
    listed(values, what, length, length)
    for value in values:
        finite(value, what)
    if any(after < before for before, after in pairwise(values)):
        raise FormatError(f"{what} that does not ascend")


def counted(pairs: Any, what: str, most: int) -> None:
    """A list of at most so many pairs of a value and how often it occurs, all of 64 bits in sum."""
    listed(pairs, what, 0, most)
    for pair in pairs:
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise FormatError(f"{what} that holds {str(pair)[:40]}, no pair")
        whole(pair[0], what)
        whole(pair[1], what, 0)
    whole(sum(count for _, count in pairs), what, 0)


CELLS = 2000
"""Of one width: each probability of a quantile, in thousandths or in sixteenths, is where one ends."""
PIECE = 1 << 15
"""So many numbers at a time stay in a processor's cache, and torch does not wake other threads for them."""


def exactly(chosen: int, total: int, generator: torch.Generator) -> torch.Tensor:
    """A mask of `total` elements, exactly `chosen` of which are true, at random places."""
    device = generator.device
    chosen = max(0, min(chosen, total))
    if chosen in (0, total):
        return torch.full((total,), chosen > 0, device=device)
    mask = torch.rand(total, generator=generator, device=device) < chosen / total
    missing = chosen - int(torch.count_nonzero(mask))
    if missing:
        # each for itself first, and a few put right: a permutation of millions takes several times longer
        others = (mask == (missing < 0)).nonzero().reshape(-1)
        few = abs(missing)
        offset = torch.randint(len(others), (), generator=generator, device=device)
        mask[others[(torch.arange(few, device=device) * len(others) // few + offset) % len(others)]] = missing > 0
    return mask


def in_runs(chosen: int, total: int, runs: int, generator: torch.Generator) -> torch.Tensor:
    """A mask of `total` elements, exactly `chosen` of which are true, in so many runs at random places."""
    device = generator.device
    others = total - chosen
    if chosen in (0, total):
        return torch.full((total,), chosen > 0, device=device)
    runs = max(1, min(runs, chosen, others + 1))
    # a run goes before any of the other elements or behind the last, one to a place
    place = exactly(runs, others + 1, generator).nonzero().reshape(-1)
    ends = exactly(runs - 1, chosen - 1, generator).nonzero().reshape(-1) + 1
    ends = torch.cat([ends, ends.new_tensor([chosen])])
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    turns = torch.zeros(total + 1, dtype=torch.int8, device=device)
    turns[place + starts] = 1
    turns[place + ends] = -1
    return turns[:total].cumsum(0, dtype=torch.int8).bool()


def runs_of(mask: NDArray[np.bool_]) -> int:
    """In how many runs the true elements of a mask (N,) stand."""
    return int(np.count_nonzero(mask[1:] > mask[:-1])) + int(mask[0])


def shuffled(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The same elements in random order."""
    return values[torch.randperm(len(values), generator=generator, device=generator.device)]


def between(low: int, high: int, count: int, generator: torch.Generator) -> torch.Tensor:
    """Whole numbers from `low` to `high`, evenly."""
    # torch leaves the upper bound out, and one above the highest number is none of 64 bits
    bound = max(min(high + 1, HIGHEST), low + 1)
    return torch.randint(low, bound, (count,), generator=generator, device=generator.device)


def distinct(count: int, low: int, high: int, generator: torch.Generator) -> torch.Tensor:
    """As many different whole numbers from `low` to `high`, in random order; all of them where there are fewer."""
    width = max(0, high - low + 1)
    count = max(0, min(count, width))
    if width <= 4 * count + 1024:
        return torch.randperm(width, generator=generator, device=generator.device)[:count] + low
    numbers = between(low, high, count + count // 4 + 8, generator).unique()
    while len(numbers) < count:
        numbers = torch.cat([numbers, between(low, high, count, generator)]).unique()
    return shuffled(numbers, generator)[:count]


def parts(total: int, weights: torch.Tensor, most: int | None = None) -> torch.Tensor:
    """Whole numbers of at least one, in the proportion of weights, that add up to a total.

    Parameters
    ----------
    total : at least the number of parts
    weights : (P,) float64, one a part
    most : that a part may be, where the total allows it
    """
    steps = weights.cumsum(0)
    steps = (steps / steps[-1] * (total - len(weights))).long()
    sizes = 1 + steps.diff(prepend=steps.new_zeros(1))
    if most is None:
        return sizes
    capped_sizes = sizes.clamp(max=max(most, -(-total // len(weights))))
    room = sizes.clamp(max=0) + max(most, -(-total // len(weights))) - capped_sizes
    before = room.cumsum(0) - room
    return capped_sizes + torch.minimum(room, (total - int(capped_sizes.sum()) - before).clamp(min=0))


def at_quantiles(
    quantiles: list[float], probabilities: tuple[float, ...], count: int, generator: torch.Generator
) -> torch.Tensor:
    """Random numbers (float64) whose distribution function goes straight from each quantile to the next.

    Parameters
    ----------
    probabilities : of the quantiles, multiples of 1 / `CELLS`
    """
    device = generator.device
    knots = torch.tensor(probabilities, dtype=torch.float64)
    levels = torch.tensor(quantiles, dtype=torch.float64)
    # cells of one width are found by a product, which takes a seventh of the time of a search among the knots
    at = torch.arange(CELLS + 1, dtype=torch.float64) / CELLS
    knot = torch.bucketize(at, knots[1:-1], right=True)
    marks = _between_levels(levels, knot, (at - knots[knot]) / (knots[knot + 1] - knots[knot])).to(device)
    values = torch.empty(count, dtype=torch.float64, device=device)
    for piece in values.split(PIECE) if count else ():
        torch.rand(len(piece), dtype=torch.float64, generator=generator, device=device, out=piece)
        cell = piece.mul_(CELLS).long()
        piece.copy_(_between_levels(marks, cell, piece.sub_(cell)))
    return values


def _between_levels(levels: torch.Tensor, cell: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """What lies at a part of the way from the level of each cell to the next."""
    # not by their difference, which may be more than a float holds
    return levels[cell] * (1 - part) + levels[cell + 1] * part


def scaled(share: int, whole: int, size: int) -> int:
    """How many of `size` are as many as `share` of `whole`."""
    return share if size == whole else round(share * size / whole)
