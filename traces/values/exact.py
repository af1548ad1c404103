"""Value models of tensors with few values: all elements of a small tensor, or the value of a constant one."""

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
        """Return the model of a small tensor, or None for a larger one."""
        if tensor.numel() > MAX_ELEMENTS:
            return None
        return cls(tensor.reshape(-1).tolist())

    def check(self) -> None:
        """Raise `FormatError` unless all values are numbers."""
        checks.listed(self.data, "exact values", 1, MAX_ELEMENTS)
        for value in self.data:
            check_element(value)

    def draw(self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        """Return the values, repeated or cut to fit the shape."""
        values = elements(self.data, dtype, generator.device)
        count = torch.Size(shape).numel()
        return values.repeat(-(-count // len(self.data)))[:count].reshape(shape)


def check_element(value: Any) -> None:
    """Raise `FormatError` unless a value is a number that a tensor can hold."""
    if not isinstance(value, bool | int | float | complex):
        raise FormatError(f"a value that is not a number: {str(value)[:40]}")
    if isinstance(value, int) and not LOWEST <= value <= UNSIGNED:
        raise FormatError(f"an integer of more than 64 bits: {str(value)[:40]}")


def elements(data: list[bool | int | float | complex], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor (N,) of these numbers, converted by torch's rules if the dtype cannot hold them."""
    if dtype.is_complex:
        return torch.tensor([complex(value) for value in data], dtype=torch.complex128, device=device).to(dtype)
    real = [value.real for value in data]
    if dtype.is_floating_point or not all(isinstance(value, int) for value in real):
        return torch.tensor([float(value) for value in real], dtype=torch.float64, device=device).to(dtype)
    # torch reads integers as signed 64-bit integers, which have the same bits as unsigned ones
    signed = [value if value <= HIGHEST else value - UNSIGNED - 1 for value in map(int, real)]
    return torch.tensor(signed, dtype=torch.int64, device=device).to(dtype)


@value_models.register("constant")
@dataclass(frozen=True, slots=True)
class Constant:
    """The common value of all elements of a tensor of any size, which may be nan."""

    value: bool | int | float | complex

    priority: ClassVar[int] = 10
    seen: ClassVar[str] = PIECES

    @classmethod
    def fit(cls, tensor: torch.Tensor) -> Constant | None:
        """Return the model of a constant tensor, or None for other tensors."""
        first, last = (tensor[(at,) * tensor.dim()] for at in (0, -1))
        value, other = first.item(), last.item()
        if value != value:
            # nan is not equal to itself
            return cls(value) if other != other and bool(tensor.isnan().all()) else None
        return cls(value) if value == other and bool((tensor == first).all()) else None

    def check(self) -> None:
        """Raise `FormatError` unless the value is a number that a tensor can hold."""
        check_element(self.value)

    def draw(self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        """Return a tensor filled with the value."""
        return elements([self.value], dtype, generator.device)[0].expand(shape).clone()
