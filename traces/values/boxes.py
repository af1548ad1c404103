"""Rows of boxes: corners, with whatever stands before and after them in each row."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from opgrip.traces.arguments import FormatError
from opgrip.traces.values.model import value_models

MAX_COLUMNS = 8


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
    """

    first: int
    low: list[float]
    high: list[float]
    whole: list[bool]

    priority: ClassVar[int] = 20

    @classmethod
    def fit(cls, tensor: torch.Tensor) -> Boxes | None:
        """The model of a float tensor of four to eight columns whose rows hold boxes with an area."""
        if tensor.dim() != 2 or not 4 <= tensor.shape[1] <= MAX_COLUMNS or not tensor.dtype.is_floating_point:
            return None
        rows = tensor.double()
        if not bool(rows.isfinite().all()):
            return None
        # an index and the first three corners can look like a box, so the box behind an index is tried first
        for first in (1, 0) if rows.shape[1] > 4 else (0,):
            corners = rows[:, first : first + 4]
            sides = corners[:, 2:] - corners[:, :2]
            if bool((sides >= 0).all()) and float(sides.amax()) > 1:
                columns = rows.clone()
                columns[:, first + 2 : first + 4] = sides
                whole = (columns == columns.round()).all(dim=0)
                return cls(first, columns.amin(dim=0).tolist(), columns.amax(dim=0).tolist(), whole.tolist())
        return None

    def check(self) -> None:
        """Ranges of as many columns as a box has or more."""
        if not len(self.low) == len(self.high) == len(self.whole) <= MAX_COLUMNS or self.first not in (0, 1):
            raise FormatError("boxes whose columns do not fit together")
        if len(self.low) < self.first + 4:
            raise FormatError("boxes of fewer than four columns")
        bounds = zip(self.low, self.high, strict=True)
        if not all(math.isfinite(low) and math.isfinite(high) and low <= high for low, high in bounds):
            raise FormatError("boxes without ranges")

    def draw(self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        """Each column evenly from its range; corners from the drawn width and height."""
        device = generator.device
        low = torch.tensor(self.low, dtype=torch.float64, device=device)
        high = torch.tensor(self.high, dtype=torch.float64, device=device)
        rows = torch.rand((shape[0], len(self.low)), dtype=torch.float64, generator=generator, device=device)
        rows = rows * (high - low) + low
        whole = torch.tensor(self.whole, device=device)
        rows = torch.where(whole, rows.round(), rows)
        rows[:, self.first + 2 : self.first + 4] += rows[:, self.first : self.first + 2]
        return rows.reshape(shape).to(dtype)
