"""Points and anchors of a feature pyramid, for the arguments of assigners."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import torch
from torch import Tensor

STRIDES = (8, 16, 32, 64, 128)
"""In pixels, of the levels P3 to P7."""


def grid_points(size: tuple[int, int], strides: Sequence[int] = STRIDES) -> list[Tensor]:
    """Centres of the cells of each level, (N, 3) float: x, y and stride in pixels.

    Parameters
    ----------
    size : height and width of the image in pixels
    """
    levels = []
    for stride in strides:
        y, x = ((torch.arange(ceil(length / stride)) + 0.5) * stride for length in size)
        rows, columns = torch.meshgrid(y, x, indexing="ij")
        levels.append(torch.stack([columns, rows, torch.full_like(rows, stride)], dim=2).reshape(-1, 3))
    return levels


def grid_boxes(
    size: tuple[int, int],
    strides: Sequence[int] = STRIDES,
    scales: Sequence[float] = (8,),
    ratios: Sequence[float] = (1,),
) -> list[Tensor]:
    """Anchors of each level, (N, 4) float, x1 y1 x2 y2 in pixels.

    Parameters
    ----------
    size : height and width of the image in pixels
    scales : sides of the anchors in strides
    ratios : of height to width
    """
    shapes = torch.tensor([(scale / ratio**0.5, scale * ratio**0.5) for ratio in ratios for scale in scales])
    levels = []
    for points in grid_points(size, strides):
        centre, half = points[:, None, :2], shapes * points[:, None, 2:] / 2
        levels.append(torch.cat([centre - half, centre + half], dim=2).reshape(-1, 4))
    return levels
