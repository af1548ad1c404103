"""Resizing of feature maps."""

import torch.nn.functional as F
from torch import Tensor


def resize(features: Tensor, like: Tensor, align_corners: bool = False) -> Tensor:
    """Resize features to the height and width of `like`, bilinear; return the same tensor if the sizes are equal.

    Parameters
    ----------
    features : (N, C, H, W) float
    like : (..., h, w)
    align_corners : as in `torch.nn.functional.interpolate`
    """
    if features.shape[-2:] == like.shape[-2:]:
        return features
    return F.interpolate(features, size=like.shape[-2:], mode="bilinear", align_corners=align_corners)
