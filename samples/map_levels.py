"""Which level of a feature pyramid a box is read from."""

from __future__ import annotations

from torch import Tensor


def map_levels(boxes: Tensor, levels: int, canonical_size: float = 224.0, canonical_level: int = 2) -> Tensor:
    """The level of each box: one up for each doubling of its side.

    Parameters
    ----------
    boxes : (N, 4) float, x1 y1 x2 y2 in pixels
    levels : how many there are
    canonical_size : side in pixels of a box that belongs to `canonical_level`

    Returns
    -------
    (N,) int64, 0 to levels - 1

    Source: Lin et al. 2017 (feature pyramid networks), equation 1.
    """
    side = (boxes[:, 2:] - boxes[:, :2]).clamp(min=0).prod(dim=1).sqrt()
    level = canonical_level + (side / canonical_size + 1e-6).log2().floor()
    return level.clamp(0, levels - 1).long()
