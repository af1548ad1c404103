"""What boxes have in common with the box at the same place of another list."""

import torch
from torch import Tensor


def area(boxes: Tensor) -> Tensor:
    """Areas, (N,) float, of boxes, (N, 4) float, x1 y1 x2 y2."""
    return (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])


def shared_area(boxes: Tensor, others: Tensor) -> Tensor:
    """Areas, (N,) float, of the intersection of each box with its other, both (N, 4) float."""
    corner = torch.max(boxes[:, :2], others[:, :2])
    extent = (torch.min(boxes[:, 2:], others[:, 2:]) - corner).clamp(min=0)
    return extent[:, 0] * extent[:, 1]


def overlap_ratio(boxes: Tensor, others: Tensor, eps: float) -> Tensor:
    """Intersection over union, (N,) float, of each box with its other, eps being added to the union."""
    shared = shared_area(boxes, others)
    return shared / (area(boxes) + area(others) - shared + eps)


def enclosing_size(boxes: Tensor, others: Tensor, smallest: float = 0.0) -> Tensor:
    """Width and height, (N, 2) float, of the smallest box that holds a box and its other, both (N, 4) float."""
    corner = torch.min(boxes[:, :2], others[:, :2])
    return (torch.max(boxes[:, 2:], others[:, 2:]) - corner).clamp(min=smallest)


def centre_shift(boxes: Tensor, others: Tensor) -> Tensor:
    """Way in x and y, (N, 2) float, from the centre of each box to that of its other, both (N, 4) float."""
    return (others[:, :2] + others[:, 2:] - boxes[:, :2] - boxes[:, 2:]) / 2


def centre_distance(boxes: Tensor, others: Tensor, eps: float) -> Tensor:
    """Squared distances, (N,) float, of the centres, in squared diagonals of the enclosing box.

    Source: Zheng et al. 2020, equation 6.
    """
    diagonal = (enclosing_size(boxes, others) ** 2).sum(dim=1) + eps
    return (centre_shift(boxes, others) ** 2).sum(dim=1) / diagonal
