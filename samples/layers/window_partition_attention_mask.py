from itertools import product

import torch
from torch import Tensor

from opgrip.samples.sample import Draw, sample


def inputs(draw: Draw, height: int, width: int, channels: int, window: int) -> tuple[Tensor, int, int]:
    """Features of an image, padded to whole windows, that half a window is to be shifted."""
    padded = (-(-height // window) * window, -(-width // window) * window)
    return draw.normal(1, *padded, channels), window, window // 2


@sample(
    inputs,
    {
        "Swin-T, 224x224, first stage": (56, 56, 96, 7),
        "Swin-T, 800x1333, first stage": (200, 334, 96, 7),
        "Swin-L, 384x384, first stage": (96, 96, 192, 12),
    },
    tags="ForLoop InPlace Broadcast ViewAttribute",
    project="Swin Transformer",
    url="https://arxiv.org/abs/2103.14030",
)
def window_partition_attention_mask(features: Tensor, window: int, shift: int) -> Tensor:
    """What is added to the attention of each window once all windows were shifted.

    A window at an edge then holds parts of opposite sides of the image, up to four, that are no neighbours.

    Parameters
    ----------
    features : (B, H, W, C) float, of which shape, dtype and device count; height and width are multiples of `window`
    window : height and width of a window
    shift : by how much windows are shifted down and right, more than 0 and less than `window`

    Returns (windows, window * window, window * window), 0 where both positions are of one part, else -100
    Source: Liu et al. 2021, "Swin Transformer", section 3.2.
    """
    _, height, width, _ = features.shape
    parts = features.new_zeros(height, width)
    bands = (slice(0, -window), slice(-window, -shift), slice(-shift, None))
    for number, (rows, columns) in enumerate(product(bands, bands)):
        parts[rows, columns] = number
    tiles = parts.view(height // window, window, width // window, window).transpose(1, 2)
    windows = tiles.reshape(-1, window * window)
    crosses_parts = windows[:, :, None] != windows[:, None, :]
    return torch.zeros_like(crosses_parts, dtype=features.dtype).masked_fill(crosses_parts, -100.0)
