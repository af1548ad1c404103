"""Programs whose functions tests grip."""

from __future__ import annotations

import dataclasses
import enum
import threading
from collections import namedtuple
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Sizes = namedtuple("Sizes", "height width")


class Corner(enum.Enum):
    TOP = "top"
    BOTTOM = "bottom"


@dataclasses.dataclass
class Boxes:
    tensor: Tensor
    scores: Tensor | None = None


class Slotted:
    __slots__ = ("deep", "means", "missing")

    def __init__(self) -> None:
        self.means = (0.0, 1.0)
        self.deep = {"inside": [1, 2]}


class Coder:
    """Coder of boxes that counts its calls."""

    def __init__(self, scale: float = 2.0) -> None:
        self.scale = scale
        self.calls = 0
        self.lock = threading.Lock()
        self.me = self

    def decode(self, boxes: Tensor, *, clip: float | None = None) -> Tensor:
        self.calls += 1
        moved = boxes * self.scale
        return moved if clip is None else moved.clamp(max=clip)

    @staticmethod
    def area(boxes: Tensor) -> Tensor:
        return (boxes[:, 2:] - boxes[:, :2]).prod(dim=1)

    @classmethod
    def made(cls, scale: float) -> Coder:
        return cls(scale)


class Head(nn.Module):
    """Module with a parameter, a buffer, a module and a field."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 2)
        self.register_buffer("anchors", torch.arange(4.0))
        self.register_parameter("nothing", None)
        self.coder = Coder()
        self.optional = None

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(images + self.anchors)


def scaled(boxes: Tensor, by: float = 2.0) -> Tensor:
    return boxes * by


def kept(boxes: Tensor, scores: Tensor, threshold: float) -> tuple[Tensor, int]:
    mask = scores > threshold
    if mask.any():
        boxes = boxes[mask]
    return boxes, int(mask.sum().item())


def filled(boxes: Tensor, found: list[Tensor]) -> None:
    boxes[0] = 7
    found.append(boxes.sum())


def noisy(boxes: Tensor) -> Tensor:
    return boxes + torch.rand_like(boxes)


def drawn_by_numpy(boxes: Tensor) -> Tensor:
    return boxes * float(np.random.rand())


def summed(boxes: Boxes, sizes: Sizes, corner: Corner, table: np.ndarray, flag: np.float32, **more: Any) -> Any:
    total = boxes.tensor.sum() + float(table.sum()) + sizes.height + float(flag)
    return Sizes(total, corner), {"more": sorted(more)}


def halved(boxes: Tensor, depth: int) -> Tensor:
    return boxes if depth == 0 else halved(boxes / 2, depth - 1)


def failing(boxes: Tensor) -> Tensor:
    raise KeyError("no boxes")


def make_adder(by: int) -> Any:
    def add(boxes: Tensor) -> Tensor:
        return boxes + by

    return add


def adds(boxes: Tensor) -> Tensor:
    return make_adder(3)(boxes)


def streamed(boxes: Tensor) -> Iterator[Tensor]:
    yield boxes


async def awaited(boxes: Tensor) -> Tensor:
    return boxes


async def streamed_later(boxes: Tensor) -> AsyncIterator[Tensor]:
    yield boxes
