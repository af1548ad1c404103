"""The values themselves, of a tensor small enough."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from opgrip.traces.arguments import FormatError, leaves
from opgrip.traces.values.model import value_models

MAX_ELEMENTS = 64


@value_models.register("exact")
@dataclass(frozen=True, slots=True)
class Exact:
    """All values of a tensor of at most 64 elements, in order."""

    data: list[bool | int | float | complex]

    priority: ClassVar[int] = 0

    @classmethod
    def fit(cls, tensor: torch.Tensor) -> Exact | None:
        """The values, where they are few."""
        if tensor.numel() > MAX_ELEMENTS:
            return None
        return cls(tensor.reshape(-1).tolist())

    def check(self) -> None:
        """Numbers only."""
        values = list(leaves(self.data))
        if not values or not all(isinstance(value, bool | int | float | complex) for value in values):
            raise FormatError("exact values that are not numbers")

    def draw(self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        """The values again; repeated or cut where the shape holds more or fewer."""
        values = torch.tensor(self.data, device=generator.device).to(dtype)
        count = torch.Size(shape).numel()
        return values.repeat(-(-count // len(self.data)))[:count].reshape(shape)
