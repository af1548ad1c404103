"""Value models of square matrices that solvers require: positive definite and triangular ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from opgrip.traces.schema.arguments import FormatError
from opgrip.traces.values import drawing as checks
from opgrip.traces.values.model import value_models

LARGEST = 512  # maximum size of matrices that are tested for a Cholesky factor
LOOKED_AT = 4  # maximum number of matrices of a batch that are tested


@value_models.register("factorable")
@dataclass(frozen=True, slots=True)
class Factorable:
    """Value model of symmetric positive definite matrices (..., N, N), which have a Cholesky factor.

    diagonal : mean of the diagonal elements
    spread : root mean square of the other elements, relative to `diagonal`
    """

    diagonal: float
    spread: float

    priority: ClassVar[int] = 5
    on_request: ClassVar[bool] = True

    @classmethod
    def fit(cls, tensor: torch.Tensor) -> Factorable | None:
        """Return the model of float matrices of two or more rows if all examined ones have a Cholesky factor, else
        None.
        """
        matrices = _matrices(tensor)
        if matrices is None or matrices.shape[-1] > LARGEST:
            return None
        matrices = matrices.double()
        tolerance = 16 * torch.finfo(tensor.dtype).eps * float(matrices.abs().amax())
        if not float((matrices - matrices.mT).abs().amax()) <= tolerance:
            return None
        if bool(torch.linalg.cholesky_ex(matrices).info.any()):
            return None
        diagonal = matrices.diagonal(dim1=-2, dim2=-1)
        size, mean = matrices.shape[-1], diagonal.mean().item()
        rest = float(matrices.square().sum() - diagonal.square().sum()) / (matrices.numel() - diagonal.numel())
        return cls(mean, math.sqrt(max(0.0, rest)) / mean) if mean > 0 and size > 1 else None

    def check(self) -> None:
        checks.finite(self.diagonal, "a diagonal")
        checks.finite(self.spread, "a spread")
        if self.diagonal <= 0 or self.spread < 0:
            numbers = f"{self.diagonal} and {self.spread}"
            raise FormatError(f"matrices: expected a diagonal above 0 and a spread of at least 0, got {numbers}")

    def draw(self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        """Return positive definite matrices: products of random matrices with their transposes, mixed with identity."""
        if len(shape) < 2 or shape[-1] != shape[-2]:
            return _general_matrices(self.diagonal, shape, dtype, generator)
        size = shape[-1]
        values = torch.randn(shape, dtype=torch.float64, generator=generator, device=generator.device)
        # the off-diagonal elements of such a product have a root mean square of 1 / sqrt(size) for a diagonal of 1
        part = min(0.95, self.spread * math.sqrt(size))
        values = values @ values.mT * (part / size)
        values.diagonal(dim1=-2, dim2=-1).add_(1 - part)
        return (values * self.diagonal).to(dtype).contiguous()


@value_models.register("triangular")
@dataclass(frozen=True, slots=True)
class Triangular:
    """Value model of triangular matrices (..., N, N) without zeros on the diagonal.

    upper : True if the zeros are below the diagonal
    low, high : range of the absolute values of diagonal elements
    spread : root mean square of the non-zero triangle, without the diagonal
    negative : share of negative elements on the diagonal, 0 to 1
    """

    upper: bool
    low: float
    high: float
    spread: float
    negative: float

    priority: ClassVar[int] = 6
    on_request: ClassVar[bool] = True

    @classmethod
    def fit(cls, tensor: torch.Tensor) -> Triangular | None:
        matrices = _matrices(tensor)
        if matrices is None:
            return None
        upper = not bool(matrices.tril(-1).any())
        if not upper and bool(matrices.triu(1).any()):
            return None
        matrices = matrices.double()
        diagonal = matrices.diagonal(dim1=-2, dim2=-1)
        low, high = (float(bound) for bound in torch.aminmax(diagonal.abs()))
        if not 0 < low <= high < math.inf:
            return None
        rows = matrices.shape[-1]
        beside = (matrices.square().sum() - diagonal.square().sum()) / (matrices.numel() // rows * (rows - 1) / 2)
        negative = int(torch.count_nonzero(diagonal < 0)) / diagonal.numel()
        return cls(upper, low, high, math.sqrt(max(0.0, float(beside))), negative)

    def check(self) -> None:
        checks.flag(self.upper, "upper")
        for value in (self.low, self.high, self.spread):
            checks.finite(value, "an element of triangular matrices")
        checks.share(self.negative, "a share of negative elements")
        if not 0 < self.low <= self.high or self.spread < 0:
            numbers = f"{self.low}, {self.high} and {self.spread}"
            raise FormatError(f"matrices: expected 0 < low <= high and a spread of at least 0, got {numbers}")

    def draw(self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        """Return triangular matrices whose linear systems have bounded solutions, unlike those of random ones."""
        if len(shape) < 2 or shape[-1] != shape[-2]:
            return _general_matrices(self.high, shape, dtype, generator)
        device = generator.device
        values = torch.randn(shape, dtype=torch.float64, generator=generator, device=device)
        # small enough that a solution grows by a constant factor and not with a power of the size
        values *= min(self.spread, self.low / math.sqrt(shape[-1]))
        values = values.triu(1) if self.upper else values.tril(-1)
        parts = torch.rand((2, *shape[:-1]), dtype=torch.float64, generator=generator, device=device)
        diagonal = parts[0] * self.high + (1 - parts[0]) * self.low
        values.diagonal(dim1=-2, dim2=-1).add_(torch.where(parts[1] < self.negative, -diagonal, diagonal))
        return values.to(dtype).contiguous()


def _matrices(tensor: torch.Tensor) -> torch.Tensor | None:
    shape = tensor.shape
    if tensor.dim() < 2 or shape[-1] != shape[-2] or shape[-1] < 2 or not tensor.dtype.is_floating_point:
        return None
    if tensor.itemsize == 1:
        return None
    batch = tensor.reshape(-1, *shape[-2:])
    return batch[:: max(1, -(-len(batch) // LOOKED_AT))]


def _general_matrices(
    scale: float, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    values = torch.randn(shape, dtype=torch.float64, generator=generator, device=generator.device)
    return (values * scale).to(dtype)
