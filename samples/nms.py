"""Greedy non-maximum suppression."""

from __future__ import annotations

import torch
from torch import Tensor

from opgrip.samples.box_iou import box_iou


def nms(boxes: Tensor, scores: Tensor, threshold: float) -> Tensor:
    """Indices of the boxes that no better kept box overlaps by more than a threshold, best first.

    Parameters
    ----------
    boxes : (N, 4) float, x1 y1 x2 y2 in pixels
    scores : (N,) float
    threshold : intersection over union, 0 to 1

    Returns
    -------
    (K,) int64

    Source: Felzenszwalb et al. 2010, section 7.2.
    """
    overlap = box_iou(boxes, boxes) > threshold
    left = scores.argsort(descending=True, stable=True)
    kept = []
    while left.numel():
        best, left = left[0], left[1:]
        kept.append(best)
        left = left[~overlap[best, left]]
    return torch.stack(kept) if kept else left
