"""Common step of assigners that choose candidates for each truth."""

import torch
from torch import Tensor

FAR = -100000000.0
"""Overlap of a box with a truth it cannot be assigned to."""


def settle(
    candidates: Tensor, positive: Tensor, overlaps: Tensor, priors: Tensor, gt_bboxes: Tensor
) -> tuple[Tensor, Tensor]:
    """Assign boxes to truths. A box must be a positive candidate, and its centre must be inside the truth.

    A box with more than one possible truth gets the one it overlaps most.

    Parameters
    ----------
    candidates : (K, M) int64, indices of boxes for each truth
    positive : (K, M) bool
    overlaps : (N, M) float, of boxes with truths
    priors, gt_bboxes : (N, 4) and (M, 4) float, x1 y1 x2 y2 in pixels

    Returns
    -------
    index of each box's truth plus 1, or 0, (N,) int64; its overlap, or `FAR`, (N,) float
    """
    centres = ((priors[:, :2] + priors[:, 2:]) / 2)[candidates]
    margins = torch.cat([centres - gt_bboxes[:, :2], gt_bboxes[:, 2:] - centres], dim=2)
    positive = positive & (margins.amin(dim=2) > 0.01)
    box = candidates[positive]
    truth = torch.arange(len(gt_bboxes), device=box.device).expand_as(candidates)[positive]
    claims = torch.full_like(overlaps, FAR)
    claims[box, truth] = overlaps[box, truth]
    overlap, owner = claims.max(dim=1)
    has_owner = overlap != FAR
    gt_inds = torch.zeros_like(owner)
    gt_inds[has_owner] = owner[has_owner] + 1
    return gt_inds, overlap
