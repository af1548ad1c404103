"""Rows of boxes, how they overlap, and a layout that keeps as many in a non-maximum suppression."""

from __future__ import annotations

from bisect import bisect
from dataclasses import dataclass
from typing import ClassVar

import torch

from opgrip.traces.schema.arguments import FormatError
from opgrip.traces.values import drawing as checks
from opgrip.traces.values.drawing import at_quantiles, distinct, shuffled
from opgrip.traces.values.model import PIECES, leading, sample, value_models

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


MAX_COLUMNS = 8
GLANCED = 64
"""So many elements, the first ones, are looked at before all are."""
SAMPLED = 1 << 14
"""So many elements are sorted for quantiles."""
PROBABILITIES = tuple(at / 8 for at in range(9))
"""Those of the quantiles that are kept of each column."""
LARGEST = 1e15
"""No corner is farther from zero."""
CROWDED = 1.0
"""From so many others on that a box overlaps, boxes are drawn in groups."""


@value_models.register("boxes")
@dataclass(frozen=True, slots=True)
class Boxes:
    """Ranges of each column of an (N, C) tensor that holds boxes x1 y1 x2 y2, or an index and then a box.

    Drawn as such, x2 stays right of x1, y2 below y1, and an image's index stays one: `roi_align` reads memory at it.

    Attributes
    ----------
    first : column of x1
    low, high : range of each column; of the width and height in the place of x2 and y2
    whole : for each column, whether it holds whole numbers only
    quantiles : of each column, nine at equal distances; None in old traces
    overlap : to how many others a box has an intersection over union above one half, in the mean; None in old traces
    groups : how many boxes a non-maximum suppression keeps, where its output told
    """

    first: int
    low: list[float]
    high: list[float]
    whole: list[bool]
    quantiles: list[list[float]] | None = None
    overlap: float | None = None
    groups: int | None = None

    priority: ClassVar[int] = 80
    seen: ClassVar[str] = PIECES

    @classmethod
    def fit(cls, tensor: torch.Tensor) -> Boxes | None:
        """The model of a float tensor of four to eight columns whose rows hold boxes with an area."""
        if tensor.dim() != 2 or not 4 <= tensor.shape[1] <= MAX_COLUMNS or not tensor.dtype.is_floating_point:
            return None
        # an index and the first three corners can look like a box, so the box behind an index is tried first
        head = leading(tensor, GLANCED).float()
        firsts = [first for first in (1, 0) if tensor.shape[1] - first >= 4]
        firsts = [first for first in firsts if bool((_sides(head, first) >= 0).all())]
        if not firsts:
            return None
        rows = tensor if tensor.itemsize > 3 else tensor.float()
        if not float(rows.abs().amax()) < LARGEST:
            return None
        for first in firsts:
            sides = _sides(rows, first)
            if float(sides.amin()) >= 0 and float(sides.amax()) > 1:
                columns = rows.clone()
                columns[:, first + 2 : first + 4] = sides
                return cls._of(first, columns, overlapping(rows[:, first : first + 4]))
        return None

    @classmethod
    def _of(cls, first: int, columns: torch.Tensor, overlap: float) -> Boxes:
        """The model of rows x1 y1 width height."""
        low, high = columns.amin(dim=0).tolist(), columns.amax(dim=0).tolist()
        whole = (columns == columns.round()).all(dim=0).tolist()
        ranked = sample(columns, SAMPLED).sort(dim=0).values
        places = [round(at * (len(ranked) - 1)) for at in PROBABILITIES]
        quantiles = ranked[places].T.tolist()
        for levels, least, most in zip(quantiles, low, high, strict=True):
            levels[0], levels[-1] = least, most
        return cls(first, low, high, whole, quantiles, overlap)

    def check(self) -> None:
        """Ranges of as many columns as a box has or more."""
        checks.whole(self.first, "the first column of boxes", 0, 1)
        checks.listed(self.low, "columns of boxes", self.first + 4, MAX_COLUMNS)
        for column in (self.high, self.whole):
            checks.listed(column, "columns of boxes", len(self.low), len(self.low))
        for low, high, whole in zip(self.low, self.high, self.whole, strict=True):
            checks.rising([low, high], "a range of boxes", 2)
            checks.flag(whole, "whole numbers")
            if max(abs(low), abs(high)) > LARGEST:
                raise FormatError("boxes that are too far away")
        if self.quantiles is not None:
            checks.listed(self.quantiles, "columns of boxes", len(self.low), len(self.low))
            for levels, low, high in zip(self.quantiles, self.low, self.high, strict=True):
                checks.rising(levels, "quantiles of boxes", len(PROBABILITIES))
                checks.rising([low, levels[0], levels[-1], high], "quantiles of boxes and their range", 4)
        if self.overlap is not None:
            checks.finite(self.overlap, "an overlap")
            if self.overlap < 0:
                raise FormatError("an overlap below zero")
        if self.groups is not None:
            checks.whole(self.groups, "a count of groups", 1)

    def draw(self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        """Each column by its quantiles, or evenly from its range; corners from the drawn sizes.

        Where it was told how many boxes are kept, so many lie apart, and the others are nearly copies of these.
        """
        columns, numel = len(self.low), torch.Size(shape).numel()
        count = -(-numel // columns)
        rows = torch.stack([self._column(at, count, generator) for at in range(columns)], dim=1)
        corners = slice(self.first, self.first + 4)
        boxes = self._places(rows[:, corners], generator)
        boxes = torch.cat([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], dim=1)
        rows[:, corners] = boxes if len(boxes) == count else copies(boxes, count, dtype, generator)
        return rows.to(dtype).reshape(-1)[:numel].reshape(shape)

    def _column(self, at: int, count: int, generator: torch.Generator) -> torch.Tensor:
        """So many elements of a column."""
        if self.quantiles is not None:
            values = at_quantiles(self.quantiles[at], PROBABILITIES, count, generator)
        else:
            part = torch.rand(count, dtype=torch.float64, generator=generator, device=generator.device)
            values = part * (self.high[at] - self.low[at]) + self.low[at]
        return values.round() if self.whole[at] else values

    def _places(self, rows: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Of boxes x1 y1 width height that were drawn each for itself, those that others are to be copies of."""
        if self.groups is not None:
            corners = slice(self.first, self.first + 4)
            low, high = self.low[corners], self.high[corners]
            widths = [low[2], high[2]] if self.quantiles is None else self.quantiles[self.first + 2]
            return draw_separate_boxes(
                min(self.groups, len(rows)), low, high, widths, all(self.whole[corners]), generator
            )
        if self.overlap is not None and self.overlap >= CROWDED:
            return rows[: max(1, round(len(rows) / (1 + self.overlap)))]
        return rows


def _sides(rows: torch.Tensor, first: int) -> torch.Tensor:
    """Widths and heights (N, 2) of rows whose column `first` is x1."""
    return rows[:, first + 2 : first + 4] - rows[:, first : first + 2]
