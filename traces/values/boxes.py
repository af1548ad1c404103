"""Rows of boxes: corners, with whatever stands before and after them in each row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from opgrip.traces.schema.arguments import FormatError
from opgrip.traces.values import checks
from opgrip.traces.values.box_layout import copies, draw_separate_boxes, overlapping
from opgrip.traces.values.drawing import at_quantiles
from opgrip.traces.values.model import PIECES, leading, sample, value_models

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
