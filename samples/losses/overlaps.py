"""Overlaps and distances of pairs of boxes: each box of one list, and the box of the same index in another list."""

import torch
from torch import Tensor


def area(boxes: Tensor) -> Tensor:
    """Return the areas, (N,) float, of boxes, (N, 4) float, x1 y1 x2 y2."""
    return (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])


def shared_area(boxes: Tensor, others: Tensor) -> Tensor:
    """Return the areas, (N,) float, of the intersections of pairs of boxes, one from `boxes` and one from `others`,
    both (N, 4) float, x1 y1 x2 y2.
    """
    corner = torch.max(boxes[:, :2], others[:, :2])
    extent = (torch.min(boxes[:, 2:], others[:, 2:]) - corner).clamp(min=0)
    return extent[:, 0] * extent[:, 1]


def overlap_ratio(boxes: Tensor, others: Tensor, eps: float) -> Tensor:
    """Return intersection over union, (N,) float, of pairs of boxes, both (N, 4) float; `eps` is added to the union."""
    shared = shared_area(boxes, others)
    return shared / (area(boxes) + area(others) - shared + eps)


def enclosing_size(boxes: Tensor, others: Tensor, smallest: float = 0.0) -> Tensor:
    """Return width and height, (N, 2) float, of the boxes around pairs of boxes, both (N, 4) float x1 y1 x2 y2.

    smallest : lower bound of the returned widths and heights
    """
    corner = torch.min(boxes[:, :2], others[:, :2])
    return (torch.max(boxes[:, 2:], others[:, 2:]) - corner).clamp(min=smallest)


def centre_shift(boxes: Tensor, others: Tensor) -> Tensor:
    """Return the shift in x and y, (N, 2) float, from the centre of each box to that of its pair in `others`; both are
    (N, 4) float, x1 y1 x2 y2.
    """
    return (others[:, :2] + others[:, 2:] - boxes[:, :2] - boxes[:, 2:]) / 2


def centre_distance(boxes: Tensor, others: Tensor, eps: float) -> Tensor:
    """Return squared distances, (N,) float, of the centres of pairs of boxes, divided by the squared diagonal of the
    box around both.

    eps : added to the squared diagonal

    Source: Zheng et al. 2020, equation 6.
    """
    diagonal = (enclosing_size(boxes, others) ** 2).sum(dim=1) + eps
    return (centre_shift(boxes, others) ** 2).sum(dim=1) / diagonal
