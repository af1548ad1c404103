"""Boxes from deltas."""

from __future__ import annotations

from math import log

import torch
from torch import Tensor


def decode_deltas(
    anchors: Tensor, deltas: Tensor, image_size: tuple[int, int] | None = None, clip: float = log(1000 / 16)
) -> Tensor:
    """Boxes that the deltas move the anchors to.

    Parameters
    ----------
    anchors : (N, 4) float, x1 y1 x2 y2 in pixels
    deltas : (N, 4) float, dx dy dw dh relative to the anchor's size
    image_size : height and width in pixels that boxes are cut to; None leaves them
    clip : largest dw and dh, so that no exponential overflows

    Source: Girshick et al. 2014, appendix C.
    """
    size = anchors[:, 2:] - anchors[:, :2]
    centre = anchors[:, :2] + size / 2 + deltas[:, :2] * size
    half = size * deltas[:, 2:].clamp(max=clip).exp() / 2
    boxes = torch.cat([centre - half, centre + half], dim=1)
    if image_size is not None:
        height, width = image_size
        boxes = torch.stack(
            [
                boxes[:, 0].clamp(0, width),
                boxes[:, 1].clamp(0, height),
                boxes[:, 2].clamp(0, width),
                boxes[:, 3].clamp(0, height),
            ],
            dim=1,
        )
    return boxes
