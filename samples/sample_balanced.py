"""A random choice of boxes to learn from, with a share of positives."""

from __future__ import annotations

import torch
from torch import Tensor


def sample_balanced(assigned: Tensor, count: int, positive_share: float) -> tuple[Tensor, Tensor]:
    """Indices of sampled positives and negatives.

    Parameters
    ----------
    assigned : (N,) int64: 0 and up for positives, -1 for negatives, as `assign_max_iou` gives them
    count : how many to choose; negatives fill what positives leave
    positive_share : at most this share of `count` is positive

    Returns
    -------
    positives (P,), negatives (Q,) int64, P + Q <= count

    Source: Ren et al. 2015, section 3.1.3.
    """
    positives = torch.nonzero(assigned >= 0).flatten()
    negatives = torch.nonzero(assigned == -1).flatten()
    wanted = min(int(count * positive_share), positives.numel())
    return _choose(positives, wanted), _choose(negatives, min(count - wanted, negatives.numel()))


def _choose(indices: Tensor, count: int) -> Tensor:
    return indices[torch.randperm(indices.numel(), device=indices.device)[:count]]
