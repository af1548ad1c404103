"""What moves one box to another."""

from __future__ import annotations

import torch
from torch import Tensor


def encode_deltas(anchors: Tensor, boxes: Tensor) -> Tensor:
    """Deltas that move the anchors to the boxes; `decode_deltas` undoes it.

    Parameters
    ----------
    anchors, boxes : (N, 4) float, x1 y1 x2 y2 in pixels, with an area

    Returns
    -------
    (N, 4) float, dx dy relative to the anchor's size, dw dh as logarithms of ratios

    Source: Girshick et al. 2014, appendix C.
    """
    size = anchors[:, 2:] - anchors[:, :2]
    centre = anchors[:, :2] + size / 2
    wanted = boxes[:, 2:] - boxes[:, :2]
    shift = (boxes[:, :2] + wanted / 2 - centre) / size
    return torch.cat([shift, torch.log(wanted / size)], dim=1)
