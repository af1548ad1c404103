"""How boxes overlap: measured, and laid out so that a non-maximum suppression keeps as many as it should."""

from __future__ import annotations

from bisect import bisect
from dataclasses import dataclass

import torch

from opgrip.traces.values.drawing import distinct, shuffled

QUERIES, OTHERS = 64, 512
"""So many boxes are compared with so many."""
SPACING = 0.6
"""Of a side, between neighbours of equal size: an intersection of 0.4 over a union of 1.6, a quarter."""
JITTER = 1e-3
"""Of a side, by which a copy is moved at most."""
MAX_LAYERS = 60
MAX_CELLS = 1 << 31


@dataclass(frozen=True, slots=True)
class _Layer:
    """Boxes of one size on a grid.

    Attributes
    ----------
    size : width and height
    step : between neighbours, in x and y
    cells : of the grid, in x and y
    """

    size: tuple[float, float]
    step: tuple[float, float]
    cells: tuple[int, int]

    @property
    def room(self) -> int:
        return self.cells[0] * self.cells[1]


def overlapping(boxes: torch.Tensor) -> float:
    """To how many of the other boxes (N, 4) one has an intersection over union above one half, in the mean."""
    part = boxes[:: -(-len(boxes) // OTHERS)]
    if len(part) < 2:
        return 0.0
    # column by column: several times as fast as by rows of two
    others = part.T.contiguous()[:, None]
    queries = others[..., :: -(-len(part) // QUERIES)].mT
    sides = torch.minimum(queries[2:], others[2:]).sub_(torch.maximum(queries[:2], others[:2])).clamp_(min=0)
    one, other = ((each[2] - each[0]) * (each[3] - each[1]) for each in (queries, others))
    # that is, an intersection of more than half the union
    near = torch.count_nonzero(sides[0].mul_(sides[1]).mul_(3) > one + other, dim=1) - 1
    return near.clamp_(min=0).double().mean().item() * (len(boxes) - 1) / (len(part) - 1)


def copies(boxes: torch.Tensor, count: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """So many boxes (N, 4), x1 y1 x2 y2, in random order: these, and about as many near copies of each.

    Parameters
    ----------
    boxes : (K, 4) float64
    dtype : that they will have
    """
    places = torch.arange(count, device=boxes.device)
    rows = boxes[places % len(boxes)]
    whole = bool((boxes == boxes.round()).all())
    if dtype in (torch.float32, torch.float64) and not whole:
        # a narrower dtype would move them by more than that
        moved = torch.rand(rows.shape, dtype=rows.dtype, generator=generator, device=rows.device)
        sides = (rows[:, 2:] - rows[:, :2]).repeat(1, 2)
        rows = rows + sides * moved * JITTER * torch.tensor([1, 1, -1, -1], device=rows.device)
    return shuffled(rows, generator)


def draw_separate_boxes(
    count: int,
    low: list[float],
    high: list[float],
    widths: list[float],
    whole: bool,
    generator: torch.Generator,
) -> torch.Tensor:
    """So many boxes (N, 4), x1 y1 width height, no two of which have an intersection over union of 0.3.

    They lie on grids, one a layer. Sides halve from layer to layer, so that a box of one is at most a quarter of any
    of another. All this holds whether sides are counted as x2 - x1 or as one more.

    Parameters
    ----------
    low, high : range of each column; smaller sides are taken where there is no room for so many boxes else
    widths : quantiles of the width, at equal distances
    whole : all columns are whole numbers
    """
    layers = _layers(count, low, high, whole)
    device = generator.device
    pieces = []
    for layer, size in zip(layers, _shares(count, layers, widths), strict=True):
        # more than there is room for, where no layer has any left: some lie upon others
        cells = distinct(size, 0, layer.room - 1, generator)
        cells = cells.repeat(-(-size // max(1, len(cells))))[:size]
        grid = torch.stack([cells % layer.cells[0], cells // layer.cells[0]], dim=1).double()
        corners = grid * torch.tensor(layer.step, dtype=torch.float64, device=device)
        corners += torch.tensor(low[:2], dtype=torch.float64, device=device)
        sides = torch.tensor(layer.size, dtype=torch.float64, device=device).expand(size, 2)
        pieces.append(torch.cat([corners, sides], dim=1))
    return torch.cat(pieces)


def _layers(count: int, low: list[float], high: list[float], whole: bool) -> list[_Layer]:
    """Grids from the largest boxes to the smallest, and on until there is room for so many."""
    layers: list[_Layer] = []
    # zero sides have no area to overlap with
    width, height = (side if side > 0 else 1.0 for side in high[2:])
    while len(layers) < MAX_LAYERS:
        steps = [SPACING * (side + 1) for side in (width, height)]
        if whole:
            steps = [float(-(-step // 1)) for step in steps]
        cells = [min(MAX_CELLS, int((high[at] - low[at]) // steps[at]) + 1) for at in (0, 1)]
        layers.append(_Layer((width, height), (steps[0], steps[1]), (cells[0], cells[1])))
        # a quarter of the area: of each side with its one half, or of the longer one alone
        if min(width, height) >= 3:
            width, height = (width - 1) / 2, (height - 1) / 2
        elif max(width, height) >= 7:
            width, height = (width, (height - 3) / 4) if height > width else ((width - 3) / 4, height)
        else:
            break
        if whole:
            width, height = float(width // 1), float(height // 1)
        small = width < low[2] and height < low[3]
        if small and sum(layer.room for layer in layers) >= count:
            break
    return layers


def _shares(count: int, layers: list[_Layer], widths: list[float]) -> list[int]:
    """How many boxes each layer has: as many as there are of about that width, while there is room."""
    edges = [layer.size[0] for layer in layers[1:]]
    above = [1 - bisect(widths, edge) / len(widths) for edge in edges] + [1.0]
    shares, before = [], 0.0
    for layer, share in zip(layers, above, strict=True):
        shares.append(min(layer.room, round(count * max(0.0, share - before))))
        before = max(before, share)
    missing = count - sum(shares)
    for at, layer in enumerate(layers):
        more = max(-shares[at], min(missing, layer.room - shares[at]))
        shares[at] += more
        missing -= more
    shares[-1] += missing
    return shares
