"""Random predictions and targets, as detection heads pass them to their losses."""

import torch
from torch import Tensor

from opgrip.samples.sample import Draw


def anchor_deltas(draw: Draw, anchors: int, positives: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return predicted deltas, true deltas, and weights, each (anchors, 4) float.

    positives : number of random anchors with a weight of 1; all other weights and true deltas are 0
    """
    weight = torch.zeros(anchors, 4)
    weight[draw.permutation(anchors)[:positives]] = 1
    return draw.normal(anchors, 4, std=0.1, grad=True), draw.normal(anchors, 4) * weight, weight


def matched_boxes(
    draw: Draw, boxes: int, size: tuple[float, float] = (800.0, 1333.0), shift: float = 0.1
) -> tuple[Tensor, Tensor]:
    """Return predicted boxes, which require a gradient, and the truths matched to them, each (boxes, 4) float.

    Parameters
    ----------
    size : height and width of the image in pixels
    shift : distance of predictions from their truths, relative to the size of the truth
    """
    truths = draw.boxes(boxes, size)
    return draw.near(truths, shift, grad=True), truths
