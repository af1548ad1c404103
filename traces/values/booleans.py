"""How many elements of a boolean tensor are true, and in how many pieces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from opgrip.traces.schema.arguments import FormatError
from opgrip.traces.values import drawing as checks
from opgrip.traces.values.drawing import exactly, in_runs, runs_of, scaled
from opgrip.traces.values.model import PIECES, value_models
from opgrip.traces.values.tensor_arrays import array_of


@value_models.register("booleans")
@dataclass(frozen=True, slots=True)
class Booleans:
    """The number of true elements: what `nonzero` and `masked_select` take their output's size from.

    Attributes
    ----------
    runs : pieces, in row-major order, in which all elements are true; None in old traces
    """

    true: int
    total: int
    runs: int | None = None

    priority: ClassVar[int] = 20
    seen: ClassVar[str] = PIECES

    @classmethod
    def fit(cls, tensor: torch.Tensor) -> Booleans | None:
        """The counts, for boolean tensors."""
        if tensor.dtype != torch.bool:
            return None
        flat = array_of(tensor).reshape(-1)
        return cls(int(np.count_nonzero(flat)), len(flat), runs_of(flat))

    def check(self) -> None:
        """Between none and all are true, in as many runs as there is room for."""
        checks.whole(self.total, "a count of booleans", 1)
        checks.whole(self.true, "a count of true booleans", 0, self.total)
        if self.runs is not None:
            checks.whole(self.runs, "a count of runs", 0, min(self.true, self.total - self.true + 1))
            if self.true and not self.runs:
                raise FormatError("true booleans without a run")

    def draw(self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        """As many true elements, in as many runs, at random places; the same share of them for another size."""
        count = torch.Size(shape).numel()
        true = scaled(self.true, self.total, count)
        if self.runs is None or true in (0, count):
            return exactly(true, count, generator).reshape(shape).to(dtype)
        return in_runs(true, count, scaled(self.runs, self.total, count), generator).reshape(shape).to(dtype)
