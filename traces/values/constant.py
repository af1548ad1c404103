"""One value in every element."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from opgrip.traces.values.exact import check_element, elements
from opgrip.traces.values.model import PIECES, value_models


@value_models.register("constant")
@dataclass(frozen=True, slots=True)
class Constant:
    """The value that all elements of a tensor of any size have, which may be nan."""

    value: bool | int | float | complex

    priority: ClassVar[int] = 10
    seen: ClassVar[str] = PIECES

    @classmethod
    def fit(cls, tensor: torch.Tensor) -> Constant | None:
        """The value, where there is but one."""
        first, last = (tensor[(at,) * tensor.dim()] for at in (0, -1))
        value, other = first.item(), last.item()
        if value != value:
            # nan is not equal to itself
            return cls(value) if other != other and bool(tensor.isnan().all()) else None
        return cls(value) if value == other and bool((tensor == first).all()) else None

    def check(self) -> None:
        """A number that a tensor can hold."""
        check_element(self.value)

    def draw(self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        """The value again."""
        return elements([self.value], dtype, generator.device)[0].expand(shape).clone()
