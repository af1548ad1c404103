"""Result of assigning ground truth to the boxes of an image."""

from typing import NamedTuple

import torch
from torch import Tensor


class AssignResult(NamedTuple):
    """Ground truth assigned to each of N boxes.

    Attributes
    ----------
    gt_inds : (N,) int64: index of the assigned truth plus 1, 0 for background, -1 for ignored boxes
    max_overlaps : (N,) float: overlap with the assigned truth or the largest overlap with any truth, depending on the
        assigner
    labels : (N,) int64: class of the assigned truth, -1 for unassigned boxes
    """

    gt_inds: Tensor
    max_overlaps: Tensor
    labels: Tensor


def nothing(count: int, like: Tensor) -> AssignResult:
    """Return the assignment of `count` boxes in an image without truths: all boxes are background.

    like : tensor whose dtype and device `max_overlaps` gets
    """
    background = like.new_zeros(count, dtype=torch.long)
    return AssignResult(background, like.new_zeros(count), background - 1)


def labels_of(gt_inds: Tensor, gt_labels: Tensor) -> Tensor:
    """Return the classes (N,) of the assigned truths, -1 for unassigned boxes.

    Parameters
    ----------
    gt_inds : (N,) int64, as in `AssignResult`
    gt_labels : (M,) int64, classes of the truths
    """
    labels = torch.full_like(gt_inds, -1)
    positives = torch.nonzero(gt_inds > 0).squeeze(1)
    if positives.numel() > 0:
        labels[positives] = gt_labels[gt_inds[positives] - 1]
    return labels
