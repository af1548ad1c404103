"""Random predictions and targets, as detection heads pass them to their losses."""

import torch
from torch import Tensor

from opgrip.samples.sample import Draw


def anchor_deltas(draw: Draw, anchors: int, positives: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return predicted deltas, targets, and weights, which are 0 except for positives, each (anchors, 4) float."""
    weight = torch.zeros(anchors, 4)
    weight[draw.permutation(anchors)[:positives]] = 1
    return draw.normal(anchors, 4, std=0.1, grad=True), draw.normal(anchors, 4) * weight, weight


def matched_boxes(
    draw: Draw, boxes: int, size: tuple[float, float] = (800.0, 1333.0), shift: float = 0.1
) -> tuple[Tensor, Tensor]:
    """Return predicted boxes, which require a gradient, and the truths matched to them, each (boxes, 4) float."""
    truths = draw.boxes(boxes, size)
    return draw.near(truths, shift, grad=True), truths
