"""Points and anchors of a feature pyramid, used as inputs of assigners."""

from collections.abc import Iterator, Sequence
from math import ceil

import torch
from torch import Tensor

from opgrip.samples.anchors.compute_locations import compute_locations
from opgrip.samples.anchors.gen_base_anchors import gen_base_anchors
from opgrip.samples.anchors.grid_anchors import grid_anchors

STRIDES = (8, 16, 32, 64, 128)
"""Strides of levels P3 to P7, in pixels."""


def grid_points(size: tuple[int, int], strides: Sequence[int] = STRIDES) -> list[Tensor]:
    """Return the centres of the cells of each level, (N, 3) float: x, y and stride in pixels.

    Parameters
    ----------
    size : height and width of the image in pixels
    strides : height and width of a cell of each level in pixels
    """
    levels = []
    for stride, cells in _levels(size, strides):
        points = compute_locations(cells, stride)
        levels.append(torch.cat([points, torch.full_like(points[:, :1], stride)], dim=1))
    return levels


def grid_boxes(
    size: tuple[int, int],
    strides: Sequence[int] = STRIDES,
    scales: Sequence[float] = (8.0,),
    ratios: Sequence[float] = (1.0,),
) -> list[Tensor]:
    """Return the anchors of each level, (N, 4) float, x1 y1 x2 y2 in pixels.

    Parameters
    ----------
    size : height and width of the image in pixels
    strides : height and width of a cell of each level in pixels
    scales : sides of the anchors in strides
    ratios : height divided by width
    """
    shapes = torch.tensor(scales), torch.tensor(ratios)
    return [
        grid_anchors(gen_base_anchors(stride, *shapes), cells, (stride, stride))
        for stride, cells in _levels(size, strides)
    ]


def _levels(size: tuple[int, int], strides: Sequence[int]) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield, for each level, its stride in pixels and its (height, width) in cells; `size` is the image's in pixels."""
    for stride in strides:
        yield stride, (ceil(size[0] / stride), ceil(size[1] / stride))
