"""Value model of boxes and their overlap; from drawn boxes, non-maximum suppression keeps the recorded number."""

from __future__ import annotations

from bisect import bisect
from dataclasses import dataclass
from typing import ClassVar

import torch

from opgrip.traces.schema.arguments import FormatError
from opgrip.traces.values import drawing as checks
from opgrip.traces.values.drawing import at_quantiles, distinct, shuffled
from opgrip.traces.values.model import PIECES, leading, sample, value_models

QUERIES, OTHERS = 64, 512  # boxes whose overlaps are counted, and boxes with which each is compared
SPACING = 0.6  # distance of neighbouring boxes relative to their side; their intersection over union is 0.4 / 1.6
JITTER = 1e-3  # maximum displacement of a copied box, relative to its side
MAX_LAYERS = 60
MAX_CELLS = 1 << 31


@dataclass(frozen=True, slots=True)
class _Layer:
    size: tuple[float, float]
    step: tuple[float, float]
    cells: tuple[int, int]

    @property
    def room(self) -> int:
        return self.cells[0] * self.cells[1]


def overlapping(boxes: torch.Tensor) -> float:
    """Estimate the mean number of other boxes that a box overlaps with an intersection over union above one half."""
    part = boxes[:: -(-len(boxes) // OTHERS)]
    if len(part) < 2:
        return 0.0
    # columns are several times faster than rows of two
    others = part.T.contiguous()[:, None]
    queries = others[..., :: -(-len(part) // QUERIES)].mT
    sides = torch.minimum(queries[2:], others[2:]).sub_(torch.maximum(queries[:2], others[:2])).clamp_(min=0)
    one, other = ((each[2] - each[0]) * (each[3] - each[1]) for each in (queries, others))
    # equivalent to an intersection of more than half the union
    near = torch.count_nonzero(sides[0].mul_(sides[1]).mul_(3) > one + other, dim=1) - 1
    return near.clamp_(min=0).double().mean().item() * (len(boxes) - 1) / (len(part) - 1)


def copies(boxes: torch.Tensor, count: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    places = torch.arange(count, device=boxes.device)
    rows = boxes[places % len(boxes)]
    whole = bool((boxes == boxes.round()).all())
    if dtype in (torch.float32, torch.float64) and not whole:
        # rounding to a narrower dtype would displace them further than the jitter
        moved = torch.rand(rows.shape, dtype=rows.dtype, generator=generator, device=rows.device)
        sides = (rows[:, 2:] - rows[:, :2]).repeat(1, 2)
        rows = rows + sides * moved * JITTER * torch.tensor([1, 1, -1, -1], device=rows.device)
    return shuffled(rows, generator)


def draw_separate_boxes(
    count: int, low: list[float], high: list[float], widths: list[float], whole: bool, generator: torch.Generator
) -> torch.Tensor:
    layers = _layers(count, low, high, whole)
    device = generator.device
    pieces = []
    for layer, size in zip(layers, _shares(count, layers, widths), strict=True):
        # if all layers are full, the remaining boxes overlap others
        cells = distinct(size, 0, layer.room - 1, generator)
        cells = cells.repeat(-(-size // max(1, len(cells))))[:size]
        grid = torch.stack([cells % layer.cells[0], cells // layer.cells[0]], dim=1).double()
        corners = grid * torch.tensor(layer.step, dtype=torch.float64, device=device)
        corners += torch.tensor(low[:2], dtype=torch.float64, device=device)
        sides = torch.tensor(layer.size, dtype=torch.float64, device=device).expand(size, 2)
        pieces.append(torch.cat([corners, sides], dim=1))
    return torch.cat(pieces)


def _layers(count: int, low: list[float], high: list[float], whole: bool) -> list[_Layer]:
    layers: list[_Layer] = []
    # zero sides have no area to overlap with
    width, height = (side if side > 0 else 1.0 for side in high[2:])
    while len(layers) < MAX_LAYERS:
        steps = [SPACING * (side + 1) for side in (width, height)]
        if whole:
            steps = [float(-(-step // 1)) for step in steps]
        cells = [min(MAX_CELLS, int((high[at] - low[at]) // steps[at]) + 1) for at in (0, 1)]
        layers.append(_Layer((width, height), (steps[0], steps[1]), (cells[0], cells[1])))
        # reduces the area to a quarter: half of each side, or a quarter of only the longer one
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
GLANCED = 64  # number of leading elements that are examined first
SAMPLED = 1 << 14  # number of elements that are sorted for quantiles
PROBABILITIES = tuple(at / 8 for at in range(9))  # probabilities of the quantiles kept for each column
LARGEST = 1e15  # maximum distance of a corner from zero
CROWDED = 1.0  # mean number of overlapping boxes above which boxes are drawn in groups


@value_models.register("boxes")
@dataclass(frozen=True, slots=True)
class Boxes:
    """Value model of an (N, C) tensor of boxes x1 y1 x2 y2, which an image index may precede.

    first : index of the column with x1
    low, high : range of each column, with width and height instead of x2 and y2
    whole : for each column, True if it holds only integers
    quantiles : nine equidistant quantiles of each column
    overlap : mean number of other boxes that a box overlaps with an intersection over union above one half
    groups : number of boxes that a non-maximum suppression keeps, if its output was recorded
    """

    first: int
    low: list[float]
    high: list[float]
    whole: list[bool]
    quantiles: list[list[float]] | None = None
    overlap: float | None = None
    groups: int | None = None

    priority: ClassVar[int] = 80
    examined_part: ClassVar[str] = PIECES

    @classmethod
    def fit(cls, tensor: torch.Tensor) -> Boxes | None:
        if tensor.dim() != 2 or not 4 <= tensor.shape[1] <= MAX_COLUMNS or not tensor.dtype.is_floating_point:
            return None
        # an index and the first three corners can look like a box, so the box after an index is tried first
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
        low, high = columns.amin(dim=0).tolist(), columns.amax(dim=0).tolist()
        whole = (columns == columns.round()).all(dim=0).tolist()
        ranked = sample(columns, SAMPLED).sort(dim=0).values
        places = [round(at * (len(ranked) - 1)) for at in PROBABILITIES]
        quantiles = ranked[places].T.tolist()
        for levels, least, most in zip(quantiles, low, high, strict=True):
            levels[0], levels[-1] = least, most
        return cls(first, low, high, whole, quantiles, overlap)

    def check(self) -> None:
        checks.whole(self.first, "the first column of boxes", 0, 1)
        checks.listed(self.low, "columns of boxes", self.first + 4, MAX_COLUMNS)
        for column in (self.high, self.whole):
            checks.listed(column, "columns of boxes", len(self.low), len(self.low))
        for low, high, whole in zip(self.low, self.high, self.whole, strict=True):
            checks.rising([low, high], "a range of boxes", 2)
            checks.flag(whole, "whole numbers")
            if max(abs(low), abs(high)) > LARGEST:
                raise FormatError(f"coordinates of boxes: expected magnitudes up to {LARGEST}, got {low} to {high}")
        if self.quantiles is not None:
            checks.listed(self.quantiles, "columns of boxes", len(self.low), len(self.low))
            for levels, low, high in zip(self.quantiles, self.low, self.high, strict=True):
                checks.rising(levels, "quantiles of boxes", len(PROBABILITIES))
                checks.rising([low, levels[0], levels[-1], high], "quantiles of boxes and their range", 4)
        if self.overlap is not None:
            checks.finite(self.overlap, "an overlap")
            if self.overlap < 0:
                raise FormatError(f"overlap of boxes: expected at least 0, got {self.overlap}")
        if self.groups is not None:
            checks.whole(self.groups, "a count of groups", 1)

    def draw(self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        columns, numel = len(self.low), torch.Size(shape).numel()
        count = -(-numel // columns)
        rows = torch.stack([self._column(at, count, generator) for at in range(columns)], dim=1)
        corners = slice(self.first, self.first + 4)
        boxes = self._places(rows[:, corners], generator)
        boxes = torch.cat([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], dim=1)
        rows[:, corners] = boxes if len(boxes) == count else copies(boxes, count, dtype, generator)
        return rows.to(dtype).reshape(-1)[:numel].reshape(shape)

    def _column(self, at: int, count: int, generator: torch.Generator) -> torch.Tensor:
        if self.quantiles is not None:
            values = at_quantiles(self.quantiles[at], PROBABILITIES, count, generator)
        else:
            part = torch.rand(count, dtype=torch.float64, generator=generator, device=generator.device)
            values = part * (self.high[at] - self.low[at]) + self.low[at]
        return values.round() if self.whole[at] else values

    def _places(self, rows: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
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
    return rows[:, first + 2 : first + 4] - rows[:, first : first + 2]
