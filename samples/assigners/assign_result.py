"""What an assigner says of the boxes of an image."""

from typing import NamedTuple

import torch
from torch import Tensor


class AssignResult(NamedTuple):
    """Which truth each of N boxes is to learn.

    Attributes
    ----------
    gt_inds : (N,) int64: 1 and up for the truths, 0 for nothing, -1 for boxes that learn neither
    max_overlaps : (N,) float: overlap with the truth that is learned, or that is overlapped most, by assigner
    labels : (N,) int64: classes of the truths, -1 where there is none
    """

    gt_inds: Tensor
    max_overlaps: Tensor
    labels: Tensor


def nothing(count: int, like: Tensor) -> AssignResult:
    """The result where no truth is: so many boxes that all learn that there is nothing."""
    background = like.new_zeros(count, dtype=torch.long)
    return AssignResult(background, like.new_zeros(count), background - 1)


def labels_of(gt_inds: Tensor, gt_labels: Tensor) -> Tensor:
    """Classes (N,) of the assigned truths, -1 where there is none.

    Parameters
    ----------
    gt_inds : (N,) int64, as `AssignResult` has them
    gt_labels : (M,) int64
    """
    labels = torch.full_like(gt_inds, -1)
    positives = torch.nonzero(gt_inds > 0).squeeze(1)
    if positives.numel() > 0:
        labels[positives] = gt_labels[gt_inds[positives] - 1]
    return labels
