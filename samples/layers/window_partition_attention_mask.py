from itertools import product

import torch
from torch import Tensor

from opgrip.samples.sample import Arguments, Draw, sample


def inputs(draw: Draw, height: int, width: int, channels: int, window: int) -> Arguments:
    """Return features of an image padded to multiples of the window, the size of a window, and half of it as shift.

    height, width, channels : sizes of the features before they are padded
    window : height and width of a window, in positions
    """
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
    """Return the mask added to the attention of each window after all windows were shifted.

    A window at an edge then covers up to four parts of opposite sides of the image, which must not attend to each
    other.

    Parameters
    ----------
    features : (B, H, W, C) float, only shape, dtype and device are used; H and W are multiples of `window`
    window : height and width of a window
    shift : shift of the windows down and right, more than 0 and less than `window`

    Returns (windows, window * window, window * window), 0 if both positions are in the same part, else -100
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
