"""The last step of assigners that first choose a few candidate boxes for each truth."""

import torch
from torch import Tensor

FAR = -100000000.0
"""Overlap that replaces the true one if a box cannot be assigned to a truth."""


def settle(
    candidates: Tensor, positive: Tensor, overlaps: Tensor, priors: Tensor, gt_bboxes: Tensor
) -> tuple[Tensor, Tensor]:
    """Assign each positive candidate to its truth if the centre of the box is inside the truth.

    A box that is a candidate of several truths is assigned to the truth that it overlaps most.

    Parameters
    ----------
    candidates : (K, M) int64, indices of the K candidate boxes of each of M truths
    positive : (K, M) bool, False for candidates that must not be assigned
    overlaps : (N, M) float, intersection over union of N boxes with M truths
    priors, gt_bboxes : (N, 4) and (M, 4) float, x1 y1 x2 y2 in pixels, the boxes and the truths

    Returns
    -------
    index of each box's truth plus 1, or 0 for none, (N,) int64; overlap of the box with this truth, or `FAR`, (N,)
    float
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
