"""Which truth each box is to learn."""

from __future__ import annotations

import torch
from torch import Tensor


def assign_max_iou(overlaps: Tensor, positive: float, negative: float, keep_best: bool = True) -> Tensor:
    """Assign to each box the truth that it overlaps most.

    Parameters
    ----------
    overlaps : (N, M) float, intersection over union of N boxes with M truths
    positive : overlap from which a box learns its truth
    negative : overlap below which it learns that there is nothing
    keep_best : also give each truth the boxes that overlap it most, where they do at all

    Returns
    -------
    (N,) int64: the truth's index, -1 for nothing, -2 for boxes that learn neither

    Source: Ren et al. 2015, section 3.1.2.
    """
    assigned = overlaps.new_full((len(overlaps),), -2, dtype=torch.long)
    if overlaps.shape[1] == 0:
        return assigned.fill_(-1)
    best, truth = overlaps.max(dim=1)
    assigned[best < negative] = -1
    learns = best >= positive
    assigned[learns] = truth[learns]
    if keep_best:
        most = overlaps.max(dim=0).values
        box, owner = torch.nonzero((overlaps == most) & (most > 0), as_tuple=True)
        assigned[box] = owner
    return assigned
