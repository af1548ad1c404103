"""Features of boxes, sampled between cells."""

from __future__ import annotations

import torch
from torch import Tensor


def roi_align(features: Tensor, boxes: Tensor, batch: Tensor, size: int, scale: float, samples: int = 2) -> Tensor:
    """Average of bilinear samples in each bin of a grid over each box.

    Parameters
    ----------
    features : (B, C, H, W) float
    boxes : (N, 4) float, x1 y1 x2 y2 in pixels of the image
    batch : (N,) int64, which image each box is of
    size : bins along a side
    scale : cells of the map to a pixel
    samples : along each side of a bin

    Returns
    -------
    (N, C, size, size) float

    Source: He et al. 2017, section 3; half-pixel offset as in Detectron2's aligned version.
    """
    height, width = features.shape[2:]
    steps = (torch.arange(size * samples, device=boxes.device, dtype=boxes.dtype) + 0.5) / (size * samples)
    corner = boxes[:, :2] * scale - 0.5
    extent = (boxes[:, 2:] - boxes[:, :2]) * scale
    x = corner[:, 0:1] + extent[:, 0:1] * steps
    y = corner[:, 1:2] + extent[:, 1:2] * steps
    columns, column_weights = _neighbours(x, width)
    rows, row_weights = _neighbours(y, height)
    image = batch[:, None, None]
    sampled = features.new_zeros(())
    for row, row_weight in zip(rows, row_weights, strict=True):
        for column, column_weight in zip(columns, column_weights, strict=True):
            weight = row_weight[:, :, None] * column_weight[:, None, :]
            cells = features[image, :, row[:, :, None], column[:, None, :]]
            sampled = sampled + cells * weight[..., None]
    bins = sampled.reshape(-1, size, samples, size, samples, features.shape[1]).mean(dim=(2, 4))
    return bins.permute(0, 3, 1, 2)


def _neighbours(position: Tensor, cells: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The two cells beside each position, and their weights; positions a cell or more outside weigh nothing."""
    inside = (position > -1) & (position < cells)
    position = position.clamp(0, cells - 1)
    low = position.floor()
    fraction = position - low
    first = low.long()
    second = (first + 1).clamp(max=cells - 1)
    return (first, second), ((1 - fraction) * inside, fraction * inside)
