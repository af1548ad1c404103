"""Value models of few values: all of a small tensor, or the one that a tensor consists of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from opgrip.traces.schema.arguments import FormatError
from opgrip.traces.values import drawing as checks
from opgrip.traces.values.drawing import HIGHEST, LOWEST, UNSIGNED
from opgrip.traces.values.model import PIECES, value_models

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
        checks.listed(self.data, "exact values", 1, MAX_ELEMENTS)
        for value in self.data:
            check_element(value)

    def draw(self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        """The values again; repeated or cut where the shape holds more or fewer."""
        values = elements(self.data, dtype, generator.device)
        count = torch.Size(shape).numel()
        return values.repeat(-(-count // len(self.data)))[:count].reshape(shape)


def check_element(value: Any) -> None:
    """A number that a tensor can hold."""
    if not isinstance(value, bool | int | float | complex):
        raise FormatError(f"a value that is no number: {str(value)[:40]}")
    if isinstance(value, int) and not LOWEST <= value <= UNSIGNED:
        raise FormatError(f"a whole number of more than 64 bits: {str(value)[:40]}")


def elements(data: list[bool | int | float | complex], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor (N,) of these numbers; where the dtype cannot hold one, what torch makes of it."""
    if dtype.is_complex:
        return torch.tensor([complex(value) for value in data], dtype=torch.complex128, device=device).to(dtype)
    real = [value.real for value in data]
    if dtype.is_floating_point or not all(isinstance(value, int) for value in real):
        return torch.tensor([float(value) for value in real], dtype=torch.float64, device=device).to(dtype)
    # torch reads whole numbers as of 64 bits with a sign; those without one are the same bits
    signed = [value if value <= HIGHEST else value - UNSIGNED - 1 for value in map(int, real)]
    return torch.tensor(signed, dtype=torch.int64, device=device).to(dtype)


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
