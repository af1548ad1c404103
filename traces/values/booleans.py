"""How many elements of a boolean tensor are true."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from opgrip.traces.arguments import FormatError
from opgrip.traces.values.model import value_models


@value_models.register("booleans")
@dataclass(frozen=True, slots=True)
class Booleans:
    """The number of true elements: what `nonzero` and `masked_select` take their output's size from."""

    true: int
    total: int

    priority: ClassVar[int] = 10

    @classmethod
    def fit(cls, tensor: torch.Tensor) -> Booleans | None:
        """The count, for boolean tensors."""
        if tensor.dtype != torch.bool:
            return None
        return cls(int(tensor.sum()), tensor.numel())

    def check(self) -> None:
        """Between none and all are true."""
        if not (type(self.true) is type(self.total) is int and 0 <= self.true <= self.total and self.total > 0):
            raise FormatError(f"{self.true} of {self.total} booleans cannot be true")

    def draw(self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        """As many true elements, at random places; the same share of them for another size."""
        count = torch.Size(shape).numel()
        true = round(self.true * count / self.total)
        values = torch.zeros(count, dtype=dtype, device=generator.device)
        values[torch.randperm(count, generator=generator, device=generator.device)[:true]] = True
        return values.reshape(shape)
