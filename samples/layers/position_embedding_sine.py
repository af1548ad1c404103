from math import pi

import torch
from torch import Tensor

from opgrip.samples.sample import Arguments, Draw, sample


def inputs(draw: Draw, sizes: list[tuple[int, int]], features: int = 128, normalize: bool = True) -> Arguments:
    """Return the padding mask of a batch of images of different sizes.

    sizes : height and width of each image, in positions
    features, normalize : passed to `position_embedding_sine`
    """
    padding = torch.ones(len(sizes), max(height for height, _ in sizes), max(width for _, width in sizes)).bool()
    for image, (height, width) in zip(padding, sizes, strict=True):
        image[:height, :width] = False
    return padding, features, 10000.0, normalize


@sample(
    inputs,
    {
        "DETR R50, 800x1333, one image": ([(25, 42)],),
        "DETR R50, 800x1333, one of two images padded": ([(25, 42), (25, 34)],),
        "DETR R50-DC5, 800x1333, two of four images padded": ([(50, 84), (50, 67), (50, 84), (38, 50)],),
    },
    tags="IfElseBranch Broadcast ViewAttribute",
    url="https://github.com/facebookresearch/detr/blob/14602a71482082746399dd6bc5712a9aa8f804d2/models/position_encoding.py#L12",
    atol=1e-4,
)
def position_embedding_sine(
    padding: Tensor,
    features: int = 64,
    temperature: float = 10000.0,
    normalize: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Return sines and cosines of each position's row, then column, at geometrically decreasing frequencies.

    Parameters
    ----------
    padding : (B, H, W) bool, True for padding; rows and columns are counted inside the image, from 1
    features : number of features per row, and per column; even
    temperature : ratio of the wavelengths of the last and the first feature
    normalize : True to divide rows and columns by their number and multiply by `scale`
    scale : None for 2 pi

    Returns (B, 2 * features, H, W) float32

    Raises
    ------
    ValueError : if `scale` is given without `normalize`

    Source: Carion et al. 2020, "End-to-End Object Detection with Transformers" (DETR), fixed positional encodings.
    """
    if scale is not None and not normalize:
        raise ValueError("scale requires normalize=True")
    image = ~padding
    down, across = image.cumsum(1, dtype=torch.float32), image.cumsum(2, dtype=torch.float32)
    if normalize:
        reach = 2 * pi if scale is None else scale
        down = down / (down[:, -1:, :] + 1e-6) * reach
        across = across / (across[:, :, -1:] + 1e-6) * reach
    pairs = torch.arange(features, dtype=torch.float32, device=padding.device).div(2, rounding_mode="floor")
    wavelengths = temperature ** (2 * pairs / features)
    return torch.cat([_waves(down, wavelengths), _waves(across, wavelengths)], dim=3).permute(0, 3, 1, 2)


def _waves(positions: Tensor, wavelengths: Tensor) -> Tensor:
    """Return the sine of even and the cosine of odd features' angles, (B, H, W, features) float.

    positions : (B, H, W) float, row or column of each position
    wavelengths : (features,) float, divisors of the positions
    """
    angles = positions[..., None] / wavelengths
    return torch.stack([angles[..., 0::2].sin(), angles[..., 1::2].cos()], dim=4).flatten(3)
