"""Value models of tensors with few different values: small and constant tensors, booleans, and one-hot rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from opgrip.traces.schema.arguments import FormatError
from opgrip.traces.values import drawing as checks
from opgrip.traces.values.drawing import HIGHEST, LOWEST, UNSIGNED, between, exactly, in_runs, runs_of, scaled, shuffled
from opgrip.traces.values.model import PIECES, ROWS, array_of, value_models

MAX_ELEMENTS = 64


@value_models.register("exact")
@dataclass(frozen=True, slots=True)
class Exact:
    data: list[bool | int | float | complex]

    priority: ClassVar[int] = 0

    @classmethod
    def fit(cls, tensor: torch.Tensor) -> Exact | None:
        if tensor.numel() > MAX_ELEMENTS:
            return None
        return cls(tensor.reshape(-1).tolist())

    def check(self) -> None:
        checks.listed(self.data, "exact values", 1, MAX_ELEMENTS)
        for value in self.data:
            check_element(value)

    def draw(self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        values = elements(self.data, dtype, generator.device)
        count = torch.Size(shape).numel()
        return values.repeat(-(-count // len(self.data)))[:count].reshape(shape)


def check_element(value: Any) -> None:
    if not isinstance(value, bool | int | float | complex):
        raise FormatError(f"exact values: expected a number, got {str(value)[:40]}")
    if isinstance(value, int) and not LOWEST <= value <= UNSIGNED:
        raise FormatError(f"exact values: the integer {str(value)[:40]} has more than 64 bits")


def elements(data: list[bool | int | float | complex], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
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
    value: bool | int | float | complex

    priority: ClassVar[int] = 10
    examined_part: ClassVar[str] = PIECES

    @classmethod
    def fit(cls, tensor: torch.Tensor) -> Constant | None:
        first, last = (tensor[(at,) * tensor.dim()] for at in (0, -1))
        value, other = first.item(), last.item()
        if value != value:
            # nan is not equal to itself
            return cls(value) if other != other and bool(tensor.isnan().all()) else None
        return cls(value) if value == other and bool((tensor == first).all()) else None

    def check(self) -> None:
        check_element(self.value)

    def draw(self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        return elements([self.value], dtype, generator.device)[0].expand(shape).clone()


@value_models.register("booleans")
@dataclass(frozen=True, slots=True)
class Booleans:
    """Value model of booleans, which keeps the number of True elements.

    runs : number of runs of consecutive True elements in row-major order
    """

    true: int
    total: int
    runs: int | None = None

    priority: ClassVar[int] = 20
    examined_part: ClassVar[str] = PIECES

    @classmethod
    def fit(cls, tensor: torch.Tensor) -> Booleans | None:
        if tensor.dtype != torch.bool:
            return None
        flat = array_of(tensor).reshape(-1)
        return cls(int(np.count_nonzero(flat)), len(flat), runs_of(flat))

    def check(self) -> None:
        checks.whole(self.total, "a count of booleans", 1)
        checks.whole(self.true, "a count of true booleans", 0, self.total)
        if self.runs is not None:
            checks.whole(self.runs, "a count of runs", 0, min(self.true, self.total - self.true + 1))
            if self.true and not self.runs:
                raise FormatError(f"runs of true booleans: expected at least 1 for {self.true:,} true booleans, got 0")

    def draw(self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        count = torch.Size(shape).numel()
        true = scaled(self.true, self.total, count)
        if self.runs is None or true in (0, count):
            return exactly(true, count, generator).reshape(shape).to(dtype)
        return in_runs(true, count, scaled(self.runs, self.total, count), generator).reshape(shape).to(dtype)


FREQUENT = 64


@value_models.register("one_hot")
@dataclass(frozen=True, slots=True)
class OneHot:
    """Value model of one-hot rows along the last dimension, which keeps the frequency of each class.

    classes : length of a row
    frequent : (class, count) of at most 64 classes
    others : number of rows of other classes
    """

    classes: int
    frequent: list[list[int]]
    others: int

    priority: ClassVar[int] = 15
    examined_part: ClassVar[str] = ROWS

    @classmethod
    def fit(cls, tensor: torch.Tensor) -> OneHot | None:
        if tensor.dim() < 2 or tensor.shape[-1] < 2 or tensor.dtype.is_complex:
            return None
        first = tensor[(0,) * (tensor.dim() - 1)]
        if int(torch.count_nonzero(first != 0)) != 1 or not bool((first == 1).any()):
            return None
        rows = tensor.numel() // tensor.shape[-1]
        ones = tensor == 1
        if int(torch.count_nonzero(ones)) != rows or not bool((ones | (tensor == 0)).all()):
            return None
        counts = ones.reshape(rows, -1).sum(0)
        if not bool((ones.sum(-1) == 1).all()):
            return None
        most, classes = counts.topk(min(FREQUENT, len(counts)))
        frequent = [[at, count] for at, count in zip(classes.tolist(), most.tolist(), strict=True) if count]
        return cls(tensor.shape[-1], frequent, rows - sum(count for _, count in frequent))

    def check(self) -> None:
        checks.whole(self.classes, "a count of classes", 1)
        checks.counted(self.frequent, "frequent classes", FREQUENT)
        for at, _ in self.frequent:
            checks.whole(at, "a frequent class", 0, self.classes - 1)
        checks.whole(self.others, "a count of rows", 0, checks.HIGHEST - sum(count for _, count in self.frequent))
        checks.whole(self.others + sum(count for _, count in self.frequent), "a count of rows", 1)

    def draw(self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        length = shape[-1] if shape else 1
        rows, device = torch.Size(shape).numel() // length, generator.device
        total = self.others + sum(count for _, count in self.frequent)
        repeats = torch.tensor([count * rows // total for _, count in self.frequent], dtype=torch.int64, device=device)
        classes = torch.tensor([at for at, _ in self.frequent], dtype=torch.int64, device=device)
        others = between(0, self.classes - 1, rows - int(repeats.sum()), generator)
        if not self.others and len(classes):
            others = classes[:1].expand(len(others))
        ones = shuffled(torch.cat([classes.repeat_interleave(repeats), others]), generator) % length
        values = torch.zeros(rows, length, dtype=torch.bool, device=device)
        values.scatter_(1, ones[:, None], True)
        return values.reshape(shape).to(dtype)
