"""Non-maximum suppression within each class."""

from __future__ import annotations

import torch
from torch import Tensor

from opgrip.samples.nms import nms


def multiclass_nms(
    boxes: Tensor, scores: Tensor, score_threshold: float, iou_threshold: float, candidates: int, limit: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Detections of all classes: boxes of one class do not suppress those of another.

    Parameters
    ----------
    boxes : (N, C, 4) float, a box for each class, x1 y1 x2 y2 in pixels
    scores : (N, C) float
    score_threshold : lower scores are left out
    iou_threshold : overlap above which the worse box of a class goes
    candidates : how many of the best scores are considered
    limit : how many detections are kept

    Returns
    -------
    boxes (K, 4), scores (K,), labels (K,) int64, by falling score
    """
    row, label = torch.nonzero(scores > score_threshold, as_tuple=True)
    values = scores[row, label]
    order = values.topk(min(candidates, values.numel())).indices
    row, label, values = row[order], label[order], values[order]
    found = boxes[row, label]
    # far enough apart that classes cannot overlap, also where coordinates are negative
    reach = found.max() - found.min() + 1 if found.numel() else 1.0
    kept = nms(found + (label * reach)[:, None], values, iou_threshold)[:limit]
    return found[kept], values[kept], label[kept]
