"""Anchors at every place of a feature map."""

from __future__ import annotations

import torch
from torch import Tensor


def grid_anchors(height: int, width: int, stride: int, scale: float, ratios: tuple[float, ...], like: Tensor) -> Tensor:
    """Anchor boxes centred on the cells of a feature map, one for each ratio.

    Parameters
    ----------
    height, width : of the map, in cells
    stride : pixels of the image to a cell
    scale : the square root of an anchor's area, in strides
    ratios : height over width
    like : gives the device and dtype

    Returns
    -------
    (height * width * len(ratios), 4) float, x1 y1 x2 y2 in pixels; ratios vary fastest, then columns

    Source: Ren et al. 2015, section 3.1.1.
    """
    root = torch.tensor(ratios, device=like.device, dtype=like.dtype).sqrt()
    side = scale * stride
    half = torch.stack([side / root, side * root], dim=1) / 2
    base = torch.cat([-half, half], dim=1)
    x = (torch.arange(width, device=like.device, dtype=like.dtype) + 0.5) * stride
    y = (torch.arange(height, device=like.device, dtype=like.dtype) + 0.5) * stride
    rows, columns = torch.meshgrid(y, x, indexing="ij")
    centres = torch.stack([columns, rows, columns, rows], dim=2).reshape(-1, 1, 4)
    return (centres + base).reshape(-1, 4)
