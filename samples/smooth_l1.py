"""A loss that is square near zero and straight away from it."""

from __future__ import annotations

import torch
from torch import Tensor


def smooth_l1(predicted: Tensor, target: Tensor, beta: float = 1.0) -> Tensor:
    """Sum over all elements of the smooth L1 distance.

    Parameters
    ----------
    predicted, target : (N, D) float
    beta : distance at which the square becomes a line

    Source: Girshick 2015, equation 3; beta as in Ren et al. 2015.
    """
    distance = (predicted - target).abs()
    return torch.where(distance < beta, 0.5 * distance * distance / beta, distance - 0.5 * beta).sum()
