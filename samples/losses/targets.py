"""Predictions and their targets, as the heads of detectors give them to their losses."""

import torch
from torch import Tensor

from opgrip.samples.sample import Draw


def anchor_deltas(draw: Draw, anchors: int, positives: int) -> tuple[Tensor, Tensor, Tensor]:
    """Predicted deltas, what they should be, and weights, 0 but for the positives, (anchors, 4) float each."""
    weight = torch.zeros(anchors, 4)
    weight[draw.permutation(anchors)[:positives]] = 1
    return draw.normal(anchors, 4, std=0.1, grad=True), draw.normal(anchors, 4) * weight, weight


def matched_boxes(
    draw: Draw, boxes: int, size: tuple[float, float] = (800.0, 1333.0), shift: float = 0.1
) -> tuple[Tensor, Tensor]:
    """Predicted boxes, which ask for a gradient, and the truths that they are matched to, (boxes, 4) float each."""
    truths = draw.boxes(boxes, size)
    return draw.near(truths, shift, grad=True), truths
