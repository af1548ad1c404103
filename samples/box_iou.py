"""Overlap of boxes."""

from __future__ import annotations

import torch
from torch import Tensor


def box_iou(first: Tensor, second: Tensor) -> Tensor:
    """Intersection over union of every box with every other.

    Parameters
    ----------
    first : (N, 4) float, x1 y1 x2 y2 in pixels
    second : (M, 4) float, likewise

    Returns
    -------
    (N, M) float, 0 to 1; 0 where both boxes have no area

    Source: Everingham et al. 2010, section 4.2.
    """
    low = torch.maximum(first[:, None, :2], second[None, :, :2])
    high = torch.minimum(first[:, None, 2:], second[None, :, 2:])
    intersection = (high - low).clamp(min=0).prod(dim=2)
    areas = [(boxes[:, 2:] - boxes[:, :2]).clamp(min=0).prod(dim=1) for boxes in (first, second)]
    union = areas[0][:, None] + areas[1][None, :] - intersection
    return intersection / union.clamp(min=torch.finfo(union.dtype).tiny)
