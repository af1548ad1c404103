"""Rows of which one element is one and all others zero."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from opgrip.traces.values import drawing as checks
from opgrip.traces.values.drawing import between, shuffled
from opgrip.traces.values.model import ROWS, value_models

FREQUENT = 64


@value_models.register("one_hot")
@dataclass(frozen=True, slots=True)
class OneHot:
    """How often a class is the one, along the last dimension.

    Attributes
    ----------
    classes : length of a row
    frequent : (class, count) of at most 64 classes, the most frequent first
    others : rows of other classes
    """

    classes: int
    frequent: list[list[int]]
    others: int

    priority: ClassVar[int] = 15
    seen: ClassVar[str] = ROWS

    @classmethod
    def fit(cls, tensor: torch.Tensor) -> OneHot | None:
        """The model of a tensor of two classes or more."""
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
        """Classes of a row, and counts."""
        checks.whole(self.classes, "a count of classes", 1)
        checks.counted(self.frequent, "frequent classes", FREQUENT)
        for at, _ in self.frequent:
            checks.whole(at, "a frequent class", 0, self.classes - 1)
        checks.whole(self.others, "a count of rows", 0, checks.HIGHEST - sum(count for _, count in self.frequent))
        checks.whole(self.others + sum(count for _, count in self.frequent), "a count of rows", 1)

    def draw(self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        """Each class as often, in random order; classes in their shares for another number of rows."""
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
