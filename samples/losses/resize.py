"""Feature maps at another's size."""

import torch.nn.functional as F
from torch import Tensor


def resize(features: Tensor, like: Tensor, align_corners: bool = False) -> Tensor:
    """Features at the height and width of others, bilinear; the same tensor where they have them.

    Parameters
    ----------
    features : (N, C, H, W) float
    like : (..., h, w)
    """
    if features.shape[-2:] == like.shape[-2:]:
        return features
    return F.interpolate(features, size=like.shape[-2:], mode="bilinear", align_corners=align_corners)
